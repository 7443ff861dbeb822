"""Products a head equal their reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import absorb as module
from eyas.kernels.norm import Norm
from tests.kernels.running import DEVICE, assert_asked_early, close, compiles, interpret, on_gpu

CASES = [(3, 16, 40, 8), (2, 160, 24, 0)]
if DEVICE == "cuda":
    CASES = [(16, 128, 512, 64), (16, 512, 128, 0), (128, 128, 512, 64), (3, 16, 40, 8)]
"""(heads, inputs, outputs, tail)."""
KINDS = (torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16)
"""The interpreter does not multiply bfloat16."""


def run_grid() -> None:
    """Queries and weights that are views, both orders of weights, tiles of rows; rows alone."""
    for number, (heads, inputs, outputs, tail) in enumerate(CASES):
        dtype = KINDS[number % 2]
        for count in (1, 5, 19):
            generator = torch.Generator().manual_seed(count)
            wide = torch.randn(count, heads, inputs + tail, generator=generator).to(DEVICE, dtype)
            x, behind = wide.split((inputs, tail), dim=-1)
            w = torch.randn(heads, inputs, outputs, generator=generator) * inputs**-0.5
            w = w.to(DEVICE, dtype)
            w = w if tail else w.mT.contiguous().mT
            given = (x, w, behind if tail else None)
            found, wanted = (
                module.head_product_triton(*given),
                module.head_product_reference(*given),
            )
            assert found.shape == (count, heads, outputs + tail)
            rtol = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol)
            if tail:
                assert torch.equal(found[..., outputs:], behind), "the tail is copied"
            last = slice(count - 1, count)
            alone = module.head_product_triton(x[last], w, behind[last] if tail else None)
            assert torch.equal(alone[0], found[-1]), "a row depends on other rows"
            check_fixed(x, w, found[..., :outputs])
            if tail:
                check_latents(x, w, behind, found)


def check_latents(
    x: torch.Tensor, w: torch.Tensor, behind: torch.Tensor, found: torch.Tensor
) -> None:
    """Keys are normed beside the products, whose bits stay; alike in passes of any size."""
    (rows, _, _), size = x.shape, w.shape[2]
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, 3 + size + behind.shape[2], generator=generator) * 3
    weight = torch.randn(size, generator=generator).to(x.device, x.dtype)
    kept = wide.to(x.device, x.dtype)[:, 3:]
    latents = module.Latents(kept, Norm(weight=weight, eps=1e-5))
    queries, keys = module.absorb_triton(x, w, behind, latents)
    assert torch.equal(queries, found), "norms beside the products change them"
    wanted = module.latents_reference(latents)
    close(keys[:, :size], wanted[:, :size])
    assert torch.equal(keys[:, size:], kept[:, size:]), "rotary keys are copied"
    last = slice(rows - 1, rows)
    one = module.Latents(kept[last], latents.norm)
    alone = module.absorb_triton(x[last], w, behind[last], one)
    assert torch.equal(alone[1][0], keys[-1]), "a row depends on other rows"
    times = 1 + module.MOST_ROWS // rows
    many = module.Latents(kept.repeat(times, 1), latents.norm)
    views = (x.repeat(times, 1, 1), w, behind.repeat(times, 1, 1))
    with torch.inference_mode():
        for fixed in (False, True):
            given, made = module.absorb(*views, many, fixed)
            assert torch.equal(made, keys.repeat(times, 1)), "keys depend on how many there are"
            assert given.shape == (times * rows, *queries.shape[1:])
        assert torch.equal(given, queries.repeat(times, 1, 1)), "queries depend on how many"


def check_fixed(x: torch.Tensor, w: torch.Tensor, few: torch.Tensor) -> None:
    """Where the way is fixed, many rows have the bits of few."""
    times = 1 + module.MOST_ROWS // x.shape[0]
    with torch.inference_mode():
        many = module.head_product(x.repeat(times, 1, 1), w, fixed=True)
    assert torch.equal(many, few.repeat(times, 1, 1)), "rows depend on how many there are"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: another head's matrix, a row lost at a tile's edge, the tail at the wrong place.

    And a latent left out by the programs that norm, or normed with what stands behind it.
    """
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU, at the shapes of real models."""
    run_grid()


@pytest.mark.parametrize(("outputs", "tail", "keys"), [(64, 64, 1024), (32, 0, 0)])
def test_compiles_for_hopper(outputs: int, tail: int, keys: int) -> None:
    """Faults: a kernel that only the interpreter takes; weights that wait for their turn."""
    names = module._absorb_kernel.arg_names
    types = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in names if n.islower()}
    sizes = {"ROWS": module.ROWS, "OUTPUTS": outputs, "DEPTH": module.DEPTH}
    constants = {"EVEN": True, "TAIL": tail, "KEYS": keys} | sizes
    assembly = compiles(module._absorb_kernel, types | {"eps": "fp32"}, constants).asm["ptx"]
    assert_asked_early(assembly, turns=1 + (keys > 0))


if __name__ == "__main__":
    run_grid()
