"""Paged attention by our Triton kernel: what a GPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.attention.rope import Rope, rotate
from eyas.batch import ForwardBatch
from eyas.kernels.paged_attention import paged_attention
from eyas.kv.pool import KVPool, flat_rows


class TritonAttention:
    """Reads pages where they lie; see `eyas.kernels.paged_attention`."""

    needs_bound = False

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def begin(self, batch: ForwardBatch) -> TritonPass:
        """Flat write positions of a pass."""
        start = batch.prefix_lens[:, None] + batch.tail_offset
        index = start + torch.arange(batch.num_new, device=start.device)
        rows = flat_rows(batch.page_table, index, self.pool.page_size).flatten()
        return TritonPass(self.pool, batch, rows)


class TritonPass:
    """One pass over `rows` int64[T]."""

    def __init__(self, pool: KVPool, batch: ForwardBatch, rows: torch.Tensor) -> None:
        self.pool, self.batch, self.rows = pool, batch, rows

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """See `Attend`."""
        num_rows, padded = self.rows.shape[0], q.shape[0]
        q, k = rotate(q, rope), rotate(k, rope)
        self.pool.write(layer, self.rows, k[:num_rows], v[:num_rows])
        out = v.new_empty(num_rows, q.shape[1] * q.shape[2])
        pool = self.pool
        k, v = pool.k[layer], pool.v[layer]
        paged_attention(q[:num_rows], k, v, self.batch, pool.page_size, pool.shape.scale, out)
        return out if padded == num_rows else F.pad(out, (0, 0, 0, padded - num_rows))
