"""Draft trees as a cycle passes them on.

How they are made stands in `eyas.kernels.tree`. A tree has N nodes a request; node 0 is the root, a
parent stands before its children, and bit j of a node's mask says that it sees node j. Tensors
only; nothing here knows tokens' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.kernels.tree import Nodes, Pool, chain, plant, tree


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
    return _draft(chain(roots, drafts), drafts.shape[1], True)


def tree_draft(
    roots: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, depth: int
) -> Draft:
    """A tree from roots int64[B], drafts int64[B, N-1] and their parents' node index int64[B, N-1].

    A parent's index must be lower than its child's.
    """
    return _draft(tree(roots, drafts, parents, depth), depth, False)


def best_draft(roots: torch.Tensor, pool: Pool, count: int, depth: int) -> Draft:
    """The tree of the roots int64[B] and the `count - 1` best candidates of a pool."""
    return _draft(plant(roots, pool, count, depth), depth, False)


def _draft(nodes: Nodes, depth: int, is_chain: bool) -> Draft:
    tokens, parents, depths, ancestors = nodes
    return Draft(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        depth=depth,
        is_chain=is_chain,
    )
