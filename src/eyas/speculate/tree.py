"""Draft trees as a cycle passes them on.

How they are made stands in `eyas.kernels`. A tree has N nodes a request; node 0 is the root, a
parent stands before its children, and bit j of a node's mask says that it sees node j. Tensors
only; nothing here knows tokens' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.kernels.tree import Nodes, Pool, plant, tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The nodes to verify, B requests of N nodes."""

    tokens: torch.Tensor
    """int64[B, N]: node 0 is the root token."""
    positions: torch.Tensor
    """int64[B, N]: where nodes stand in their sequences; the root's is the committed KV length."""
    depth: int
    """Greatest depth a node can have."""
    parents: torch.Tensor | None = None
    """int64[B, N]: node index of the parent; the root's is 0. None: chains, node n's is n - 1."""
    ancestors: torch.Tensor | None = None
    """int64[B, N]: bit j is set where node j is visible, own bit included. None: chains."""


def chain_draft(roots: torch.Tensor, kv_lens: torch.Tensor, drafts: torch.Tensor) -> Draft:
    """A chain from roots int64[B] at kv_lens int64[B] and drafts int64[B, K]."""
    tokens = torch.cat((roots[:, None], drafts), dim=1)
    positions = kv_lens[:, None] + torch.arange(tokens.shape[1], device=roots.device)
    return Draft(tokens=tokens, positions=positions, depth=drafts.shape[1])


def tree_draft(
    roots: torch.Tensor,
    kv_lens: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
) -> Draft:
    """A tree from roots int64[B] at kv_lens int64[B], and drafts int64[B, N-1].

    parents int64[B, N-1] are node indices, each lower than its child's.
    """
    return _draft(tree(roots, kv_lens, drafts, parents, depth), depth)


def best_draft(
    roots: torch.Tensor, kv_lens: torch.Tensor, pool: Pool, count: int, depth: int
) -> Draft:
    """The tree of the roots int64[B] at kv_lens and the `count - 1` best candidates of a pool."""
    return _draft(plant(roots, kv_lens, pool, count, depth), depth)


def _draft(nodes: Nodes, depth: int) -> Draft:
    tokens, positions, parents, ancestors = nodes
    return Draft(
        tokens=tokens, positions=positions, parents=parents, ancestors=ancestors, depth=depth
    )
