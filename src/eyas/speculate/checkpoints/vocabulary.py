"""Vocabularies of drafters: the map from draft ids to target ids, and equality of tokenizers."""

from __future__ import annotations

import torch

from eyas.model_config import DrafterConfig
from eyas.speculate.checkpoints.formats import refuse
from eyas.tokenizer import Tokenizer


def target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, config: DrafterConfig
) -> torch.Tensor:
    """Target ids int64[Vd] of the draft vocabulary, strictly ascending.

    `d2t` int[Vd] holds offsets: target id = draft id + d2t[draft id]. `t2d` bool[V], if given,
    must mark exactly these ids. Without `d2t` both vocabularies are the same.
    """
    size, total = config.draft_vocab_size, config.vocab_size
    if d2t is None and size != total:
        refuse(
            "tensor 'd2t'",
            f"missing, though {size} draft ids must be mapped to {total} target ids",
        )
    ids = torch.arange(size)
    if d2t is not None:
        if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
            refuse(
                f"tensor 'd2t' {d2t.dtype} {list(d2t.shape)}",
                f"must be integers [{size}] (draft_vocab_size)",
            )
        _refuse_indices(d2t, t2d, ids, total)
        ids = ids + d2t.to(torch.int64)
    if not _ascending(ids, total):
        refuse(
            "tensor 'd2t'",
            f"target ids (draft id + offset) must ascend strictly within 0..{total - 1}",
        )
    if t2d is not None and (t2d.shape != (total,) or not _marks(t2d, ids)):
        refuse("tensor 't2d'", f"must mark exactly the {size} target ids of d2t")
    return ids


def _refuse_indices(
    d2t: torch.Tensor, t2d: torch.Tensor | None, own: torch.Tensor, total: int
) -> None:
    """Refuse a map that makes sense as target ids and none as offsets."""
    if not _ascending(d2t, total):
        return
    marked = t2d is not None and t2d.shape == (total,) and _marks(t2d, d2t)
    if marked or not _ascending(own + d2t, total):
        refuse(
            "tensor 'd2t'",
            "holds target ids, where offsets from the draft ids are wanted",
            "subtract 0, 1, 2, ... from it, and check that lm_head has the rows of these ids",
        )


def _ascending(ids: torch.Tensor, total: int) -> bool:
    """Whether ids ascend strictly within 0 .. total - 1."""
    inside = bool(((ids >= 0) & (ids < total)).all())
    return inside and bool((ids.diff() > 0).all())


def _marks(t2d: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether t2d marks exactly `ids`, which lie inside it."""
    kept = torch.zeros(t2d.shape, dtype=torch.bool)
    kept[ids.long()] = True
    return torch.equal(t2d.to(torch.bool), kept)


def same_vocabulary(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raise `CheckpointError` unless a small model reads and writes the target's tokens.

    Ordinary tokens must be the same, with the same ids; added ones may be missing on one side.
    """
    ours, theirs = target.vocabulary(), drafter.vocabulary()
    remedy = "use a model with the target's tokenizer"
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            refuse(
                f"token {token!r} is {theirs[token]}",
                f"the target's tokenizer has it as {ours[token]}",
                remedy,
            )
    ours, theirs = target.vocabulary(added=False), drafter.vocabulary(added=False)
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        side = "the target's" if odd in ours else "the drafter's"
        refuse(f"token {odd!r}", f"is in {side} tokenizer only", remedy)
