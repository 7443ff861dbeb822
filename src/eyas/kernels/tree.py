"""Draft trees from their candidates, in one launch: topology, masks, the choice of nodes by score.

A tree has N nodes a request; node 0 is the root, a parent stands before its children, and bit j of
a node's mask says that it sees node j. Kernels and references agree exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, without

CHUNK = 16
"""Candidates compared with all others at a time."""


class Nodes(NamedTuple):
    """Trees, int64[B, N] each."""

    tokens: torch.Tensor
    positions: torch.Tensor
    """Where nodes stand in their sequences; the root's is the committed KV length."""
    parents: torch.Tensor
    ancestors: torch.Tensor


class Pool(NamedTuple):
    """Candidates, [B, M] each: int64, float32, int64; parents index the pool, -1 is the root."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


def tree(
    roots: torch.Tensor,
    kv_lens: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
) -> Nodes:
    """Trees from roots int64[B], drafts int64[B, N-1] and their parents' node index int64[B, N-1].

    Roots stand at kv_lens int64[B]. A parent's index must be lower than its child's.
    """
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    parents = torch.cat((torch.zeros_like(roots)[:, None], parents), dim=1)
    own = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    ancestors = own
    for _ in range(depth):
        ancestors = own | ancestors.gather(1, parents)
    positions = kv_lens[:, None] + popcount(ancestors) - 1
    return Nodes(tokens, positions, parents, ancestors)


def popcount(bits: torch.Tensor) -> torch.Tensor:
    """Number of set bits of int64 masks, same shape."""
    places = torch.arange(64, device=bits.device)
    return ((bits[..., None] >> places) & 1).sum(-1)


def select_nodes(
    scores: torch.Tensor, parents: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best candidates of a pool and their parents as node indices of the tree.

    scores float32[B, M]; parents int64[B, M] index the pool, -1 is the root. Returns pool indices
    int64[B, count], ascending, and node indices int64[B, count] (0 the root, n the n-th chosen).
    A child never outscores its parent and stands behind it, so chosen nodes keep their parents
    (EAGLE-2, arXiv 2406.16858, section 4.2); ties go to the lower index.
    """
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    chosen = order.sort(dim=1).values
    wanted = parents.gather(1, chosen)
    place = torch.searchsorted(chosen, wanted.clamp(min=0)) + 1
    return chosen, torch.where(wanted < 0, 0, place)


def plant_reference(
    roots: torch.Tensor, kv_lens: torch.Tensor, pool: Pool, count: int, depth: int
) -> Nodes:
    """See `plant`."""
    chosen, nodes = select_nodes(pool.scores, pool.parents, count - 1)
    return tree(roots, kv_lens, pool.tokens.gather(1, chosen), nodes, depth)


@triton.jit
def _tree_plant_kernel(  # type: ignore[no-untyped-def]
    roots_ptr,
    kv_lens_ptr,
    pool_tokens_ptr,
    pool_scores_ptr,
    pool_parents_ptr,
    place_ptr,
    tokens_ptr,
    positions_ptr,
    parents_ptr,
    ancestors_ptr,
    pool_size,
    nodes,
    depth,
    POOL: tl.constexpr,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (request): ranks of its candidates, the best as nodes, and who sees whom."""
    take_turn(EARLY)
    request = tl.program_id(0)
    number = tl.arange(0, POOL)
    inside, first, row = number < pool_size, request * pool_size, request * nodes
    keys = key_of(tl.load(pool_scores_ptr + first + number, inside, float("-inf")), number)
    rank = number * 0
    for start in range(0, pool_size, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < pool_size
        scores = tl.load(pool_scores_ptr + first + other, there, float("-inf"))
        others = without(key_of(scores, other), ~there)
        rank += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), 1)
    chosen = inside & (rank < nodes - 1)
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(place_ptr + first + number, place, inside)
    tl.store(tokens_ptr + row, tl.load(roots_ptr + request))
    tl.store(parents_ptr + row, request.to(tl.int64) * 0)
    tokens = tl.load(pool_tokens_ptr + first + number, chosen, 0)
    tl.store(tokens_ptr + row + place, tokens, chosen)
    tl.debug_barrier()
    parents = tl.load(pool_parents_ptr + first + number, chosen, -1)
    above = tl.load(place_ptr + first + parents, chosen & (parents >= 0), 0)
    tl.store(parents_ptr + row + place, above.to(tl.int64), chosen)
    tl.debug_barrier()
    node = tl.arange(0, NODES)
    there = node < nodes
    parent = tl.load(parents_ptr + row + node, there, 0)
    goes = parent[:, None] == node[None, :]
    own = (node * 0 + 1).to(tl.int64) << node.to(tl.int64)
    ancestors, depths = own, node * 0
    for _ in range(depth):
        ancestors = own | tl.sum(tl.where(goes, ancestors[None, :], 0), 1)
        deeper = 1 + tl.sum(tl.where(goes, depths[None, :], 0), 1)
        depths = tl.where(node > 0, deeper, 0)
    tl.store(ancestors_ptr + row + node, ancestors, there)
    tl.store(positions_ptr + row + node, tl.load(kv_lens_ptr + request) + depths, there)


def int64s(count: int, like: torch.Tensor, *shape: int) -> list[torch.Tensor]:
    """`count` tensors int64 of `shape`."""
    return [torch.empty(shape, dtype=torch.int64, device=like.device) for _ in range(count)]


def plant_triton(
    roots: torch.Tensor, kv_lens: torch.Tensor, pool: Pool, count: int, depth: int
) -> Nodes:
    """See `plant`."""
    requests, size = pool.scores.shape
    made = Nodes(*int64s(4, roots, requests, count))
    places = torch.empty(requests, size, dtype=torch.int32, device=roots.device)
    _tree_plant_kernel[(requests,)](
        roots,
        kv_lens,
        *pool,
        places,
        *made,
        size,
        count,
        depth,
        POOL=block_of(size),
        NODES=block_of(count),
        CHUNK=CHUNK,
        **turns(roots),
    )
    return made


def plant(roots: torch.Tensor, kv_lens: torch.Tensor, pool: Pool, count: int, depth: int) -> Nodes:
    """Trees of `count` nodes, the roots int64[B] and the pool's best; see `select_nodes`.

    Roots stand at kv_lens int64[B]; `depth` bounds the nodes' depths.
    """
    run = plant_triton if runs_kernels(roots) else plant_reference
    return run(roots, kv_lens, pool, count, depth)


def cost(requests: int, pool_size: int, nodes: int) -> tuple[int, int]:
    """(integer operations, bytes) of `plant`."""
    return requests * (pool_size**2 + nodes**2), requests * (24 * pool_size + 32 * nodes)
