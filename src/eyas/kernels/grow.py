"""One level of a draft tree's growth, in the launch that follows the logits' tiles.

Trees are EAGLE-2's (arXiv 2406.16858, section 4). Candidates of a request lie in a pool, level by
level: `topk` of the first, then `topk * topk` a level, children of the frontier in its order. Given
the same scores kernel and reference agree exactly; ties go to the lower index.
"""

from __future__ import annotations

import torch

from eyas.kernels.begin import Frontier, blocks_of, new_frontier
from eyas.kernels.draw import COLUMNS, Scored, candidates, tiles_of
from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns, warps_of
from eyas.kernels.order import key_of, number_of, score_of, without
from eyas.kernels.tree import Pool


def advance_reference(
    scored: Scored,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    states: torch.Tensor,
    step: int,
) -> Frontier:
    """See `advance`."""
    tokens, scores = candidates(scored)
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
        hidden=states.index_select(0, (first_row + parent).flatten()),
    )


@triton.jit
def _children(  # type: ignore[no-untyped-def]
    keys_ptr, sums_ptr, from_scores_ptr, first, tiles,
    TOPK: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys [LANES, LANES] by score and child number, and columns, of a request's children.

    A node's are those of a row, best first; `first` is the request's first row.
    """
    lane, one = tl.arange(0, LANES), tl.arange(0, BLOCK)
    row, used = (first + lane)[:, None], (lane < TOPK)[:, None]
    lowest = -0x8000000000000000
    there = used & (one < tiles * TOPK)[None, :]
    keys = tl.load(keys_ptr + row * tiles * TOPK + one[None, :], there, lowest)
    tile = tl.arange(0, TILES)
    there = used & (tile < tiles)[None, :]
    tops = tl.load(keys_ptr + (row * tiles + tile[None, :]) * TOPK, there, lowest)
    sums = tl.load(sums_ptr + row * tiles + tile[None, :], there, 0.0)
    top = score_of(tl.max(keys, 1))
    parts = tl.where(there, sums * tl.exp(score_of(tops) - top[:, None]), 0.0)
    log_sum = top + tl.log(tl.sum(parts, 1))
    above = tl.load(from_scores_ptr + first + lane, lane < TOPK, 0.0)
    columns = tl.zeros([LANES, LANES], tl.int32)
    scores = tl.zeros([LANES, LANES], tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.max(keys, 1)
        keys = without(keys, keys == best[:, None])
        here = (lane == k)[None, :]
        columns = tl.where(here, number_of(best)[:, None], columns)
        scores = tl.where(here, (score_of(best) - log_sum + above)[:, None], scores)
    return scores, columns


@triton.jit
def _tree_level_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    sums_ptr,
    ids_ptr,
    from_scores_ptr,
    from_index_ptr,
    from_bits_ptr,
    prefix_ptr,
    states_ptr,
    pool_tokens_ptr,
    pool_scores_ptr,
    pool_parents_ptr,
    to_tokens_ptr,
    to_scores_ptr,
    to_index_ptr,
    to_bits_ptr,
    to_positions_ptr,
    to_hidden_ptr,
    tiles,
    pool_size,
    base,
    step,
    states_stride,
    width,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request, block of the states): its best children, and the states they grow from.

    The first block's also writes: children into the pool, the best into the next frontier.
    """
    take_turn(EARLY)
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    used, first = lane < TOPK, request * TOPK
    inside, child = used[:, None] & used[None, :], lane[:, None] * TOPK + lane[None, :]
    scores, columns = _children(
        keys_ptr, sums_ptr, from_scores_ptr, first, tiles, TOPK, LANES, TILES, BLOCK
    )
    keys = without(key_of(scores, child), ~inside)
    chosen = tl.zeros([LANES], tl.int32)
    total = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.max(tl.max(keys, 1), 0)
        taken = keys == best
        column = tl.sum(tl.sum(tl.where(taken, columns, 0), 1), 0)
        keys = without(keys, taken)
        chosen = tl.where(lane == k, number_of(best), chosen)
        total = tl.where(lane == k, score_of(best), total)
        number = tl.where(lane == k, column, number)
    parent = first + chosen // TOPK
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    copied = used[:, None] & (place < width)[None, :]
    states = tl.load(states_ptr + parent[:, None] * states_stride + place[None, :], copied)
    tl.store(to_hidden_ptr + (first + lane)[:, None] * width + place[None, :], states, copied)
    if tl.program_id(1) == 0:
        into = request * pool_size + base + child
        parents = tl.load(from_index_ptr + first + lane, used, 0)
        tl.store(pool_tokens_ptr + into, tl.load(ids_ptr + columns, inside, 0), inside)
        tl.store(pool_scores_ptr + into, scores, inside)
        tl.store(pool_parents_ptr + into, parents[:, None] + child * 0, inside)
        bits = tl.load(from_bits_ptr + parent, used, 0)
        own = (lane * 0 + 1).to(tl.int64) << (step * TOPK + lane).to(tl.int64)
        to = first + lane
        tl.store(to_tokens_ptr + to, tl.load(ids_ptr + number, used, 0), used)
        tl.store(to_scores_ptr + to, total, used)
        tl.store(to_index_ptr + to, (chosen + base).to(tl.int64), used)
        tl.store(to_bits_ptr + to, bits | own, used)
        tl.store(to_positions_ptr + to, tl.load(prefix_ptr + request) + step + lane * 0, used)


def advance_triton(
    scored: Scored,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    states: torch.Tensor,
    step: int,
) -> Frontier:
    """See `advance`."""
    tiles, (count, topk) = tiles_of(scored), frontier.tokens.shape
    made = new_frontier(frontier.scores, count, topk, states)
    _tree_level_kernel[(count, blocks_of(states.shape[1]))](
        *tiles,
        scored.ids,
        frontier.scores,
        frontier.pool_index,
        frontier.bits,
        prefix_lens,
        states,
        *pool,
        *made,
        tiles.keys.shape[1],
        pool.scores.shape[1],
        topk + (step - 1) * topk * topk,
        step,
        states.stride(0),
        states.shape[1],
        LANES=block_of(topk),
        COLUMNS=COLUMNS,
        num_warps=max(4, warps_of(block_of(topk) * tiles.blocks["BLOCK"])),
        **tiles.blocks,
        **turns(states),
    )
    return made


def advance(
    scored: Scored,
    frontier: Frontier,
    pool: Pool,
    prefix_lens: torch.Tensor,
    states: torch.Tensor,
    step: int,
) -> Frontier:
    """The `topk` best children of a frontier; all of them go to their level's place in the pool.

    `scored` are the B * topk frontier nodes' logits; their candidates' scores are added to the
    nodes'. The next frontier runs at `prefix_lens + step`, each node fed its parent's row of states
    [B * topk, F].
    """
    run = advance_triton if runs_kernels(states) else advance_reference
    return run(scored, frontier, pool, prefix_lens, states, step)


def cost(requests: int, topk: int, tiles: int, state_bytes: int) -> tuple[int, int]:
    """(integer operations, bytes) of a level, behind its tiles; states of so many bytes a node."""
    read, wrote = 8 * tiles * topk + state_bytes, 36 * topk + 64 + state_bytes
    return requests * topk * tiles * topk * (topk + 2), requests * topk * (read + wrote)
