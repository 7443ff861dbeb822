"""The norm of parts equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import norm_parts as module
from tests.kernels.running import DEVICE, close, compiles, interpret, on_gpu

CASES = [(6, 4, 16), (3, 1, 24), (1, 1, 40), (40, 32, 8)]
if DEVICE == "cuda":
    CASES = [(40, 32, 128), (36, 32, 128), (3, 1, 576), (3, 1, 4096), (4, 1, 7168)]
"""(parts, parts of the first weights, size)."""


def run_grid() -> None:
    """Heads cut out of wider rows, and stacked states; then each row alone."""
    for number, (parts, each, size) in enumerate(CASES):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(5, parts + 2, size, generator=generator) * 3
        x = x.to(DEVICE, dtype)[:, :parts]
        count = -(-parts // each)
        weights = tuple(
            torch.randn(size, generator=generator).to(DEVICE, dtype) for _ in range(count)
        )
        found = module.norm_parts_triton(x, weights, each, 1e-5)
        close(found, module.norm_parts_reference(x, weights, each, 1e-5))
        for r in range(5):
            alone = module.norm_parts_triton(x[r : r + 1], weights, each, 1e-5)
            assert torch.equal(alone[0], found[r]), "a row depends on other rows"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: another group's weight, strides, the last tile of parts."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU, at the sizes of real models."""
    run_grid()


def test_reference_is_a_norm_for_each_group() -> None:
    """Fault: groups cut at the wrong part."""
    x, ones = torch.randn(2, 5, 8), torch.ones(8)
    found = module.norm_parts(x, (ones, 2 * ones), 3, 1e-6)
    unit = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found[:, :3], unit[:, :3])
    torch.testing.assert_close(found[:, 3:], 2 * unit[:, 3:])


@pytest.mark.parametrize(("tile", "block"), [(16, 128), (1, 4096)])
def test_compiles_for_hopper(tile: int, block: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    names = ("x_ptr", "w0_ptr", "w1_ptr", "w2_ptr", "w3_ptr", "out_ptr")
    types = dict.fromkeys(names, "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(("row_stride", "part_stride", "parts", "each", "size"), "i32")
    compiles(module._norm_parts_kernel, types, {"WEIGHTS": 3, "PARTS": tile, "BLOCK": block})


if __name__ == "__main__":
    run_grid()
