"""Draft trees: topology, ancestor masks, and the choice of nodes by score.

A tree has N nodes a request; node 0 is the root, a parent stands before its children, and bit j of
a node's mask says that it sees node j. Tensors only; nothing here knows tokens' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The nodes to verify, B requests of N nodes."""

    tokens: torch.Tensor
    """int64[B, N]: node 0 is the root token."""
    parents: torch.Tensor
    """int64[B, N]: node index of the parent; the root's is 0."""
    depths: torch.Tensor
    """int64[B, N]: 0 at the root."""
    ancestors: torch.Tensor
    """int64[B, N]: bit j is set where node j is visible, own bit included."""
    depth: int
    """Greatest depth a node can have."""
    is_chain: bool
    """Whether node n's parent is n - 1 in every request."""


def chain_draft(roots: torch.Tensor, drafts: torch.Tensor) -> Draft:
    """A chain from roots int64[B] and drafts int64[B, K]."""
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    count = tokens.shape[1]
    depths = torch.arange(count, device=tokens.device)
    bits = (torch.ones_like(depths) << (depths + 1)) - 1
    return Draft(
        tokens=tokens,
        parents=(depths - 1).clamp(min=0).expand_as(tokens),
        depths=depths.expand_as(tokens),
        ancestors=bits.expand_as(tokens),
        depth=count - 1,
        is_chain=True,
    )


def tree_draft(
    roots: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, depth: int
) -> Draft:
    """A tree from roots int64[B], drafts int64[B, N-1] and their parents' node index int64[B, N-1].

    A parent's index must be lower than its child's.
    """
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    parents = torch.cat((torch.zeros_like(roots)[:, None], parents), dim=1)
    own = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    ancestors = own
    for _ in range(depth):
        ancestors = own | ancestors.gather(1, parents)
    return Draft(
        tokens=tokens,
        parents=parents,
        depths=popcount(ancestors) - 1,
        ancestors=ancestors,
        depth=depth,
        is_chain=False,
    )


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
