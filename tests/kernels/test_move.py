"""Accepted entries move together; through Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.kernels import move as module
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu

LATENT = AttentionShape(
    num_layers=2, num_kv_heads=1, key_dim=24, value_dim=16, scale=1.0, latent=True
)
SHAPES = (AttentionShape.heads(2, 2, 24), AttentionShape.heads(3, 1, 16), LATENT)


def pools(shape: AttentionShape) -> tuple[KVPool, KVPool]:
    """Two of the same random content, pages of 4."""
    kinds: dict[str, Any] = {"num_pages": 20, "page_size": 4, "dtype": torch.float32}
    made = tuple(KVPool(shape, device=torch.device(DEVICE), **kinds) for _ in range(2))
    for ours, theirs in zip(made[0].kept, made[1].kept, strict=True):
        ours.normal_()
        theirs.copy_(ours)
    return made[0], made[1]


def run_grid() -> None:
    """Paths that overlap their places, over page edges, and one past its table."""
    for shape in SHAPES:
        ours, theirs = pools(shape)
        order = torch.randperm(19, generator=torch.Generator().manual_seed(1)) + 1
        table = order[:18].view(3, 6).to(DEVICE)
        lens = torch.tensor([3, 9, 18], device=DEVICE)
        path = [[0, 2, 3, 5, 0, 0], [0, 1, 2, 3, 4, 5], [0, 3, 4, 0, 0, 0]]
        counts = torch.tensor([4, 6, 3], device=DEVICE)
        given = (table, lens, torch.tensor(path, device=DEVICE), counts)
        module.keep_path_triton(ours, *given)
        module.keep_path_reference(theirs, *given)
        for a, b in zip(ours.kept, theirs.kept, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: an entry overwritten before it moved, another page, layer or head."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize(("dim", "places"), [(64, 8), (128, 16), (576, 8), (128, 64)])
def test_compiles_for_hopper(dim: int, places: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    names = ("table_ptr", "kv_lens_ptr", "path_ptr", "counts_ptr")
    types = dict.fromkeys(("k_ptr", "v_ptr"), "*bf16") | dict.fromkeys(names, "*i64")
    types |= dict.fromkeys(("places", "columns", "page_size", "heads"), "i32")
    types |= dict.fromkeys(("k_stride", "v_stride", "k_dim", "v_dim"), "i32")
    block = 1 << (dim - 1).bit_length()
    compiles(module._move_kv_kernel, types, {"PLACES": places, "BLOCK": block})


if __name__ == "__main__":
    run_grid()
