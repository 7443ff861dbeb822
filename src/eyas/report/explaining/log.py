"""A step on a CPU as segments of one component each: what clocks and ranges noted, put in order.

A segment outside of all ranges is the host's own code; what of it the thread did not run (it slept,
or others had the processor) is time that the device, here the same processor, idled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

from eyas.report.components import ALL_REDUCE, HOST, IDLE
from eyas.report.explaining.ranges import own_part

MARK, ENTER, LEAVE = 0, 1, 2
WAITED = 50_000
"""ns out of the thread's own time from which on a segment is said to have waited."""


class Segment(NamedTuple):
    """A stretch of a step."""

    start: int
    """ns since the step's beginning"""
    length: int
    """ns"""
    stage: str
    part: str
    waited: int
    """ns of it that the thread did not run, outside of ranges"""
    following: str
    """Stage of what comes next."""


class Log:
    """Spans and ranges of steps as events; one step at a time."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, str]] = []
        self._depth = 0

    def mark(self, stage: str | None) -> None:
        """Start `stage`; what belongs to none is the host's."""
        self._events.append((perf_counter_ns(), thread_time_ns(), MARK, stage or HOST))

    def enter(self, part: str) -> None:
        """See `Ranges`."""
        own = 0 if self._depth else thread_time_ns()
        self._depth += 1
        self._events.append((perf_counter_ns(), own, ENTER, part))

    def leave(self) -> None:
        """See `Ranges`."""
        self._depth -= 1
        now = perf_counter_ns()
        self._events.append((now, 0 if self._depth else thread_time_ns(), LEAVE, ""))

    def take(self) -> list[tuple[int, int, int, str]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def segments(events: Sequence[tuple[int, int, int, str]]) -> list[Segment]:
    """A step that began and ended with a mark, in segments without holes."""
    found: list[Segment] = []
    stage, stack = HOST, list[str]()
    for event, following in pairwise(events):
        (now, own, kind, name), (then, own_then, next_kind, next_name) = event, following
        if kind == MARK:
            stage = name
        elif kind == ENTER:
            stack.append(name)
        else:
            stack.pop()
        waited = 0
        if not stack:
            waited = then - now - (own_then - own)
            waited = waited if waited >= WAITED else 0
        part = stack[-1] if stack else own_part(stage)
        after = next_name if next_kind == MARK else stage
        found.append(Segment(now - events[0][0], then - now, stage, part, waited, after))
    return found


def collectives(events: Sequence[tuple[int, int, int, str]]) -> list[float]:
    """ms of each collective of a step, in order."""
    found, begun = list[float](), list[tuple[int, str]]()
    for now, _, kind, name in events:
        if kind == ENTER:
            begun.append((now, name))
        elif kind == LEAVE:
            start, part = begun.pop()
            if part == ALL_REDUCE:
                found.append((now - start) / 1e6)
    return found


def bars(found: Sequence[Segment]) -> list[list[object]]:
    """Segments as bars of a timeline: [start ms, length ms, component, stage, 1]."""
    return [
        [round(s.start / 1e6, 6), round(s.length / 1e6, 6), s.part, s.stage, 1]
        for s in found
        if s.part != IDLE and s.length
    ]
