"""The norm kernels equal their references; through Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from eyas.kernels import norm
from eyas.kernels.lang import block_of, runs_kernels
from tests.kernels.running import DEVICE, close, compiles, interpret, on_gpu

SIZES = (8, 24, 64) if DEVICE == "cpu" else (8, 576, 2048, 4096, 7168)
TYPES = (torch.float32, torch.bfloat16)


def make(size: int, dtype: torch.dtype, rows: int = 5) -> tuple[torch.Tensor, ...]:
    """Two inputs (the first a slice of wider rows) and two weights."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(rows, size + 16, generator=generator) * 3
    other = torch.randn(rows, size, generator=generator)
    weights = torch.randn(2, size, generator=generator)
    x, delta, (w, u) = (t.to(DEVICE, dtype) for t in (wide, other, weights))
    return x[:, 8 : size + 8], delta, w, u


def run_grid() -> None:
    """Every function at every size, in both dtypes; then each row alone."""
    for size, dtype in itertools.product(SIZES, TYPES):
        x, delta, w, u = make(size, dtype)
        close(norm.rms_norm_triton(x, w, 1e-5), norm.rms_norm_reference(x, w, 1e-5))
        found = norm.add_rms_norm_triton(x, delta, w, 1e-5)
        wanted = norm.add_rms_norm_reference(x, delta, w, 1e-5)
        close(found[0], wanted[0])
        if DEVICE == "cuda" or dtype == torch.float32:  # the interpreter truncates to 16 bits
            assert torch.equal(found[1], wanted[1]), "the residual is exact"
        close(found[1], wanted[1])
        pair = norm.rms_norm_pair_triton(x, delta, w, u, 1e-5)
        close(pair, norm.rms_norm_pair_reference(x, delta, w, u, 1e-5))
        for r in range(5):
            alone = norm.add_rms_norm_triton(x[r : r + 1], delta[r : r + 1], w, 1e-5)
            assert torch.equal(alone[0][0], found[0][r]), "a row depends on other rows"
    heads = torch.randn(3, 2, 24, device=DEVICE)
    w = torch.randn(24, device=DEVICE)
    close(norm.rms_norm_triton(heads, w, 1e-5), norm.rms_norm_reference(heads, w, 1e-5))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_references() -> None:
    """Fault: weight before the cast, residual rounded late, strides, lanes past the row."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_references() -> None:
    """The same on the GPU, at the sizes of real models."""
    run_grid()


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("size", [576, 4096, 7168])
def test_compiles_for_hopper(size: int, top_k: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    block = block_of(size)
    names = ("x_ptr", "delta_ptr", "w_ptr", "out_ptr", "total_ptr")
    pointers = dict.fromkeys(names, "*bf16")
    pointers |= {"chance_ptr": "*fp32", "more_ptr": "*bf16"}
    integers = dict.fromkeys(("x_stride", "delta_stride", "more_stride", "size"), "i32")
    constants = {"ADD": True, "TOP_K": top_k, "MORE": top_k > 0, "BLOCK": block}
    compiles(norm._norm_kernel, pointers | integers | {"eps": "fp32"}, constants)


def test_gradients_take_the_reference() -> None:
    """Fault: training on a GPU through a kernel without a backward pass."""
    x = torch.randn(2, 8, requires_grad=True)
    norm.rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert not runs_kernels(x), "a CPU tensor has no kernel"


if __name__ == "__main__":
    run_grid()
