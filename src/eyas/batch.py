"""What passes between scheduler, runner and model: plans, batches, results.

`StepPlan` holds integers the scheduler chose; `ForwardBatch` holds the tensors of one forward;
`StepResult` holds what a step drew. None of them is changed downstream.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class ForwardMode(enum.Enum):
    """Kinds of forward pass; the names are SGLang's."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """New tokens, their positions, and who sees whom; T = B * N rows, request by request.

    Row n of a request is written at KV index `prefix_lens + tail_offset + n` and sees KV indices
    below `prefix_lens`, plus index `prefix_lens + j` for every set bit j of its ancestor mask.
    Without masks the new tokens are plainly causal.
    """

    mode: ForwardMode
    tokens: torch.Tensor
    """int64[T]: token ids."""
    positions: torch.Tensor
    """int64[T]: rotary positions."""
    prefix_lens: torch.Tensor
    """int64[B]: committed KV length of each request."""
    page_table: torch.Tensor
    """int64[B, P]: pages of each request in order; covers `max_kv_len`."""
    num_new: int
    """N: new tokens per request."""
    max_kv_len: int
    """Host upper bound of prefix + tail over the batch."""
    ancestors: torch.Tensor | None = None
    """int64[T]: ancestor bits over the tail, own bit included; None: causal."""
    tail_offset: int = 0
    """Where in the tail the new rows start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    """A request takes a slot: its sampling parameters."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGrant:
    """Pages appended to a slot's table from column `first`."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A run of prompt tokens starting at index `start` of the request in `slot`."""

    ticket: int
    """Of the request's present stay in its slot: a preempted request comes back with another."""
    slot: int
    start: int
    tokens: tuple[int, ...]
    next_token: int | None
    """The prompt token behind the chunk; None after the last chunk, where it is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """All that fixes the tensor shapes and the branches of one pass: a graph's key."""

    num_requests: int
    num_new: int
    max_kv_len: int
    sampled: bool
    filtered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: slots to set up, prompt chunks to prefill, then one cycle over `slots`."""

    inits: tuple[SlotInit, ...]
    grants: tuple[PageGrant, ...]
    chunks: tuple[PrefillChunk, ...]
    prefill_shape: PassShape | None
    tickets: tuple[int, ...]
    """Of the requests in the cycle; see `PrefillChunk.ticket`."""
    slots: tuple[int, ...]
    cycle_shape: PassShape | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.chunks and not self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens a step drew, on the host."""

    first_tokens: tuple[tuple[int, int], ...]
    """(ticket, token) of every prompt that finished prefilling."""
    cycle_tokens: tuple[tuple[int, tuple[int, ...]], ...]
    """(ticket, committed tokens) of every request in the cycle."""
