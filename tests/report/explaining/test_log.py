"""Events of one step in segments; what the thread did not run is idle, and where."""

from __future__ import annotations

from eyas.report.components import METADATA
from eyas.report.explaining.log import (
    ENTER,
    LEAVE,
    MARK,
    Event,
    Segment,
    bars,
    collectives,
    segments,
)

MS = 1_000_000
EVENTS = [
    Event(*one)
    for one in [
        # ns, the thread's own ns (at no range's depth), kind, name
        (0, 1, MARK, "host"),
        (1 * MS, 1 * MS, MARK, "draft"),
        (2 * MS, 2 * MS, ENTER, "dense linear"),
        (3 * MS, 0, ENTER, "all-reduce"),
        (5 * MS, 0, LEAVE, ""),
        (6 * MS, 6 * MS, LEAVE, ""),
        (10 * MS, 7 * MS, MARK, "verify"),
        (11 * MS, 8 * MS, ENTER, "attention"),
        (14 * MS, 11 * MS, LEAVE, ""),
        (15 * MS, 12 * MS, MARK, "host"),
    ]
]


def test_a_step_in_segments() -> None:
    """Faults: the outer range's time counted twice; a sleep taken for work."""
    found = segments(EVENTS)
    assert sum(s.length for s in found) == 15 * MS
    expected = [
        ("host", "idle", 1, 0),
        ("draft", METADATA, 1, 0),
        ("draft", "dense linear", 1, 0),
        ("draft", "all-reduce", 2, 0),
        ("draft", "dense linear", 1, 0),
        ("draft", METADATA, 4, 3),
        ("verify", METADATA, 1, 0),
        ("verify", "attention", 3, 0),
        ("verify", METADATA, 1, 0),
    ]
    assert [(s.stage, s.part, s.length // MS, s.waited // MS) for s in found] == expected
    asleep = next(s for s in found if s.waited)
    assert asleep.following == "verify", "what comes behind the wait"


def test_collectives_are_whole_calls() -> None:
    """Fault: a collective without what it calls."""
    assert collectives(EVENTS) == [2.0]


def test_idle_time_is_no_bar() -> None:
    """Fault: a timeline in which the host seems to be the device."""
    drawn = bars([Segment(0, MS, "host", "idle", 0, "draft"), *segments(EVENTS)[1:3]])
    assert drawn == [[1.0, 1.0, METADATA, "draft", 1], [2.0, 1.0, "dense linear", "draft", 1]]
