"""Attention: the protocols, and the factory of paged backends.

A paged backend is bound to a KV pool. `begin(batch)` prepares one forward pass without a host
sync and returns the `Attend` that every layer of the pass calls. Networks know `Attend` alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.attention.rope import Rope
from eyas.batch import ForwardBatch
from eyas.kv.pool import KVPool


class Attend(Protocol):
    """Attention of one pass, bound to its batch."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Rotate q and k by `rope`, keep k and v, and attend.

        q [T', H, key_dim], k [T', Hkv, key_dim] and v [T', Hkv, value_dim] in the model's dtype, or
        q and k in float32. Rows past the batch's T are padding. Rotated numbers are not rounded to
        16 bits before they are used or kept. Returns [T', H * value_dim] in v's dtype, with zeros
        in padding rows.
        """


class PagedAttention(Protocol):
    """Attention over a paged pool."""

    needs_bound: bool
    """Whether shapes inside follow `ForwardBatch.max_kv_len`."""

    def begin(self, batch: ForwardBatch) -> Attend:
        """Prepare a pass over `batch`."""


def paged_attention(
    pool: KVPool, *, deterministic: bool = True, verify: str = "decode"
) -> PagedAttention:
    """The backend for a pool: Triton's kernels on a GPU, else the reference.

    On a GPU a row's bits are the same in decode, chains and, with `deterministic`, in trees. The
    reference is deterministic in any case. With `verify` "prefill" a verify pass attends as prompt
    chunks do, by programs that each walk all keys of their rows: the same bits, and a time that
    grows with the context. The reference has one way, which is both.
    """
    if pool.k.device.type == "cuda":
        from eyas.attention.triton import TritonAttention

        return TritonAttention(pool, deterministic=deterministic, verify=verify)
    from eyas.attention.reference import ReferenceAttention

    return ReferenceAttention(pool)
