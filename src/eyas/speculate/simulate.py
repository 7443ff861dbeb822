"""Acceptance by decree: timing without the right weights.

Replaces the target's draws so that each position of a draft is accepted with a given probability,
by coins that are a pure function of request seed, sequence index and depth. The text then means
nothing; whoever shows it or its speed says so (`EngineConfig.simulated`).
"""

from __future__ import annotations

import torch

from eyas.sampling import SamplingRows, gumbel_noise
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
    float32[depth]. An accepted node draws its first child's token; a refused one keeps its draw,
    or a token that no node carries if its draw is a node's.
    """
    depths = torch.arange(rates.shape[0], device=drawn.device)
    uniform = torch.exp(-torch.exp(-gumbel_noise(rows.seed, kv_lens, depths)))
    passes = torch.cat((uniform < rates, torch.zeros_like(kv_lens, dtype=torch.bool)[:, None]), 1)
    nodes = torch.arange(drawn.shape[1], device=drawn.device)
    parents = (nodes - 1).clamp(min=0)[None] if draft.parents is None else draft.parents
    child = ((parents[:, None, :] == nodes[:, None]) & (nodes > 0)).expand(len(drawn), -1, -1)
    first = child.long().argmax(2)
    depth = (draft.positions - kv_lens[:, None]).clamp(max=rates.shape[0])
    wanted = passes.gather(1, depth) & child.any(2)
    taken = (drawn[:, :, None] == draft.tokens[:, None, :]).any(2)
    few = torch.arange(drawn.shape[1] + 1, device=drawn.device)
    carried = (draft.tokens[:, :, None] == few).any(1).long()
    refused = torch.where(taken, carried.argmin(1, keepdim=True), drawn)
    return torch.where(wanted, draft.tokens.gather(1, first), refused)
