"""Paged attention in torch: what CPU users run, and the oracle of every other backend.

Always holds: a row's bits depend on its own query, its visible keys and values, and nothing else.
Rows are padded to a tile, keys to whole blocks; products over a block have a fixed length and
blocks are added in order, so neither other rows, nor other requests, nor the host's bound on the
length change a result. On a CPU keys and values are float32 and so is all arithmetic; on a GPU
products take 16-bit operands and accumulate in float32, as flash attention does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.batch import ForwardBatch
from eyas.kv.pool import KVPool, flat_rows

BLOCK = 256
"""KV positions per block of the value product."""
ROW_TILE = 4
"""Query rows are padded to a multiple of this (MKL's row tile in float32)."""


class ReferenceAttention:
    """Gather a batch's pages, then masked attention in fixed blocks."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def begin(self, batch: ForwardBatch) -> ReferencePass:
        """Flat write positions, pages and mask of a pass; device arithmetic only."""
        num_requests = batch.prefix_lens.shape[0]
        start = batch.prefix_lens[:, None] + batch.tail_offset
        index = start + torch.arange(batch.num_new, device=start.device)
        page_size = self.pool.page_size
        span = BLOCK * page_size // _gcd(BLOCK, page_size)
        length = -(-batch.max_kv_len // span) * span
        pages = batch.page_table[:, : length // page_size]
        pages = F.pad(pages, (0, length // page_size - pages.shape[1]))
        visible = _visible(batch, length).view(num_requests, batch.num_new, length)
        mask = torch.zeros(visible.shape, device=start.device).masked_fill_(~visible, -torch.inf)
        rows = flat_rows(batch.page_table, index, page_size).flatten()
        return ReferencePass(pool=self.pool, rows=rows, pages=pages, mask=mask)


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def _visible(batch: ForwardBatch, length: int) -> torch.Tensor:
    """bool[B, N, length]: which KV indices each new row sees."""
    kv = torch.arange(length, device=batch.prefix_lens.device)
    prefix = batch.prefix_lens[:, None, None]
    if batch.ancestors is None:
        newest = batch.tail_offset + torch.arange(batch.num_new, device=kv.device)[None, :, None]
        return kv <= prefix + newest
    bits = batch.ancestors.view(-1, batch.num_new, 1)
    tail = kv - prefix
    in_tail = (tail >= 0) & (tail < 64)
    return (tail < 0) | (in_tail & ((bits >> tail.clamp(0, 63)) & 1).bool())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """One pass: `rows` int64[T] to write, `pages` int64[B, n] to read, `mask` f32[B, N, L]."""

    pool: KVPool
    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `Attend`."""
        num_rows, padded = self.rows.shape[0], q.shape[0]
        self.pool.write(layer, self.rows, k[:num_rows], v[:num_rows])
        keys, values = self.pool.gather(layer, self.pages)
        num_kv_heads, dim = k.shape[1:]
        shape = (*self.mask.shape[:2], num_kv_heads, -1, dim)
        grouped = q[:num_rows].reshape(shape).permute(2, 0, 1, 3, 4)
        out = _attend(grouped, keys, values, self.mask)
        out = out.permute(1, 2, 0, 3, 4).reshape(num_rows, -1).to(v.dtype)
        return out if padded == num_rows else F.pad(out, (0, 0, 0, padded - num_rows))


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax(q k / sqrt(D) + mask) v in float32.

    q [Hkv, B, N, G, D]; keys, values [Hkv * B, L, D]; mask [B, N, L]. Returns q's shape.
    """
    heads, num_requests, num_new, group, dim = q.shape
    rows, length = num_new * group, keys.shape[1]
    scaled = (q * dim**-0.5).reshape(heads * num_requests, rows, dim).to(keys.dtype)
    missing = -rows % ROW_TILE
    if missing:
        scaled = F.pad(scaled, (0, 0, 0, missing))
    scores = _product(scaled, keys.transpose(1, 2))
    real = scores.view(heads, num_requests, -1, length)[:, :, :rows]
    real = real.unflatten(2, (num_new, group))
    real += mask[:, :, None, :]
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    out = total = None
    for start in range(0, length, BLOCK):
        block = weights[:, :, start : start + BLOCK]
        part = _product(block.to(values.dtype), values[:, start : start + BLOCK])
        mass = block.sum(-1, keepdim=True)
        out = part if out is None else out + part
        total = mass if total is None else total + mass
    assert out is not None and total is not None
    return (out / total)[:, :rows].reshape(q.shape)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched matmul with a float32 result."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)
