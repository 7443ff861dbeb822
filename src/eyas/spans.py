"""Stage spans: how long each stage of a cycle took on the device that ran it.

On a GPU a mark is a CUDA event, read after the run; on a CPU, where work is synchronous, it is a
clock reading. `NoSpans` is what a run without measurement is handed: it does nothing. A cycle whose
stages are timed runs eagerly, except under a `GraphClock`, whose marks are nodes of the graph.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch


class Mark(NamedTuple):
    """Where a stage begins; without a stage, where the last one ends."""

    stage: str | None
    event: torch.cuda.Event


class Spans(Protocol):
    """Receives the name of the stage that starts now; `None` ends the last one."""

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""


class NoSpans:
    """Measures nothing and costs nothing."""

    def mark(self, stage: str | None) -> None:
        """Ignore the stage."""


class StageClock:
    """Collects milliseconds per stage; `milliseconds()` waits for the device once."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((stage, event))
        else:
            self._marks.append((stage, time.perf_counter()))

    def milliseconds(self) -> dict[str, list[float]]:
        """Every span since the last call, in ms by stage; forgets them."""
        if self._cuda:
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = defaultdict(list)
        for (stage, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if stage is not None:
                spans[stage].append(_elapsed(start, end))
        self._marks.clear()
        return dict(spans)


class GraphClock:
    """Times stages of cycles that run as CUDA graphs: a twin of each graph holds the marks.

    A mark inside a capture becomes a node that records an event at every replay; a mark outside
    records one at once, so cycles that run eagerly are timed too. Twins come in pairs that take
    turns, so that one's events can be read while the other runs.
    """

    TURNS = 2
    """Twins of a graph."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, list[Mark]] = {}
        self._into: list[Mark] | None = None
        self._outside: list[Mark | Hashable] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        if torch.cuda.is_current_stream_capturing():
            assert self._into is not None, "a capture begins with `capturing`"
            self._into.append(Mark(stage, _event(external=True)))
        elif self._into is None and stage is not None:
            self._outside.append(Mark(stage, _event()))

    @contextmanager
    def capturing(self, twin: Hashable) -> Iterator[None]:
        """Around the capture of `twin`: its marks are kept by this name."""
        self._into = self._captured[twin] = []
        try:
            yield
        finally:
            self._into = None

    def replayed(self, twin: Hashable) -> None:
        """Note that `twin` is replayed now."""
        self._outside.append(twin)

    def take(self) -> list[tuple[str, float]] | None:
        """(stage, ms) of the oldest step that was not taken, from its launch to the next one's.

        None while there is no next one; empty where it was no cycle, or also a prompt and a graph.
        The first stage is the one that was marked before the graph, the last what was marked behind
        it. Waits for the device to come to the next launch. Must be called before the twin has its
        turn again.
        """
        starts = [i for i, x in enumerate(self._outside) if isinstance(x, Mark) and _is_host(x)]
        if len(starts) < 2:
            return None
        step, self._outside = self._outside[: starts[1]], self._outside[starts[1] :]
        following = self._outside[0]
        assert isinstance(following, Mark), "a step begins with a mark"
        match step:
            case [Mark() as first, twin, Mark() as behind] if not isinstance(twin, Mark):
                inside = self._captured[twin]
                marks = [first, *inside[:-1], Mark(behind.stage, inside[-1].event), following]
            case _:
                marks = [x for x in step if isinstance(x, Mark)] + [following]
                if len(marks) < len(step) + 1 or not any(m.stage == "verify" for m in marks):
                    return []
        following.event.synchronize()
        return [(str(m.stage), m.event.elapsed_time(n.event)) for m, n in pairwise(marks)]

    def drop(self) -> None:
        """Forget all steps that were not taken."""
        self._outside.clear()


def _is_host(mark: Mark) -> bool:
    return mark.stage == "host"


def _event(external: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=external)
    event.record()
    return event


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end)
