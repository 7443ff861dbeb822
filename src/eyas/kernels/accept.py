"""Acceptance and what follows from it for a slot's row, in one launch.

The walk: from the root to the child that carries the token drawn at a node, as long as there is
one. Source: SGLang's and EAGLE's greedy verification; here the draws may be sampled. Nothing is
computed but integers, so kernel and reference agree exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns


class Slots(NamedTuple):
    """The rows of B requests, and where all slots' rows lie."""

    slots: torch.Tensor
    """int64[B]: which ones."""
    kv_lens: torch.Tensor
    """int64[B]: committed KV length before the cycle."""
    all_kv_lens: torch.Tensor
    """int64[S], written."""
    all_roots: torch.Tensor
    """int64[S], written."""
    history: torch.Tensor
    """int64[S, M], written."""


class Settled(NamedTuple):
    """What a cycle commits; past `counts` tokens mean nothing and the path is the root."""

    out: torch.Tensor
    """int64[B, depth + 2]: count, then tokens."""
    tokens: torch.Tensor
    """int64[B, depth + 1]"""
    counts: torch.Tensor
    """int64[B]"""
    path: torch.Tensor
    """int64[B, depth + 1]: node whose draw is the token."""
    rows: torch.Tensor
    """int64[B, depth + 1]: the path's rows among those of all requests."""
    positions: torch.Tensor
    """int64[B, depth + 1]: where the nodes' own tokens stand, within the history."""
    kv_lens: torch.Tensor
    """int64[B]: committed KV length after the cycle."""


