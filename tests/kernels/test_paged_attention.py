"""The Triton kernel equals the torch reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eyas
from eyas.attention.reference import ReferenceAttention
from eyas.attention.triton import TritonAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID = list(itertools.product((1, 4, 16, 64), (1, 3, 4), ("none", "tree")))


def compare(num_new: int, group: int, masked: bool, page_size: int, seed: int) -> float:
    """Largest difference of the kernel from the reference on random pages and masks."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads, dim, num_requests = 2, 16, 3
    prefix = torch.tensor([0, 37, 90])
    tail_offset = 0 if num_new > 16 or not masked else 3
    longest = int(prefix.max()) + tail_offset + num_new
    per_request = -(-longest // page_size)
    num_pages = num_requests * per_request + 1
    table = torch.randperm(num_pages - 1, generator=generator)[: num_requests * per_request] + 1
    pool = KVPool(
        AttentionShape.heads(2, kv_heads, dim),
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float32,
        device=torch.device(DEVICE),
    )
    pool.k.normal_()
    pool.v.normal_()
    rows = num_requests * num_new
    q = torch.randn(rows, kv_heads * group, dim, generator=generator).to(DEVICE)
    k = torch.randn(rows, kv_heads, dim, generator=generator).to(DEVICE)
    v = torch.randn(rows, kv_heads, dim, generator=generator).to(DEVICE)
    bits = torch.randint(0, 2**62, (rows,), generator=generator)
    bits |= 1 << (tail_offset + torch.arange(num_new).repeat(num_requests)).clamp(max=62)
    bits = (bits & ((1 << min(tail_offset + num_new, 62)) - 1)) | 1
    batch = ForwardBatch(
        mode=ForwardMode.TARGET_VERIFY,
        tokens=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        prefix_lens=prefix.to(DEVICE),
        page_table=table.view(num_requests, per_request).to(DEVICE),
        num_new=num_new,
        max_kv_len=longest,
        ancestors=bits.to(DEVICE) if masked else None,
        tail_offset=tail_offset,
    )
    expected = ReferenceAttention(pool).begin(batch)(1, q, k, v)
    found = TritonAttention(pool).begin(batch)(1, q, k, v)
    return float((expected - found).abs().max())


def run_grid() -> None:
    """Every case of the grid; raises on the first that differs."""
    for seed, (num_new, group, kind) in enumerate(GRID):
        for page_size in (1, 16, 64):
            difference = compare(num_new, group, kind == "tree", page_size, seed)
            assert difference < 2e-5, f"{num_new=} {group=} {kind=} {page_size=}: {difference}"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Masks, pages, groups and tiles, in a process whose Triton interprets."""
    source = str(Path(eyas.__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source}
    subprocess.run([sys.executable, str(Path(__file__))], env=environment, check=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_kernel_equals_reference() -> None:
    """The same grid on the GPU."""
    run_grid()


if __name__ == "__main__":
    run_grid()
