"""Attention of a batch's new rows over their paged keys and values.

All rows of a request that share a KV head sit in tiles of `BLOCK_M` rows, so one read of its keys
serves every node and query head of a verify pass. A tile's arithmetic does not depend on how many
of its rows are used, nor on other requests: a row's bits are those it has alone. Online softmax as
in FlashAttention (arXiv 2205.14135); the oracle is `eyas.attention.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.batch import ForwardBatch

BLOCK_M_FEW, BLOCK_M_MANY = 16, 64
"""Rows per tile: up to 64 rows a KV head (decode, verify), and more (prefill)."""
BLOCK_N = 64
"""KV positions per step."""


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    prefix_ptr,
    bits_ptr,
    scale,
    num_new,
    tail_offset,
    q_row_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (request, KV head, tile): online softmax over the request's positions."""
    request, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, used = rows // GROUP, rows < num_new * GROUP
    dims = tl.arange(0, DIM)
    place = (request * num_new + node).to(tl.int64)
    column = (head * GROUP + rows % GROUP) * DIM
    q = tl.load(q_ptr + place[:, None] * q_row_stride + column[:, None] + dims, used[:, None], 0.0)
    q = (q * scale).to(k_ptr.dtype.element_ty)
    prefix = tl.load(prefix_ptr + request).to(tl.int32)
    if MASKED:
        bits = tl.load(bits_ptr + place, used, 0)
        limit = prefix + tail_offset + num_new
    else:
        bits = tl.zeros([BLOCK_M], tl.int64)
        newest = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_new - 1)
        limit = prefix + tail_offset + newest + 1
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(0, limit, BLOCK_N):
        kv = start + tl.arange(0, BLOCK_N)
        exists = kv < limit
        page = tl.load(table_ptr + request * table_stride + kv // PAGE, exists, 0)
        flat = head.to(tl.int64) * head_stride + (page * PAGE + kv % PAGE) * DIM
        k = tl.load(k_ptr + flat[:, None] + dims, exists[:, None], 0.0)
        v = tl.load(v_ptr + flat[:, None] + dims, exists[:, None], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        tail = kv - prefix
        if MASKED:
            bit = (bits[:, None] >> tl.minimum(tl.maximum(tail, 0), 63)[None, :].to(tl.int64)) & 1
            seen = (tail < 0)[None, :] | ((tail < 64)[None, :] & (bit != 0))
        else:
            seen = tail[None, :] <= tail_offset + node[:, None]
        scores = tl.where(seen & exists[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        update = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        acc = acc * shrink[:, None] + update
        top = higher
    acc = acc / mass[:, None]
    where = out_ptr + place[:, None] * (tl.num_programs(1) * GROUP * DIM) + column[:, None] + dims
    tl.store(where, acc.to(out_ptr.dtype.element_ty), used[:, None])


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: ForwardBatch,
    page_size: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend rows q float32 [T, H, D] of `batch` over paged k, v [Hkv, P * page_size, D].

    Scores are scaled by `scale`. The rows' own keys and values are in the pages already; the result
    goes to out [T, H * D]. D is a power of two from 16 on.
    """
    num_requests, heads = batch.prefix_lens.shape[0], k.shape[0]
    dim, group = q.shape[-1], q.shape[1] // heads
    rows = batch.num_new * group
    block_m = BLOCK_M_FEW if rows <= BLOCK_M_MANY else BLOCK_M_MANY
    assert q.stride(-1) == 1 and q.stride(-2) == dim, f"heads of q must be dense: {q.stride()}"
    _kernel[(num_requests, heads, triton.cdiv(rows, block_m))](
        q,
        k,
        v,
        out,
        batch.page_table,
        batch.prefix_lens,
        batch.prefix_lens if batch.ancestors is None else batch.ancestors,
        scale,
        batch.num_new,
        batch.tail_offset,
        q.stride(0),
        k.stride(0),
        batch.page_table.stride(0),
        GROUP=group,
        PAGE=page_size,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        MASKED=batch.ancestors is not None,
    )


def cost(batch: ForwardBatch, k: torch.Tensor, num_heads: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one layer with every request at the batch's bound on its length."""
    requests, (kv_heads, _, dim) = batch.prefix_lens.shape[0], k.shape
    rows = requests * batch.num_new * num_heads
    read = requests * batch.max_kv_len * kv_heads * dim * 2 * k.element_size()
    return 4 * rows * batch.max_kv_len * dim, read + rows * dim * (4 + k.element_size())
