"""Pages: none is lost, none is lent twice, and positions fall where they belong."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from eyas.errors import CapacityError
from eyas.kv.pool import DUMMY_PAGE, KVPool, PageAllocator, flat_rows
from eyas.model_config import AttentionShape

CPU = torch.device("cpu")


def make_pool(page_size: int, num_pages: int = 9) -> KVPool:
    return KVPool(
        AttentionShape.heads(2, 3, 4),
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.mark.parametrize("seed", range(5))
def test_random_lending_loses_nothing(seed: int) -> None:
    """Fault: KV leaks. A thousand random loans and returns; the dummy page is never lent."""
    rng = random.Random(seed)
    allocator = PageAllocator(40)
    owned: list[list[int]] = []
    for _ in range(1000):
        if owned and rng.random() < 0.5:
            allocator.free(owned.pop(rng.randrange(len(owned))))
        else:
            want = rng.randrange(0, 12)
            if want > allocator.num_free:
                before = allocator.num_free
                with pytest.raises(CapacityError, match=f"{want} pages wanted, {before} free"):
                    allocator.allocate(want)
                assert allocator.num_free == before, "a refused loan takes nothing"
            else:
                owned.append(allocator.allocate(want))
        lent = [page for pages in owned for page in pages]
        assert DUMMY_PAGE not in lent
        assert len(set(lent)) == len(lent)
        assert len(lent) + allocator.num_free == 39
        allocator.check_integrity(owned)


def test_integrity_check_sees_losses_and_double_owners() -> None:
    """The guard of the other tests works: lost, twice owned, and twice freed pages are seen."""
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.check_integrity([pages])
    for wrong in ([], [pages[:1]], [pages, pages[:1]], [[*pages, 0]]):
        with pytest.raises(AssertionError, match="lost or owned twice"):
            allocator.check_integrity(wrong)
    allocator.free(pages)
    allocator.free(pages[:1])
    with pytest.raises(AssertionError, match="lost or owned twice"):
        allocator.check_integrity([])


def resident() -> int:
    """Bytes of memory that this process really holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc of Linux")
def test_a_pool_takes_memory_where_it_is_written() -> None:
    """Fault: memory beyond the budget. A pool of 8 slots of 8192 tokens is 3 GB for SmolLM2."""
    before = resident()
    pool = KVPool(
        AttentionShape.heads(30, 3, 64),
        num_pages=4097,
        page_size=16,
        dtype=torch.float32,
        device=CPU,
    )
    assert pool.k.nbytes + pool.v.nbytes > 3e9
    assert not pool.k[3, 1, 500].any()
    pool.write(0, torch.arange(16, 40), torch.ones(24, 3, 64), torch.ones(24, 3, 64))
    assert resident() - before < 3e7, "pages that nobody wrote are filled"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_positions_follow_the_page_table(page_size: int) -> None:
    """Fault: page edges. Every index falls on its page; those past the table on the dummy page."""
    table = torch.tensor([[5, 2, 7], [1, 0, 0]])
    index = torch.arange(5 * page_size).expand(2, -1)
    rows = flat_rows(table, index, page_size)
    for b in range(2):
        for i in range(5 * page_size):
            page = int(table[b, i // page_size]) if i // page_size < 3 else DUMMY_PAGE
            assert int(rows[b, i]) == page * page_size + i % page_size


def test_write_touches_its_rows_and_layer_only() -> None:
    """Fault: writes to real memory of others. Nothing but the named rows of one layer changes."""
    pool = make_pool(4)
    pool.k.fill_(-1.0)
    pool.v.fill_(-2.0)
    rows = torch.tensor([17, 3, 30])
    k, v = torch.randn(3, 3, 4), torch.randn(3, 3, 4)
    pool.write(1, rows, k, v)
    for tensor, new, old in ((pool.k, k, -1.0), (pool.v, v, -2.0)):
        assert torch.equal(tensor[1][:, rows], new.transpose(0, 1))
        rest = torch.ones(36, dtype=torch.bool)
        rest[rows] = False
        assert (tensor[1][:, rest] == old).all()
        assert (tensor[0] == old).all()


def test_move_reads_before_it_writes() -> None:
    """Fault: accepted KV overwritten while it is made contiguous. Overlapping moves are exact."""
    pool = make_pool(4)
    pool.k.copy_(torch.randn(pool.k.shape))
    pool.v.copy_(torch.randn(pool.v.shape))
    before_k, before_v = pool.k.clone(), pool.v.clone()
    source, target = torch.tensor([5, 6, 9, 4, 20]), torch.tensor([4, 5, 6, 9, 20])
    pool.move(source, target)
    before_k[:, :, target] = before_k[:, :, source]
    before_v[:, :, target] = before_v[:, :, source]
    assert torch.equal(pool.k, before_k)
    assert torch.equal(pool.v, before_v)


def test_a_latent_pool_keeps_keys_alone() -> None:
    """Fault: latents written, gathered or moved once as keys and once more as values."""
    shape = AttentionShape(
        num_layers=2, num_kv_heads=1, key_dim=6, value_dim=4, scale=1.0, latent=True
    )
    pool = KVPool(shape, num_pages=9, page_size=4, dtype=torch.float32, device=CPU)
    keys, rows = torch.randn(3, 1, 6), torch.tensor([17, 3, 30])
    pool.write(1, rows, keys, torch.full((3, 1, 4), torch.nan))
    assert torch.equal(pool.k[1, 0, rows], keys[:, 0])
    assert torch.equal(pool.v[1, 0, rows], keys[:, 0, :4])
    assert pool.v.untyped_storage().data_ptr() == pool.k.untyped_storage().data_ptr()
    pool.k.copy_(torch.randn(pool.k.shape))
    before = pool.k.clone()
    source, target = torch.tensor([5, 6, 9]), torch.tensor([4, 5, 6])
    pool.move(source, target)
    before[:, :, target] = before[:, :, source]
    assert torch.equal(pool.k, before)
    gathered, untouched = torch.empty(2, 24), torch.full((2, 16), -1.0)
    pool.gather(1, torch.tensor([7, 2]), gathered, untouched)
    assert torch.equal(gathered.view(2, 4, 6), pool.k[1, 0].view(9, 4, 6)[[7, 2]])
    assert (untouched == -1.0).all()
