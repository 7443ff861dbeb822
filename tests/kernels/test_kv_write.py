"""Keys and values in their pages: as the torch pool writes them, whoever writes them."""

from __future__ import annotations

import pytest
import torch

from eyas.attention.rope import rotate
from eyas.attention.triton import TritonAttention
from eyas.kernels.kv_write import write_kv
from eyas.kv.pool import flat_rows
from tests.kernels.attention_cases import Case, Pages, Sequence, Tail
from tests.kernels.running import DEVICE, interpret, on_gpu

CASES = [
    Case(rope_dim=16),
    Case(key_dim=24, value_dim=24, rope_dim=8, page_size=3),
    Case(kv_heads=1, key_dim=48, value_dim=32, latent=True, rope_dim=16, dtype=torch.float16),
]


def pages_of(case: Case, prefix: int, count: int, *, short: bool = False) -> Pages:
    """One request with `count` new rows; `short` takes away its last page."""
    sequence = Sequence.random(case, prefix + count, 0)
    sequence.k[prefix, :, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    tail = Tail(sequence=sequence, prefix=prefix, index=list(range(prefix, prefix + count)))
    pages = Pages(case, [tail])
    if short:
        pages.table = pages.table[:, :-1]
    return pages


def check(case: Case, *, short: bool) -> None:
    """The kernel and the fused attention leave the bytes that rotation and pool leave."""
    prefix, count = 21, 20
    wanted, apart, fused = (pages_of(case, prefix, count, short=short) for _ in range(3))
    _, k, v, *rope = wanted.tails[0].sequence.picked(wanted.tails[0].index)
    tables = (rope[0], rope[1])
    places = torch.arange(prefix, prefix + count, device=DEVICE)[None]
    rows = flat_rows(wanted.table, places, case.page_size)[0]
    wanted.pool.write(1, rows, rotate(k, tables), v)
    backend = TritonAttention(apart.pool, programs=8, workspace_bytes=2**20)
    pooled = (apart.pool.k[1], apart.pool.v[1])
    write_kv(k, v, backend.layout, *pooled, apart.batch(), tables)
    fused.run(TritonAttention(fused.pool, programs=8, workspace_bytes=2**22))
    for found in (apart.pool, fused.pool):
        for ours, theirs in ((found.k, wanted.pool.k), (found.v, wanted.pool.v)):
            own = slice(case.page_size, None)  # page 0 holds whatever fell there last
            assert torch.allclose(ours[:, :, own].float(), theirs[:, :, own].float(), atol=1e-6)
            assert torch.isfinite(ours.float()).all(), "what is not finite is kept as zero"
    assert torch.equal(apart.pool.k[:, :, case.page_size :], fused.pool.k[:, :, case.page_size :])
    assert not apart.pool.k[1, 0, rows[0], :3].any() or case.rope_dim == case.key_dim


def run_cases() -> None:
    """Every case, with and without all of its pages."""
    for case in CASES:
        for short in (False, True):
            check(case, short=short)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_keep_what_the_pool_keeps() -> None:
    """Fault: pages of others written, rotation rounded early, NaN kept for others to read."""
    interpret(__file__)


@on_gpu
def test_kernels_keep_what_the_pool_keeps() -> None:
    """The same on the GPU."""
    run_cases()


if __name__ == "__main__":
    run_cases()
