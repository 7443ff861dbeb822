"""Draws that make acceptance come out as decreed, in one launch.

A coin is a pure function of request seed, sequence index and depth: the uniform beneath the noise
of `eyas.sampling`. What is computed is the hash's float32 and integers, so kernel and reference
agree exactly. Nothing here knows why somebody decrees.
"""

from __future__ import annotations

import torch

from eyas.kernels.draw import uniform
from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns, warps_of
from eyas.sampling import uniform_noise


def decree_reference(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """See `decree`."""
    depths = positions - kv_lens[:, None]
    rate = torch.cat((rates, rates.new_zeros(1)))[depths.clamp(max=len(rates))]
    passes = uniform_noise(seeds, kv_lens, depths) < rate
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    above = (nodes - 1).expand_as(tokens) if parents is None else parents
    child = (above[:, None, :] == nodes[:, None]) & (nodes > 0)
    first = child.long().argmax(2)
    taken = (drawn[:, :, None] == tokens[:, None, :]).any(2)
    few = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    carried = (tokens[:, :, None] == few).any(1).long()
    refused = torch.where(taken, carried.argmin(1, keepdim=True), drawn)
    return torch.where(passes & child.any(2), tokens.gather(1, first), refused)


@triton.jit
def _decree_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    positions_ptr,
    parents_ptr,
    drawn_ptr,
    seeds_ptr,
    kv_lens_ptr,
    rates_ptr,
    out_ptr,
    nodes,
    num_rates,
    CHAIN: tl.constexpr,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request): its nodes' coins, first children and draws."""
    take_turn(EARLY)
    request, node = tl.program_id(0), tl.arange(0, NODES)
    row, inside = request * nodes, node < nodes
    kv_len = tl.load(kv_lens_ptr + request)
    depth = (tl.load(positions_ptr + row + node, inside, 0) - kv_len).to(tl.int32)
    rate = tl.load(rates_ptr + depth, inside & (depth < num_rates), 0.0)
    passes = uniform(tl.load(seeds_ptr + request), kv_len, depth) < rate
    tokens = tl.load(tokens_ptr + row + node, inside, -1)
    drawn = tl.load(drawn_ptr + row + node, inside, -1)
    first = node + 1
    if not CHAIN:
        parents = tl.load(parents_ptr + row + node, inside & (node > 0), -1)
        child = parents[None, :] == node[:, None]
        first = tl.min(tl.where(child, node[None, :], nodes), 1)
    wanted = tl.load(tokens_ptr + row + first, inside & (first < nodes), -1)
    taken = tl.max((tokens[None, :] == drawn[:, None]).to(tl.int32), 1) > 0
    carried = tl.max((tokens[None, :] == node[:, None]).to(tl.int32), 1) > 0
    free = tl.min(tl.where(carried, nodes, node), 0)
    refused = tl.where(taken, free.to(tl.int64), drawn)
    tl.store(out_ptr + row + node, tl.where(passes & (first < nodes), wanted, refused), inside)


def decree_triton(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """See `decree`."""
    requests, nodes = tokens.shape
    tokens, block = tokens.contiguous(), block_of(nodes)
    changed = torch.empty_like(tokens)
    _decree_kernel[(requests,)](
        tokens,
        positions.contiguous(),
        tokens if parents is None else parents.contiguous(),
        drawn.contiguous(),
        seeds,
        kv_lens,
        rates,
        changed,
        nodes,
        rates.shape[0],
        CHAIN=parents is None,
        NODES=block,
        num_warps=warps_of(block * block),
        **turns(tokens),
    )
    return changed


def decree(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    seeds: torch.Tensor,
    kv_lens: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """Draws int64[B, N] of which a walk accepts position d with probability `rates[d]`.

    Trees are tokens, positions, parents int64[B, N], without parents chains; `drawn` int64[B, N]
    are the target's draws, seeds and kv_lens int64[B] the requests', rates float32[depth]. An
    accepted node draws its first child's token; a refused one keeps its draw, or takes the least
    token that no node carries if its draw is a node's.
    """
    run = decree_triton if runs_kernels(tokens) else decree_reference
    return run(tokens, positions, parents, drawn, seeds, kv_lens, rates)


def cost(requests: int, nodes: int) -> tuple[int, int]:
    """(integer operations, bytes) of a cycle's decree."""
    return requests * nodes * (3 * nodes + 40), 8 * requests * (5 * nodes + 2)
