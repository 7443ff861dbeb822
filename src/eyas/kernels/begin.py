"""How drafts begin: what slots keep, put where the first pass reads it, in one launch.

A chain's tokens and positions, or the pool of a tree's candidates and its first frontier. Nothing
is computed: kernels and references agree exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.draw import COLUMNS, Kept
from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.tree import Pool, int64s


class Chain(NamedTuple):
    """Chains of N nodes of which the root and the first draft are known."""

    tokens: torch.Tensor
    """int64[B, N]; columns from 2 on are unset."""
    positions: torch.Tensor
    """int64[B, N]: where the nodes stand in their sequences."""
    hidden: torch.Tensor
    """[B, F]: what the first pass is fed."""


class Frontier(NamedTuple):
    """Nodes that grow next, [B, topk] each."""

    tokens: torch.Tensor
    scores: torch.Tensor
    pool_index: torch.Tensor
    bits: torch.Tensor
    """int64: ancestors among the draft rows written so far, own row included."""
    positions: torch.Tensor
    """int64: rotary positions."""
    hidden: torch.Tensor
    """[B * topk, F]: what their pass is fed."""


def begin_chain_reference(
    slots: torch.Tensor, roots: torch.Tensor, kv_lens: torch.Tensor, kept: Kept, nodes: int
) -> Chain:
    """See `begin_chain`."""
    tokens = roots.new_zeros(slots.shape[0], nodes)
    tokens[:, 0], tokens[:, 1] = roots, kept.tokens[slots, 0]
    positions = kv_lens[:, None] + torch.arange(nodes, device=slots.device)
    return Chain(tokens, positions, kept.hidden[slots])


def begin_tree_reference(
    slots: torch.Tensor, prefix_lens: torch.Tensor, kept: Kept, steps: int
) -> tuple[Frontier, Pool]:
    """See `begin_tree`."""
    tokens, scores = kept.tokens[slots], kept.scores[slots]
    count, topk = tokens.shape
    size = topk + (steps - 1) * topk * topk
    lanes = torch.arange(topk, device=slots.device)
    pool = Pool(
        tokens.new_empty(count, size), scores.new_empty(count, size), tokens.new_empty(count, size)
    )
    for whole, part in zip(pool, (tokens, scores, torch.full_like(tokens, -1)), strict=True):
        whole[:, :topk] = part
    frontier = Frontier(
        tokens=tokens,
        scores=scores,
        pool_index=lanes.expand_as(tokens),
        bits=(torch.ones_like(lanes) << lanes).expand_as(tokens),
        positions=prefix_lens[:, None].expand_as(tokens),
        hidden=kept.hidden[slots].repeat_interleave(topk, dim=0),
    )
    return frontier, pool


@triton.jit
def _chain_begin_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,
    roots_ptr,
    kv_lens_ptr,
    kept_hidden_ptr,
    kept_tokens_ptr,
    tokens_ptr,
    positions_ptr,
    hidden_ptr,
    nodes,
    width,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request, block of the state)."""
    take_turn(EARLY)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.load(kept_hidden_ptr + slot * width + columns, columns < width)
    tl.store(hidden_ptr + request * width + columns, state, columns < width)
    if tl.program_id(1) == 0:
        node, row = tl.arange(0, NODES), request * nodes
        first, root = tl.load(kept_tokens_ptr + slot), tl.load(roots_ptr + request)
        tl.store(tokens_ptr + row + node, tl.where(node == 0, root, first), node < 2)
        kv_len = tl.load(kv_lens_ptr + request)
        tl.store(positions_ptr + row + node, kv_len + node, node < nodes)


