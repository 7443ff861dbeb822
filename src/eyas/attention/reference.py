"""Paged attention in torch: what CPU users run, and the oracle of every other backend.

Always holds on a CPU: a row's bits depend on its own query and on its visible keys and values in
their order, and on nothing else: not on other rows, other requests, the host's bound on the length,
or hidden keys between visible ones, as a node of a tree has them. Rows are padded to a tile, keys
to whole blocks, blocks are added in order. In a tree the scores of a row are brought into the order
of its visible keys for the softmax, and its keys go to the block of their rank for the product;
within a block the library adds terms one after the other, so hidden keys, whose weight is zero,
leave no trace. On a CPU keys and values are float32 and so is all arithmetic; on a GPU products
take 16-bit operands and accumulate in float32, as flash attention does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.attention.rope import Rope, rotate
from eyas.batch import ForwardBatch
from eyas.config import MAX_NODES
from eyas.kv.pool import KVPool, flat_rows

BLOCK = 128
"""Visible keys per block of the value product; with `MAX_NODES` more at most MKL's 192."""
HIDDEN = -1e30
"""Added to the score of a position a row does not see: its weight is exactly zero."""
ROW_TILE = 4
"""Query rows are padded to a multiple of this (MKL's row tile in float32)."""


class ReferenceAttention:
    """Gather a batch's pages, then masked attention in fixed blocks."""

    needs_bound = True

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def begin(self, batch: ForwardBatch) -> ReferencePass:
        """Flat write positions, pages and mask of a pass; device arithmetic only."""
        num_requests = batch.prefix_lens.shape[0]
        start = batch.prefix_lens[:, None] + batch.tail_offset
        index = start + torch.arange(batch.num_new, device=start.device)
        page_size = self.pool.page_size
        span = math.lcm(2 * BLOCK, page_size)
        length = -(-batch.max_kv_len // span) * span
        pages = batch.page_table[:, : length // page_size]
        pages = F.pad(pages, (0, length // page_size - pages.shape[1]))
        visible = _visible(batch, length).view(num_requests, batch.num_new, 1, length)
        masks = {w: _mask(visible, w, batch) for w in self.pool.shape.distinct_windows}
        rows = flat_rows(batch.page_table, index, page_size).flatten()
        gaps = None if batch.ancestors is None else _Gaps.of(batch, visible)
        return ReferencePass(self.pool, rows, pages, masks, gaps)


def _mask(visible: torch.Tensor, window: int, batch: ForwardBatch) -> torch.Tensor:
    """float32[B, N, 1, L] to add to scores: zero for the `visible` inside the window."""
    if window:
        oldest = batch.positions.view(-1, batch.num_new, 1, 1) - window
        visible = visible & (torch.arange(visible.shape[-1], device=oldest.device) > oldest)
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, HIDDEN)


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
class _Gaps:
    """How the visible keys of a tree's rows lie among hidden ones; R rows, n places in the tail."""

    places: torch.Tensor
    """int64[B, R, n]: KV indices of the tail."""
    ordered: torch.Tensor
    """int64[B, R, n]: the same, those that a row sees first."""
    home: torch.Tensor
    """int64[B, R, n]: where each place of the tail went in that order."""
    members: list[torch.Tensor]
    """float32[B, R, window] for each block: 1 where a key's rank among the visible is in it."""

    @classmethod
    def of(cls, batch: ForwardBatch, visible: torch.Tensor) -> _Gaps:
        """From visible bool[B, N, 1, L]."""
        count = batch.tail_offset + batch.num_new
        tail = torch.arange(count, device=visible.device)
        prefix = batch.prefix_lens[:, None, None]
        places = (prefix + tail).expand(-1, batch.num_new, -1)
        seen = visible[:, :, 0]
        order = (~seen.gather(2, places)).to(torch.uint8).sort(dim=-1, stable=True).indices
        block = torch.where(seen, (seen.cumsum(-1) - 1) // BLOCK, -1)
        starts = range(0, seen.shape[-1], BLOCK)
        return cls(
            places=places,
            ordered=prefix + order,
            home=prefix + order.argsort(dim=-1),
            members=[
                (block[:, :, s : s + BLOCK + MAX_NODES] == s // BLOCK).float() for s in starts
            ],
        )

    def repeat(self, group: int, missing: int) -> _Gaps:
        """Every row `group` times, and rows behind them that see what the last one sees."""

        def rows(x: torch.Tensor) -> torch.Tensor:
            x = x.repeat_interleave(group, dim=1)
            return torch.cat((x, x[:, -1:].expand(-1, missing, -1)), dim=1)

        return _Gaps(
            places=rows(self.places),
            ordered=rows(self.ordered),
            home=rows(self.home),
            members=[rows(m) for m in self.members],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Working memory of a pass, and views of the part that rows use; R is padded to the tile."""

    grouped: tuple[int, ...]
    """(B, N, Hkv, G, key_dim)"""
    queries: torch.Tensor
    """[Hkv * B, R, key_dim]"""
    used_queries: torch.Tensor
    """[Hkv, B, N, G, key_dim]"""
    scores: torch.Tensor
    """float32[Hkv * B, R, L]"""
    used_scores: torch.Tensor
    """[Hkv, B, N, G, L]"""
    sums: torch.Tensor
    """float32[Hkv * B, R, value_dim]"""
    used_sums: torch.Tensor
    """[B, N, Hkv, G, value_dim]"""
    out: torch.Tensor
    """[T', H * value_dim]"""
    used_out: torch.Tensor
    """[B, N, Hkv, G, value_dim]"""
    own: torch.Tensor
    """float32[Hkv * B, R, window]: a tree's weights of one block."""


class ReferencePass:
    """One pass; its working memory is allocated once and serves every layer."""

    def __init__(
        self,
        pool: KVPool,
        rows: torch.Tensor,
        pages: torch.Tensor,
        masks: dict[int, torch.Tensor],
        gaps: _Gaps | None,
    ) -> None:
        """`rows` int64[T] to write, `pages` int64[B, n] to read, a mask f32[B, N, 1, L] a window.

        `gaps` knows no window: a key's block and its turn in a sum are those of its index.
        """
        self.pool, self.rows, self._masks, self._gaps = pool, rows, masks, gaps
        self._pages = pool.page_rows(pages.flatten())
        shape = pool.shape
        self._batch = (shape.num_kv_heads, pages.shape[0])
        _, self._num_new, _, self._length = next(iter(masks.values())).shape
        count, flat = shape.num_kv_heads * pages.numel(), (math.prod(self._batch), self._length)
        self._pages_k = pool.k.new_empty(count, pool.page_size * shape.key_dim)
        keys = self._pages_k.view(*flat, shape.key_dim)
        self._keys = keys.transpose(1, 2)
        if shape.latent:
            self._pages_v, self._values = self._pages_k, keys[..., : shape.value_dim]
        else:
            self._pages_v = pool.v.new_empty(count, pool.page_size * shape.value_dim)
            self._values = self._pages_v.view(*flat, shape.value_dim)
        self._work: _Work | None = None

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """See `Attend`; the result is overwritten by the next layer's."""
        num_rows = self.rows.shape[0]
        q, k = rotate(q, rope), rotate(k, rope)
        if self._work is None:
            self._work = self._allocate(q, v)
        work = self._work
        self.pool.write(layer, self.rows, k[:num_rows], v[:num_rows])
        self.pool.gather(layer, self._pages, self._pages_k, self._pages_v)
        grouped = q[:num_rows].view(work.grouped).permute(2, 0, 1, 3, 4)
        torch.mul(grouped, self.pool.shape.scale, out=work.used_queries)
        _product(work.queries, self._keys, work.scores)
        work.used_scores.add_(self._masks[self.pool.shape.window(layer)])
        started = False
        for weights, start, end in self._blocks(self._softmax(work.scores)):
            part = (weights.to(self._values.dtype), self._values[:, start:end])
            _add_product(work.sums, *part) if started else _product(*part, work.sums)
            started = True
        work.used_out.copy_(work.used_sums)
        return work.out

    def _allocate(self, q: torch.Tensor, v: torch.Tensor) -> _Work:
        """Working memory for rows like q [T', H, key_dim] and v; padding rows stay zero."""
        num_new, (num_kv_heads, num_requests) = self._num_new, self._batch
        heads, dim, wide = *q.shape[1:], self._values.shape[-1]
        group = heads // num_kv_heads
        rows, flat = num_new * group, num_kv_heads * num_requests
        missing = -rows % ROW_TILE
        queries = self._keys.new_zeros(flat, rows + missing, dim)
        scores = torch.empty(flat, rows + missing, self._length, device=q.device)
        sums = torch.empty(flat, rows + missing, wide, device=q.device)
        out = v.new_zeros(q.shape[0], heads * wide)
        if self._gaps is not None:
            self._gaps = self._gaps.repeat(group, missing)
        shape = (num_kv_heads, num_requests, num_new, group)
        grouped = (num_requests, num_new, num_kv_heads, group)
        return _Work(
            grouped=(*grouped, dim),
            queries=queries,
            used_queries=queries[:, :rows].view(*shape, dim),
            scores=scores,
            used_scores=scores[:, :rows].view(*shape, self._length),
            sums=sums,
            used_sums=sums[:, :rows].view(*shape, wide).permute(1, 2, 0, 3, 4),
            out=out,
            used_out=out[: num_requests * num_new].view(*grouped, wide),
            own=scores.new_empty(*scores.shape[:2], BLOCK + MAX_NODES),
        )

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Weights in place of `scores`; its sums run over the visible keys in their order."""
        gaps = self._gaps
        if gaps is None:
            return torch.softmax(scores, -1, out=scores)
        apart = scores.view(*self._batch, *scores.shape[1:])
        every = (self._batch[0], -1, -1, -1)
        places, ordered, home = (x.expand(every) for x in (gaps.places, gaps.ordered, gaps.home))
        apart.scatter_(-1, places, apart.gather(-1, ordered))
        torch.softmax(scores, -1, out=scores)
        apart.scatter_(-1, places, apart.gather(-1, home))
        return scores

    def _blocks(self, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Weights [Hkv * B, rows, end - start] of keys `start` .. `end - 1`, block by block.

        Without gaps a key's rank is its place, and two blocks go together: MKL splits them again.
        In a tree a block's keys lie up to `MAX_NODES` further on, among keys of the next.
        """
        if self._gaps is None:
            for start in range(0, self._length, 2 * BLOCK):
                yield weights[:, :, start : start + 2 * BLOCK], start, start + 2 * BLOCK
            return
        for i, member in enumerate(self._gaps.members):
            start, end = i * BLOCK, i * BLOCK + member.shape[-1]
            window = weights[:, :, start:end]
            assert self._work is not None, "it is made with the scores"
            own = self._work.own[:, :, : member.shape[-1]]
            shape = (self._batch[0], *member.shape)
            torch.mul(window.view(shape), member, out=own.view(shape))
            yield own, start, end


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Batched matmul with a float32 result."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b, out=out)
    product = torch.bmm(a, b, out_dtype=torch.float32)
    return product if out is None else out.copy_(product)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`total` with a product added in place, block after block as MKL splits it."""
    if a.dtype == torch.float32:
        return total.baddbmm_(a, b)
    return total.add_(_product(a, b))
