"""One level of a draft tree's growth, in one launch.

Trees are EAGLE-2's (arXiv 2406.16858, section 4). Candidates of a request lie in a pool, level by
level: `topk` of the first, then `topk * topk` a level, children of the frontier in its order.
Kernel and reference agree exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, number_of, without
from eyas.kernels.tree import Pool, int64s


class Frontier(NamedTuple):
    """Nodes that grow next, [B, topk] each."""

    tokens: torch.Tensor
    scores: torch.Tensor
    pool_index: torch.Tensor
    bits: torch.Tensor
    """int64: ancestors among the draft rows written so far, own row included."""
    positions: torch.Tensor
    """int64: rotary positions."""
    rows: torch.Tensor
    """int64: row, of the last pass, of each node's parent; there, B * topk rows."""


def first_pool(tokens: torch.Tensor, scores: torch.Tensor, steps: int) -> Pool:
    """The pool of a tree of `steps` levels, the first of which is tokens, scores [B, topk]."""
    count, topk = tokens.shape
    size = topk + (steps - 1) * topk * topk
    pool = Pool(
        tokens.new_empty(count, size), scores.new_empty(count, size), tokens.new_empty(count, size)
    )
    pool.tokens[:, :topk], pool.scores[:, :topk] = tokens, scores
    pool.parents[:, :topk].fill_(-1)
    return pool


def advance_reference(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    step: int,
) -> Frontier:
    """See `advance`."""
    num_requests, topk = frontier.tokens.shape
    base = topk + (step - 1) * topk * topk
    total = (scores.view(num_requests, topk, topk) + frontier.scores[:, :, None]).flatten(1)
    tokens = tokens.view(num_requests, -1)
    level = slice(base, base + topk * topk)
    pool.tokens[:, level], pool.scores[:, level] = tokens, total
    pool.parents[:, level] = frontier.pool_index.repeat_interleave(topk, dim=1)
    best = torch.sort(total, dim=1, descending=True, stable=True).indices[:, :topk]
    parent, lane = best // topk, torch.arange(topk, device=best.device)
    own = torch.ones_like(best) << (step * topk + lane)
    first_row = torch.arange(0, num_requests * topk, topk, device=best.device)[:, None]
    return Frontier(
        tokens=tokens.gather(1, best),
        scores=total.gather(1, best),
        pool_index=best + base,
        bits=frontier.bits.gather(1, parent) | own,
        positions=(prefix_lens + step)[:, None].expand(-1, topk),
        rows=first_row + parent,
    )


@triton.jit
def _tree_advance_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    scores_ptr,
    from_scores_ptr,
    from_index_ptr,
    from_bits_ptr,
    prefix_ptr,
    pool_tokens_ptr,
    pool_scores_ptr,
    pool_parents_ptr,
    to_tokens_ptr,
    to_scores_ptr,
    to_index_ptr,
    to_bits_ptr,
    to_positions_ptr,
    to_rows_ptr,
    pool_size,
    base,
    step,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request): its children into the pool, the best into the next frontier."""
    take_turn(EARLY)
    request, lane = tl.program_id(0), tl.arange(0, BLOCK)
    used = lane < TOPK
    inside, child = used[:, None] & used[None, :], lane[:, None] * TOPK + lane[None, :]
    first = request * TOPK
    tokens = tl.load(tokens_ptr + first * TOPK + child, inside, 0)
    scores = tl.load(scores_ptr + first * TOPK + child, inside, 0.0)
    scores += tl.load(from_scores_ptr + first + lane, used, 0.0)[:, None]
    place = request.to(tl.int64) * pool_size + base + child
    parents = tl.load(from_index_ptr + first + lane, used, 0)
    tl.store(pool_tokens_ptr + place, tokens, inside)
    tl.store(pool_scores_ptr + place, scores, inside)
    tl.store(pool_parents_ptr + place, parents[:, None] + child * 0, inside)
    keys = without(key_of(scores, child), ~inside)
    chosen = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.max(tl.max(keys, 1), 0)
        keys = without(keys, keys == best)
        chosen = tl.where(lane == k, number_of(best), chosen)
    parent = chosen // TOPK
    total = tl.load(scores_ptr + first * TOPK + chosen, used, 0.0)
    total += tl.load(from_scores_ptr + first + parent, used, 0.0)
    bits = tl.load(from_bits_ptr + first + parent, used, 0)
    own = (lane * 0 + 1).to(tl.int64) << (step * TOPK + lane).to(tl.int64)
    prefix = tl.load(prefix_ptr + request)
    to = first + lane
    tl.store(to_tokens_ptr + to, tl.load(tokens_ptr + first * TOPK + chosen, used, 0), used)
    tl.store(to_scores_ptr + to, total, used)
    tl.store(to_index_ptr + to, (chosen + base).to(tl.int64), used)
    tl.store(to_bits_ptr + to, bits | own, used)
    tl.store(to_positions_ptr + to, prefix + step + lane * 0, used)
    tl.store(to_rows_ptr + to, (first + parent).to(tl.int64), used)


def advance_triton(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    step: int,
) -> Frontier:
    """See `advance`."""
    requests, topk = frontier.tokens.shape
    to_tokens, index, bits, positions, rows = int64s(5, tokens, requests, topk)
    made = Frontier(to_tokens, torch.empty_like(frontier.scores), index, bits, positions, rows)
    _tree_advance_kernel[(requests,)](
        tokens,
        scores,
        frontier.scores.contiguous(),
        frontier.pool_index.contiguous(),
        frontier.bits.contiguous(),
        prefix_lens,
        *pool,
        *made,
        pool.scores.shape[1],
        topk + (step - 1) * topk * topk,
        step,
        TOPK=topk,
        BLOCK=block_of(topk),
        num_warps=1,
        **turns(tokens),
    )
    return made


def advance(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    step: int,
) -> Frontier:
    """The `topk` best children of a frontier; all of them go to their level's place in the pool.

    tokens int64 and scores float32 [B * topk, topk]: candidates of each frontier node, whose
    scores are added. The next frontier runs at `prefix_lens + step`; ties go to the lower index.
    """
    run = advance_triton if runs_kernels(tokens) else advance_reference
    return run(tokens, scores, frontier, pool, prefix_lens, step)


def cost(requests: int, topk: int) -> tuple[int, int]:
    """(integer operations, bytes) of a level."""
    return requests * topk**2 * (topk + 2), requests * (36 * topk**2 + 64 * topk)
