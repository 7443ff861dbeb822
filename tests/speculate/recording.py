"""What an engine's drafter proposed, and behind which texts."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas.batch import ForwardMode
from eyas.engine.engine import Engine
from eyas.speculate.drafter import Committed, DraftContext, Drafter
from eyas.speculate.tree import Draft


@dataclass
class Recorder:
    """Passes everything on to a drafter and keeps its drafts with the texts they are behind."""

    inner: Drafter
    drafts: list[tuple[tuple[int, ...], Draft, int]] = field(default_factory=list)
    """(committed tokens up to the root, draft, row in the batch)."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.inner.aux_layers

    @property
    def aux_size(self) -> int:
        return self.inner.aux_size

    @property
    def needs_bound(self) -> bool:
        return self.inner.needs_bound

    def propose(self, context: DraftContext) -> Draft:
        draft = self.inner.propose(context)
        for row, slot in enumerate(context.slots.tolist()):
            end = int(context.kv_lens[row]) + 1
            self.drafts.append((tuple(context.history[slot, :end].tolist()), draft, row))
        return draft

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        self.inner.update(context, committed, mode)


def record(engine: Engine) -> Recorder:
    """Record the drafts of an engine."""
    parts = engine.runner.parts
    recorder = Recorder(parts.drafter)
    object.__setattr__(parts, "drafter", recorder)
    return recorder


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """Token paths of all drafted nodes, without the root."""
    tokens = draft.tokens[row].tolist()
    parents = [max(node - 1, 0) for node in range(len(tokens))]
    if draft.parents is not None:
        parents = draft.parents[row].tolist()
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        found[node] = (*found[parents[node]], tokens[node])
    return set(found.values()) - {()}
