"""Stage spans: how long each stage of a cycle took on the device that ran it.

On a GPU a mark is a CUDA event, read after the run; on a CPU, where work is synchronous, it is a
clock reading. `NoSpans` is what a run without measurement is handed: it does nothing. A cycle whose
stages are timed runs eagerly, except under a `GraphClock`, whose marks are nodes of graphs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class Mark(NamedTuple):
    """Where a stage begins; without a stage, where the last one ends."""

    stage: str | None
    event: torch.cuda.Event


class Timing(NamedTuple):
    """A cycle from its launch to the next one's."""

    begins: dict[str, float]
    """ms from its launch to where a stage begins, of the stages that had a mark, the host's first.
    A replay has one of them at most."""
    ms: float


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
    """Times stages of cycles that run as CUDA graphs: twins of each graph hold one mark each.

    A mark inside a capture becomes a node that records an event at every replay. Such a node keeps
    the kernels beside it from overlapping, so a twin marks a single place of the cycle, and every
    other cycle is the graph itself, without a mark: what stages take together was disturbed by
    nothing, and what is told of one of them by one node. A mark outside of a graph records an event
    at once, so cycles that run eagerly are timed too, at all places together.

    Twins take turns, so that one's event can be read while others run.
    """

    def __init__(self) -> None:
        self.num_places = 1
        """Marks in a cycle, known once a twin was captured."""
        self._turn = 0
        self._captured: dict[Hashable, Mark] = {}
        self._into: tuple[Hashable, int] | None = None
        self._passed = 0
        self._steps: list[_Launched] = []

    def turn(self) -> int | None:
        """The place of the cycle that the next replay marks; None: it marks none.

        It follows from the number of turns alone, so ranks that take them together agree.
        """
        self._turn += 1
        return None if self._turn % 2 else (self._turn // 2 - 1) % self.num_places

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        if torch.cuda.is_current_stream_capturing():
            assert self._into is not None, "a capture begins with `capturing`"
            twin, place = self._into
            if self._passed == place:
                self._captured[twin] = Mark(stage, _event(external=True))
            self._passed += 1
        elif self._into is not None or stage is None:
            return
        elif stage == "host":
            self._steps.append(_Launched(_event()))
        elif self._steps[-1].replayed:
            self._steps[-1].behind = stage
        else:
            self._steps[-1].marks.append(Mark(stage, _event()))

    @contextmanager
    def capturing(self, twin: Hashable, place: int) -> Iterator[None]:
        """Around the capture of `twin`: its mark number `place` is kept by this name."""
        self._into, self._passed = (twin, place), 0
        try:
            yield
            self.num_places = self._passed
        finally:
            self._into = None

    def replayed(self, twin: Hashable | None) -> None:
        """Note that `twin` is replayed now; None: the graph itself."""
        self._steps[-1].replayed.append(twin)

    def take(self) -> Timing | None:
        """The oldest step that was not taken.

        None while there is no next one, and where it was no cycle, or a prompt and a graph. The
        last stage is the one that was marked behind the graph. Waits for the device to come to the
        next launch. Must be called before a step's twin has its turn again.
        """
        if len(self._steps) < 2:
            return None
        step, following = self._steps.pop(0), self._steps[0]
        marks = step.marks
        if step.replayed:
            if marks:
                return None
            inner = self._captured.get(step.replayed[0])
            marks = [Mark(inner.stage or step.behind, inner.event)] if inner else []
        elif not any(mark.stage == "verify" for mark in marks):
            return None
        following.start.synchronize()
        begins = {str(mark.stage): step.start.elapsed_time(mark.event) for mark in marks}
        return Timing({"host": 0.0} | begins, step.start.elapsed_time(following.start))

    def drop(self) -> None:
        """Forget all steps that were not taken."""
        self._steps.clear()


@dataclass(slots=True)
class _Launched:
    """A step as a `GraphClock` saw it."""

    start: torch.cuda.Event
    marks: list[Mark] = field(default_factory=list)
    replayed: list[Hashable | None] = field(default_factory=list)
    """Twins of its cycle: one, or none where it ran eagerly."""
    behind: str | None = None
    """The stage behind the graph."""


def _event(external: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=external)
    event.record()
    return event


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end)
