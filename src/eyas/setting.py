"""How passes are spread over ranks and requests, and in which precision; what costs follow from.

Plain numbers. What a pass does in a setting is counted in `cost.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from eyas.config import Strict, option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Strict):
    """Bits of a stored number, scales included: 4.5 for 4 bits in groups of 32."""

    weight_bits: float = option(16.0, "bits of a weight")
    expert_bits: float = option(0.0, "bits of a routed expert's weight; 0: as other weights")
    kv_bits: float = option(16.0, "bits of a kept key or value")
    draft_bits: float = option(16.0, "bits of a drafter's weight while it drafts")
    extend_bits: float = option(16.0, "bits of its weights for committed tokens")

    def __post_init__(self) -> None:
        for name in ("weight_bits", "kv_bits", "draft_bits", "extend_bits"):
            value = getattr(self, name)
            require(0 < value <= 32, f"{name}={value}", "must lie in (0, 32]", "give such as 16")
        value = self.expert_bits
        require(0 <= value <= 32, f"expert_bits={value}", "must lie in 0 .. 32", "give such as 4.5")

    @property
    def expert(self) -> float:
        """Bits of a routed expert's weight."""
        return self.expert_bits or self.weight_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Strict):
    """How passes are spread over ranks, over which requests, in which precision."""

    ranks: int = 1
    batch: int = 1
    context: int = 512
    """Committed positions of a request."""
    precision: Precision = Precision()
    data_parallel_attention: bool = False
    """Every rank has whole attention for its share of the requests."""
    context_ranks: int = 1
    """Ranks that a request's keys and values are shared among."""
    sharded_drafter: bool = False
    """Whether the drafter too is tensor-parallel; else every rank drafts the same."""
    kv_per_node: bool = False
    """Whether verify attention reads keys and values for each node, not once for all."""
    capture: bool = True
    """Whether keeping hidden states for the drafter takes copies."""
    tree: bool = False
    """Whether a pass's rows are nodes of trees, not of chains."""
    expert_overlap: float = 0.0
    """0: a request's nodes choose experts independently and evenly; 1: all choose the same ones."""

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "context_ranks"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")
        require(self.context >= 0, f"context={self.context}", "must not be negative", "give 0")
        value = self.expert_overlap
        require(0 <= value <= 1, f"expert_overlap={value}", "must lie in 0 .. 1", "give such as 0")
        require(
            self.ranks % self.context_ranks == 0,
            f"context_ranks={self.context_ranks} of {self.ranks} ranks",
            "groups of ranks are of one size",
            "give a divisor of the ranks",
        )

    @property
    def attention_ranks(self) -> int:
        """Ranks that share the heads of one request."""
        return 1 if self.data_parallel_attention else self.ranks

    @property
    def attention_batch(self) -> int:
        """Requests that one rank attends for."""
        return -(-self.batch // self.ranks) if self.data_parallel_attention else self.batch

    @property
    def alone(self) -> Setting:
        """The same for a network that every rank has whole."""
        return dataclasses.replace(
            self, ranks=1, context_ranks=1, data_parallel_attention=False, kv_per_node=False
        )
