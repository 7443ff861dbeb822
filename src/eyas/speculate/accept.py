"""Acceptance: follow the tree while the token drawn from the target is one of the children.

The target draws one token at every node by the rule plain decoding uses there. The walk from the
root goes to the child that carries the drawn token; where there is none, the drawn token is the
bonus. The committed tokens are thus the target's own draws for any drafter: lossless by
construction, with greedy as the case without noise. Pure functions of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.speculate.tree import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What a cycle commits, per request."""

    tokens: torch.Tensor
    """int64[B, depth + 1]: committed tokens, the bonus last; past `counts` they mean nothing."""
    counts: torch.Tensor
    """int64[B]: tokens committed, bonus included (1 .. depth + 1)."""
    path: torch.Tensor
    """int64[B, depth + 1]: node whose draw is the token; past `counts`, the root."""


def accept(draft: Draft, drawn: torch.Tensor) -> Accepted:
    """Walk every tree; `drawn` int64[B, N] is the target's draw at each node.

    A duplicate among siblings is followed once (the first). Source of the walk: SGLang's and
    EAGLE's greedy verification; here it also serves sampling.
    """
    if draft.is_chain:
        return _accept_chain(draft, drawn)
    wanted = drawn.gather(1, draft.parents)
    hit = draft.tokens == wanted
    current = torch.zeros_like(drawn[:, :1])
    alive = torch.ones_like(current, dtype=torch.bool)
    path, counts = [current], torch.ones_like(current)
    nodes = torch.arange(drawn.shape[1], device=drawn.device)
    for _ in range(draft.depth):
        child = hit & (draft.parents == current) & (nodes > 0) & alive
        alive = child.any(1, keepdim=True)
        current = torch.where(alive, child.long().argmax(1, keepdim=True), 0)
        path.append(current)
        counts = counts + alive
    return _committed(torch.cat(path, dim=1), counts[:, 0], drawn)


def _accept_chain(draft: Draft, drawn: torch.Tensor) -> Accepted:
    """The same for a chain: the run of drafts equal to the draws before them."""
    run = (draft.tokens[:, 1:] == drawn[:, :-1]).long().cumprod(1)
    nodes = torch.arange(1, drawn.shape[1], device=drawn.device)
    path = torch.cat((torch.zeros_like(drawn[:, :1]), run * nodes), dim=1)
    return _committed(path, run.sum(1) + 1, drawn)


def _committed(path: torch.Tensor, counts: torch.Tensor, drawn: torch.Tensor) -> Accepted:
    return Accepted(tokens=drawn.gather(1, path), counts=counts, path=path)