def walk(
    tokens: torch.Tensor, parents: torch.Tensor | None, drawn: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Path int64[B, depth + 1] and counts int64[B] of trees [B, N] with draws int64[B, N].

    Without parents trees are chains. A duplicate among siblings is followed once (the first).
    """
    nodes = torch.arange(drawn.shape[1], device=drawn.device)
    if parents is None:
        run = (tokens[:, 1:] == drawn[:, :-1]).long().cumprod(1)
        path = torch.cat((torch.zeros_like(drawn[:, :1]), run * nodes[1:]), dim=1)
        return path, run.sum(1) + 1
    hit = tokens == drawn.gather(1, parents)
    current = torch.zeros_like(drawn[:, :1])
    alive = torch.ones_like(current, dtype=torch.bool)
    taken, counts = [current], torch.ones_like(current)
    for _ in range(depth):
        child = hit & (parents == current) & (nodes > 0) & alive
        alive = child.any(1, keepdim=True)
        current = torch.where(alive, child.long().argmax(1, keepdim=True), 0)
        taken.append(current)
        counts = counts + alive
    return torch.cat(taken, dim=1), counts[:, 0]


def settle_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    depth: int,
    slots: Slots,
) -> Settled:
    """See `settle`."""
    path, counts = walk(tokens, parents, drawn, depth)
    committed = drawn.gather(1, path)
    index = slots.kv_lens[:, None] + torch.arange(depth + 2, device=drawn.device)
    index = index.clamp(max=slots.history.shape[1] - 1)
    slots.history[slots.slots[:, None], index[:, 1:]] = committed
    slots.all_roots[slots.slots] = committed.gather(1, (counts - 1)[:, None])[:, 0]
    kv_lens = slots.kv_lens + counts
    slots.all_kv_lens[slots.slots] = kv_lens
    out = torch.cat((counts[:, None], committed), dim=1)
    rows = path + torch.arange(len(path), device=path.device)[:, None] * drawn.shape[1]
    return Settled(out, committed, counts, path, rows, index[:, :-1], kv_lens)


@triton.jit
def _accept_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    parents_ptr,
    drawn_ptr,
    slots_ptr,
    kv_lens_ptr,
    all_kv_lens_ptr,
    all_roots_ptr,
    history_ptr,
    out_ptr,
    committed_ptr,
    counts_ptr,
    path_ptr,
    rows_ptr,
    positions_ptr,
    lens_ptr,
    nodes,
    depth,
    width,
    CHAIN: tl.constexpr,
    NODES: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request): its walk, then its slot."""
    take_turn(EARLY)
    request = tl.program_id(0)
    node, place = tl.arange(0, NODES), tl.arange(0, PLACES)
    inside, first = node < nodes, request * nodes
    tokens = tl.load(tokens_ptr + first + node, inside, -1)
    if CHAIN:
        before = tl.load(drawn_ptr + first + node - 1, inside & (node > 0), -1)
        missed = (tokens != before) & inside & (node > 0)
        count = tl.min(tl.where(missed, node, nodes), 0)
        path = tl.where(place < count, place, 0)
        current = count - 1
    else:
        parents = tl.load(parents_ptr + first + node, inside, -1)
        current = request * 0
        count, alive = current + 1, current + 1
        path = tl.zeros([PLACES], tl.int32)
        for step in range(1, depth + 1):
            wanted = tl.load(drawn_ptr + first + current)
            hit = inside & (node > 0) & (tokens == wanted) & (parents == current) & (alive > 0)
            child = tl.min(tl.where(hit, node, nodes), 0)
            alive = tl.where(child < nodes, 1, 0)
            current = tl.where(alive > 0, child, current)
            path = tl.where((place == step) & (alive > 0), child, path)
            count += alive
    used = place <= depth
    committed = tl.load(drawn_ptr + first + path, used, 0)
    row = request * (depth + 1) + place
    tl.store(committed_ptr + row, committed, used)
    tl.store(path_ptr + row, path.to(tl.int64), used)
    tl.store(rows_ptr + row, (first + path).to(tl.int64), used)
    tl.store(out_ptr + request * (depth + 2) + 1 + place, committed, used)
    tl.store(out_ptr + request * (depth + 2), count.to(tl.int64))
    tl.store(counts_ptr + request, count.to(tl.int64))
    kv_len, slot = tl.load(kv_lens_ptr + request), tl.load(slots_ptr + request)
    tl.store(positions_ptr + row, tl.minimum(kv_len + place, width - 1), used)
    index = kv_len + 1 + place
    kept = (place < count) & (index < width)
    tl.store(history_ptr + slot * width + index, committed, kept)
    tl.store(all_roots_ptr + slot, tl.load(drawn_ptr + first + current))
    tl.store(all_kv_lens_ptr + slot, kv_len + count)
    tl.store(lens_ptr + request, kv_len + count)


def settle_triton(
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    depth: int,
    slots: Slots,
) -> Settled:
    """See `settle`."""
    requests, nodes = tokens.shape
    slots = slots._replace(slots=slots.slots.contiguous())
    shapes = ((requests, depth + 2), (requests, depth + 1), (requests,))
    out, committed, counts = (
        torch.empty(s, dtype=torch.int64, device=tokens.device) for s in shapes
    )
    path, rows, positions = (torch.empty_like(committed) for _ in range(3))
    settled = Settled(out, committed, counts, path, rows, positions, torch.empty_like(counts))
    _accept_kernel[(requests,)](
        tokens.contiguous(),
        tokens if parents is None else parents.contiguous(),
        drawn.contiguous(),
        *slots,
        *settled,
        nodes,
        depth,
        slots.history.shape[1],
        CHAIN=parents is None,
        NODES=block_of(nodes),
        PLACES=block_of(depth + 1),
        num_warps=1,
        **turns(tokens),
    )
    return settled


def settle(
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    drawn: torch.Tensor,
    depth: int,
    slots: Slots,
) -> Settled:
    """Walk the trees tokens, parents int64[B, N] by the target's draws int64[B, N].

    Without parents trees are chains: node n's is n - 1. Moves the slots' rows forward: tokens
    behind the roots, new roots, longer KV.
    """
    run = settle_triton if runs_kernels(tokens) else settle_reference
    return run(tokens, parents, drawn, depth, slots)


def cost(requests: int, nodes: int, depth: int) -> tuple[int, int]:
    """(integer operations, bytes) of a cycle's acceptance."""
    return requests * nodes * (depth + 4), 8 * requests * (3 * nodes + 7 * (depth + 1) + 9)
