"""The accepted nodes' keys and values brought together behind the committed ones, in one launch.

A program has all places of a request, layer and KV head: it reads every entry before it writes one,
since a place may be the node of another. Bits are copied.
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kv.pool import KVPool, flat_rows


def keep_path_reference(
    pool: KVPool,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `keep_path`."""
    offsets = torch.arange(path.shape[1], device=path.device)
    source = torch.where(offsets < counts[:, None], path, offsets)
    moved = flat_rows(page_table, kv_lens[:, None] + source, pool.page_size)
    kept = flat_rows(page_table, kv_lens[:, None] + offsets, pool.page_size)
    pool.move(moved.flatten(), kept.flatten())


@triton.jit
def _flat(table_ptr, index, columns, page_size, there):  # type: ignore[no-untyped-def]
    """Flat positions of KV indices; past the table, on the dummy page."""
    page = index // page_size
    page = tl.load(table_ptr + page, there & (page < columns), 0)
    return page * page_size + index % page_size


@triton.jit
def _move(base, source, target, moves, dim, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of a layer and head from `source` to `target`, where something moves."""
    lane = tl.arange(0, BLOCK)
    there = moves[:, None] & (lane < dim)[None, :]
    entries = tl.load(base + source[:, None] * dim + lane[None, :], there)
    tl.debug_barrier()
    tl.store(base + target[:, None] * dim + lane[None, :], entries, there)


@triton.jit
def _move_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    table_ptr,
    kv_lens_ptr,
    path_ptr,
    counts_ptr,
    places,
    columns,
    page_size,
    heads,
    k_stride,
    v_stride,
    k_dim,
    v_dim,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request, layer and KV head): of the keys the first `heads`, then of the values."""
    take_turn(EARLY)
    request, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_len, count = tl.load(kv_lens_ptr + request), tl.load(counts_ptr + request)
    table, place = table_ptr + request * columns, tl.arange(0, PLACES)
    node = tl.load(path_ptr + request * places + place, place < places, 0)
    moves = (place < count) & (node != place)
    source = _flat(table, kv_len + node, columns, page_size, moves)
    target = _flat(table, kv_len + place, columns, page_size, moves)
    if head < heads:
        _move(k_ptr + head * k_stride, source, target, moves, k_dim, BLOCK)
    else:
        _move(v_ptr + (head - heads) * v_stride, source, target, moves, v_dim, BLOCK)


def keep_path_triton(
    pool: KVPool,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """See `keep_path`."""
    keys, values = pool.kept[0], pool.kept[-1]
    heads = keys.shape[0] * keys.shape[1]
    dims = (keys.shape[3], values.shape[3])
    _move_kv_kernel[(path.shape[0], len(pool.kept) * heads)](
        keys,
        values,
        page_table,
        kv_lens,
        path,
        counts,
        path.shape[1],
        page_table.shape[1],
        pool.page_size,
        heads,
        keys.stride(1),
        values.stride(1),
        *dims,
        PLACES=block_of(path.shape[1]),
        BLOCK=block_of(max(dims)),
        **turns(keys),
    )


def keep_path(
    pool: KVPool,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Copy the entries of nodes path[:, i] to KV index kv_lens + i, for i < counts, in all layers.

    page_table int64[B, P]; kv_lens, counts int64[B]; path int64[B, depth + 1] ascends. Entries
    behind the counts mean nothing afterwards.
    """
    run = keep_path_triton if runs_kernels(path) else keep_path_reference
    run(pool, page_table, kv_lens, path, counts)


def cost(pool: KVPool, moved: int) -> tuple[int, int]:
    """(FLOPs, bytes) of `moved` entries that change their place."""
    each = sum(t[:, :, 0].numel() * t.element_size() for t in pool.kept)
    return 0, 2 * moved * each
