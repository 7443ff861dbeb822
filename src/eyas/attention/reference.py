"""Paged attention in torch: what CPU users run, and the oracle of every other backend.

Always holds: a row's bits depend on its own query, its visible keys and values, and nothing else.
Rows are padded to a tile, keys to whole blocks; products over a block have a fixed length and
blocks are added in order, so neither other rows, nor other requests, nor the host's bound on the
length change a result. On a CPU keys and values are float32 and so is all arithmetic; on a GPU
products take 16-bit operands and accumulate in float32, as flash attention does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.batch import ForwardBatch
from eyas.kv.pool import KVPool, flat_rows

BLOCK = 256
"""KV positions per block of the value product."""
HIDDEN = -1e30
"""Added to the score of a position a row does not see: its weight is exactly zero."""
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
        visible = _visible(batch, length).view(num_requests, batch.num_new, 1, length)
        mask = torch.zeros(visible.shape, device=start.device).masked_fill_(~visible, HIDDEN)
        rows = flat_rows(batch.page_table, index, page_size).flatten()
        return ReferencePass(self.pool, rows, pages, mask)


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


class ReferencePass:
    """One pass; its working memory is allocated once and serves every layer."""

    def __init__(
        self, pool: KVPool, rows: torch.Tensor, pages: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """`rows` int64[T] to write, `pages` int64[B, n] to read, `mask` f32[B, N, 1, L]."""
        self.pool, self.rows, self.mask = pool, rows, mask
        self._pages = pool.page_rows(pages.flatten())
        num_kv_heads, dim = pool.k.shape[1], pool.k.shape[3]
        self._batch = (num_kv_heads, pages.shape[0])
        self._length = mask.shape[-1]
        self._dim = dim
        shape = (num_kv_heads * pages.numel(), pool.page_size * dim)
        self._keys, self._values = pool.k.new_empty(shape), pool.v.new_empty(shape)
        self._queries: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `Attend`."""
        num_rows, padded = self.rows.shape[0], q.shape[0]
        self.pool.write(layer, self.rows, k[:num_rows], v[:num_rows])
        self.pool.gather(layer, self._pages, self._keys, self._values)
        num_requests, num_new = self.mask.shape[:2]
        grouped = q[:num_rows].view(num_requests, num_new, k.shape[1], -1, q.shape[-1])
        out = self._attend(grouped.permute(2, 0, 1, 3, 4))
        out = out.permute(1, 2, 0, 3, 4).reshape(num_rows, -1).to(v.dtype)
        return out if padded == num_rows else F.pad(out, (0, 0, 0, padded - num_rows))

    def _attend(self, q: torch.Tensor) -> torch.Tensor:
        """Softmax(q k / sqrt(D) + mask) v in float32, for q [Hkv, B, N, G, D] and of its shape."""
        rows, batch = q.shape[2] * q.shape[3], q.shape[0] * q.shape[1]
        queries, scores = self._buffers(rows)
        torch.mul(q, q.shape[-1] ** -0.5, out=queries[:, :rows].view(q.shape))
        keys = self._keys.view(batch, self._length, self._dim)
        values = self._values.view(batch, self._length, self._dim)
        _product(queries, keys.transpose(1, 2), scores)
        seen = scores[:, :rows].view(*q.shape[:4], self._length)
        seen += self.mask
        torch.softmax(scores, -1, out=scores)
        out = None
        for start in range(0, self._length, BLOCK):
            block = scores[:, :, start : start + BLOCK].to(values.dtype)
            part = _product(block, values[:, start : start + BLOCK])
            out = part if out is None else out.add_(part)
        assert out is not None, "a pass has at least one block"
        return out[:, :rows].view(q.shape)

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and scores of all layers, padded to the row tile; padding queries are zero."""
        if self._queries is None or self._scores is None:
            batch = self._batch[0] * self._batch[1]
            padded = rows + -rows % ROW_TILE
            self._queries = self._keys.new_zeros(batch, padded, self._dim)
            size = (batch, padded, self._length)
            self._scores = torch.empty(size, device=self._keys.device)
        return self._queries, self._scores


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Batched matmul with a float32 result."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b, out=out)
    product = torch.bmm(a, b, out_dtype=torch.float32)
    return product if out is None else out.copy_(product)
