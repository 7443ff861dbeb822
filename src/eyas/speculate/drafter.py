"""Drafters: what proposes the tokens of a cycle.

A drafter sees tensors only: which slots run, how long their committed KV is, the tokens just
committed and the target's hidden states for them. It never reads a value on the host, so it can
be captured in a graph with the rest of the cycle. Between cycles it keeps its own rows per slot.

Invariant of a drafter with a KV cache: its KV length equals the target's committed KV length, and
every kept entry was computed from what was committed (draft entries are overwritten).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.batch import ForwardMode
from eyas.kernels.ngram import ngram_chain
from eyas.sampling import SamplingRows
from eyas.speculate.tree import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """The running requests as a drafter sees them; B rows."""

    slots: torch.Tensor
    """int64[B]: rows of per-slot state."""
    roots: torch.Tensor
    """int64[B]: last committed token, in no KV cache yet."""
    kv_lens: torch.Tensor
    """int64[B]: committed KV length; the root's index in its sequence."""
    page_table: torch.Tensor
    """int64[B, P]"""
    history: torch.Tensor
    """int64[S, M]: every slot's tokens; row `slots[b]` is known up to the root."""
    rows: SamplingRows
    sampled: bool
    """Whether any row draws with noise."""
    max_kv_len: int
    """Host upper bound of KV length with everything the cycle may write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Tokens a pass committed: M rows a request, of which the first `counts` mean something."""

    tokens: torch.Tensor
    """int64[B, M]: the token after each row's position."""
    positions: torch.Tensor
    """int64[B, M]: each row's position; within the history in all rows."""
    aux: torch.Tensor | None
    """[B, M, num_aux * E]: target states at each row's position."""
    counts: torch.Tensor
    """int64[B]: rows that count, at least 1."""
    kv_lens: torch.Tensor
    """int64[B]: committed KV length with them."""


class Drafter(Protocol):
    """Proposes drafts, and follows what was committed."""

    aux_layers: tuple[int, ...]
    """Target boundaries whose states the drafter wants; empty for none."""
    aux_size: int
    """Columns of `Committed.aux`."""
    needs_bound: bool
    """Whether shapes inside follow `DraftContext.max_kv_len`."""

    def propose(self, context: DraftContext) -> Draft:
        """The tree to verify."""

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Take in tokens committed behind `context.kv_lens` (a prompt chunk or a cycle's)."""


class NoDrafter:
    """Drafts nothing: the tree is the root alone, and a cycle is a plain decode step."""

    aux_layers: tuple[int, ...] = ()
    aux_size = 0
    needs_bound = False

    def propose(self, context: DraftContext) -> Draft:
        """The root."""
        tokens, positions = context.roots[:, None], context.kv_lens[:, None]
        return Draft(tokens=tokens, positions=positions, depth=0)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Nothing to keep."""


class NGramDrafter:
    """Copies what followed the latest earlier occurrence of the current suffix.

    Suffixes of up to `max_match` tokens are looked up; see `eyas.kernels.ngram`.
    """

    aux_layers: tuple[int, ...] = ()
    aux_size = 0
    needs_bound = False

    def __init__(self, num_drafts: int, max_match: int = 4) -> None:
        self.num_drafts, self.max_match = num_drafts, max_match

    def propose(self, context: DraftContext) -> Draft:
        """A chain looked up in each request's own text."""
        width = min(context.max_kv_len + 1, context.history.shape[1])
        tokens, positions = ngram_chain(
            context.history,
            context.slots,
            context.roots,
            context.kv_lens,
            width,
            self.num_drafts + 1,
            self.max_match,
        )
        return Draft(tokens=tokens, positions=positions, depth=self.num_drafts)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """The history is all it needs."""
