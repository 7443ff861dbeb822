"""A step on a CPU as segments of one component each: what clocks and ranges noted, put in order.

A segment outside of all ranges is the host's own code; what of it the thread did not run (it slept,
or others had the processor) is time that the device, here the same processor, idled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

from eyas.report.components import ALL_REDUCE, HOST, IDLE
from eyas.report.explaining.ranges import Method, own_part

MARK, ENTER, LEAVE = 0, 1, 2
WAITED = 50_000
"""ns out of the thread's own time from which on a segment is said to have waited."""


class Event(NamedTuple):
    """A mark, or the beginning or end of a range."""

    now: int
    """ns"""
    own: int
    """ns that the thread ran until then; 0 where nobody asked"""
    kind: int
    name: str


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
    """Spans and ranges of steps as events; one step at a time.

    A range costs a third of a microsecond: what is noted stays flat, three entries an event, since
    objects would wake the collector of garbage in the middle of a cycle.
    """

    def __init__(self) -> None:
        self._flat: list[Any] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`; what belongs to none is the host's."""
        self._flat += ((stage or HOST,), perf_counter_ns(), thread_time_ns())

    def wrap(self, method: Method, part: str, outer: bool) -> Method:
        """See `Ranges`; only an `outer` range says what the thread did not run before it."""
        add = self._flat.append

        def whole(*args: Any, **named: Any) -> Any:
            own = thread_time_ns()
            add(part)
            add(perf_counter_ns())
            add(own)
            result = method(*args, **named)
            add(None)
            add(perf_counter_ns())
            add(thread_time_ns())
            return result

        def quick(*args: Any, **named: Any) -> Any:
            add(part)
            add(perf_counter_ns())
            add(0)
            result = method(*args, **named)
            add(None)
            add(perf_counter_ns())
            add(0)
            return result

        return whole if outer else quick

    def take(self) -> list[Any]:
        """What was noted since the last call, for `events`."""
        flat = self._flat.copy()
        self._flat.clear()
        return flat


def events(flat: Sequence[Any]) -> list[Event]:
    """What a log noted, as events."""
    found = []
    for name, now, own in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        if name is None:
            found.append(Event(now, own, LEAVE, ""))
        elif isinstance(name, str):
            found.append(Event(now, own, ENTER, name))
        else:
            found.append(Event(now, own, MARK, name[0]))
    return found


def segments(noted: Sequence[Event]) -> list[Segment]:
    """A step that began and ended with a mark, in segments without holes."""
    found: list[Segment] = []
    stage, stack = HOST, list[str]()
    for event, following in pairwise(noted):
        (now, own, kind, name), (then, own_then, next_kind, next_name) = event, following
        if kind == MARK:
            stage = name
        elif kind == ENTER:
            stack.append(name)
        else:
            stack.pop()
        waited = 0
        if not stack and own and own_then:
            waited = then - now - (own_then - own)
            waited = waited if waited >= WAITED else 0
        part = stack[-1] if stack else own_part(stage)
        after = next_name if next_kind == MARK else stage
        found.append(Segment(now - noted[0].now, then - now, stage, part, waited, after))
    return found


def collectives(noted: Sequence[Event]) -> list[float]:
    """ms of each collective of a step, in order."""
    found, begun = list[float](), list[tuple[int, str]]()
    for now, _, kind, name in noted:
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