@triton.jit
def _tree_begin_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,
    prefix_ptr,
    kept_hidden_ptr,
    kept_tokens_ptr,
    kept_scores_ptr,
    pool_tokens_ptr,
    pool_scores_ptr,
    pool_parents_ptr,
    to_tokens_ptr,
    to_scores_ptr,
    to_index_ptr,
    to_bits_ptr,
    to_positions_ptr,
    to_hidden_ptr,
    pool_size,
    width,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request, block of the state)."""
    take_turn(EARLY)
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    slot, used = tl.load(slots_ptr + request), lane < TOPK
    to = request * TOPK + lane
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.load(kept_hidden_ptr + slot * width + columns, columns < width)
    place = to_hidden_ptr + to[:, None] * width + columns[None, :]
    tl.store(place, state[None, :], used[:, None] & (columns < width)[None, :])
    if tl.program_id(1) == 0:
        tokens = tl.load(kept_tokens_ptr + slot * TOPK + lane, used, 0)
        scores = tl.load(kept_scores_ptr + slot * TOPK + lane, used, 0.0)
        first, number = request * pool_size + lane, lane.to(tl.int64)
        tl.store(pool_tokens_ptr + first, tokens, used)
        tl.store(pool_scores_ptr + first, scores, used)
        tl.store(pool_parents_ptr + first, number * 0 - 1, used)
        tl.store(to_tokens_ptr + to, tokens, used)
        tl.store(to_scores_ptr + to, scores, used)
        tl.store(to_index_ptr + to, number, used)
        tl.store(to_bits_ptr + to, (number * 0 + 1) << number, used)
        tl.store(to_positions_ptr + to, tl.load(prefix_ptr + request) + number * 0, used)


def blocks_of(width: int) -> int:
    """Programs that copy a state's numbers."""
    return max(1, triton.cdiv(width, COLUMNS))


def new_frontier(scores: torch.Tensor, count: int, topk: int, states: torch.Tensor) -> Frontier:
    """An unset one, of scores' and states' types."""
    tokens, index, bits, positions = int64s(4, scores, count, topk)
    hidden = states.new_empty(count * topk, states.shape[1])
    return Frontier(tokens, scores.new_empty(count, topk), index, bits, positions, hidden)


def begin_chain_triton(
    slots: torch.Tensor, roots: torch.Tensor, kv_lens: torch.Tensor, kept: Kept, nodes: int
) -> Chain:
    """See `begin_chain`."""
    count, width = slots.shape[0], kept.hidden.shape[1]
    tokens, positions = int64s(2, slots, count, nodes)
    made = Chain(tokens, positions, kept.hidden.new_empty(count, width))
    _chain_begin_kernel[(count, blocks_of(width))](
        slots.contiguous(),
        roots,
        kv_lens,
        kept.hidden,
        kept.tokens,
        *made,
        nodes,
        width,
        NODES=block_of(nodes),
        COLUMNS=COLUMNS,
        **turns(slots),
    )
    return made


def begin_tree_triton(
    slots: torch.Tensor, prefix_lens: torch.Tensor, kept: Kept, steps: int
) -> tuple[Frontier, Pool]:
    """See `begin_tree`."""
    count, topk = slots.shape[0], kept.tokens.shape[1]
    size, width = topk + (steps - 1) * topk * topk, kept.hidden.shape[1]
    tokens, parents = int64s(2, slots, count, size)
    pool = Pool(tokens, kept.scores.new_empty(count, size), parents)
    made = new_frontier(kept.scores, count, topk, kept.hidden)
    _tree_begin_kernel[(count, blocks_of(width))](
        slots.contiguous(),
        prefix_lens,
        *kept,
        *pool,
        *made,
        size,
        width,
        TOPK=topk,
        LANES=block_of(topk),
        COLUMNS=COLUMNS,
        **turns(slots),
    )
    return made, pool


def begin_chain(
    slots: torch.Tensor, roots: torch.Tensor, kv_lens: torch.Tensor, kept: Kept, nodes: int
) -> Chain:
    """Chains of `nodes` >= 2 behind the roots int64[B] of `slots` int64[B]; the root is at kv_lens.

    `kept` are all slots' rows.
    """
    run = begin_chain_triton if runs_kernels(slots) else begin_chain_reference
    return run(slots, roots, kv_lens, kept, nodes)


def begin_tree(
    slots: torch.Tensor, prefix_lens: torch.Tensor, kept: Kept, steps: int
) -> tuple[Frontier, Pool]:
    """First frontiers and pools of trees of `steps` levels; draft rows lie behind `prefix_lens`."""
    run = begin_tree_triton if runs_kernels(slots) else begin_tree_reference
    return run(slots, prefix_lens, kept, steps)


def cost(requests: int, topk: int, state_bytes: int) -> tuple[int, int]:
    """(FLOPs, bytes) for states of so many bytes."""
    return 0, requests * ((1 + topk) * state_bytes + 96 * topk)
