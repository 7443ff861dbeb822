"""The gate kernel equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import gated
from tests.kernels.running import DEVICE, close, compiles, interpret, on_gpu

SIZES = (8, 1030) if DEVICE == "cpu" else (8, 1408, 1536, 14336)


def run_grid() -> None:
    """Every size in both dtypes, of rows that are slices of wider ones; then each row alone."""
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(size)
            wide = torch.randn(3, 2 * size + 8, generator=generator) * 4
            both = wide.to(DEVICE, dtype)[:, : 2 * size]
            found = gated.gated_triton(both)
            close(found, gated.gated_reference(both))
            for r in range(3):
                alone = gated.gated_triton(both[r : r + 1])
                assert torch.equal(alone[0], found[r]), "a row depends on other rows"
    edges = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 2.0]], device=DEVICE)
    close(gated.gated_triton(edges), gated.gated_reference(edges))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: halves exchanged, the last tile, one rounding too few, overflow of exp."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU, at the sizes of real models."""
    run_grid()


def test_compiles_for_hopper() -> None:
    """Fault: a kernel that only the interpreter takes."""
    types = {"both_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32", "size": "i32"}
    compiles(gated._gated_kernel, types, {"BLOCK": gated.BLOCK})


if __name__ == "__main__":
    run_grid()
