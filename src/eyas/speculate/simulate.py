"""Acceptance by decree: timing without the right weights.

Replaces the target's draws so that each position of a draft is accepted with a given probability,
by coins that are a pure function of request seed, sequence index and depth. The text then means
nothing; whoever shows it or its speed says so (`EngineConfig.simulated`).
"""

from __future__ import annotations

import torch

from eyas.kernels import decree as kernel
from eyas.sampling import SamplingRows
from eyas.speculate.tree import Draft


def rates_for(accept_length: float, depth: int) -> tuple[float, ...]:
    """One rate for every position, such that 1 + r + r^2 + ... + r^depth = `accept_length`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**i for i in range(depth + 1)) < accept_length:
            low = rate
        else:
            high = rate
    return (high,) * depth


def decree(
    draft: Draft,
    drawn: torch.Tensor,
    rows: SamplingRows,
    kv_lens: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """Draws int64[B, N] that make the walk accept position d with probability `rates[d]`.

    `drawn` int64[B, N] are the target's draws, `rows` and kv_lens int64[B] the requests, `rates`
    float32[depth]. The arithmetic is `eyas.kernels.decree`'s.
    """
    nodes = (draft.tokens, draft.positions, draft.parents)
    return kernel.decree(*nodes, drawn, rows.seed, kv_lens, rates)
