"""Clocks of stages; events and captures of a GPU are stood in for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from eyas.engine.graphs import GraphKey
from eyas.spans import GraphClock, NoSpans
from tests.helpers import make_engine, tiny_target

CYCLE = ("draft", "verify", "extend", None)


class Event:
    """Time passes by one at every record; one recorded in a graph is recorded by replays."""

    now = itertools.count(1)

    def __init__(self, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        self.external, self.time = external, 0

    def record(self) -> None:
        if not self.external:
            self.time = next(Event.now)

    def replay(self) -> None:
        self.time = next(Event.now)

    def synchronize(self) -> None:
        assert self.time, "was never recorded"

    def elapsed_time(self, other: Event) -> float:
        return float(other.time - self.time)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a capture is under way, as its last element says."""
    Event.now = itertools.count(1)
    state = [False]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    return state


def captured(clock: GraphClock, place: int, capturing: list[bool]) -> Event:
    """Capture a cycle's twin, with a run before it whose marks must not count; its event."""
    with clock.capturing(place, place):
        for stage in CYCLE:
            clock.mark(stage)
        capturing.append(True)
        for stage in CYCLE:
            clock.mark(stage)
        capturing.append(False)
    found: Any = clock._captured[place].event
    return found


def launched(clock: GraphClock, twins: dict[int, Event], capturing: list[bool]) -> int | None:
    """Launch a step of one cycle, which takes 1 to its mark and as long behind it; its place."""
    clock.mark("host")
    place = clock.turn()
    if place is not None and place not in twins:
        twins[place] = captured(clock, place, capturing)
    clock.replayed(place)
    if place is not None:
        twins[place].replay()
    clock.mark("collect")
    clock.mark(None)  # the host's, about the step before
    return place


def test_each_twin_marks_one_place_and_every_other_cycle_none(capturing: list[bool]) -> None:
    """Faults: marks of the run before the capture; a place that never has its turn."""
    clock = GraphClock()
    twins: dict[int, Event] = {}
    places, found = [], []
    for _ in range(12):
        places.append(launched(clock, twins, capturing))
        found.append(clock.take())
    assert places == [None, 0, None, 1, None, 2, None, 3, None, 0, None, 1]
    assert clock.num_places == len(CYCLE) == len(twins)
    assert found[0] is None, "there is no next launch yet"
    for place, timing in zip(places, found[1:], strict=False):
        name = "collect" if place == 3 else None if place is None else CYCLE[place]
        begins = {"host": 0.0} | ({name: 1.0} if name else {})
        assert timing == (begins, 2.0 if name else 1.0), "one event a cycle, and one in a twin"


def test_an_event_is_read_before_its_twin_has_its_turn_again(capturing: list[bool]) -> None:
    """Fault: the event of a later replay taken for that of an earlier one."""
    clock = GraphClock()
    twins: dict[int, Event] = {}
    for _ in range(9):
        launched(clock, twins, capturing)
    late = [clock.take() for _ in range(8)]
    begins = [timing.begins for timing in late if timing is not None]
    assert [one.get("verify") for one in begins if "verify" in one] == [1.0]
    assert len(begins) == 8, "a whole rotation may be read late"


def test_a_step_with_a_prompt_is_no_cycle(capturing: list[bool]) -> None:
    """Fault: a prompt's time taken for the launch of a graph."""
    clock = GraphClock()
    for prompt in (True, False, False):
        clock.mark("host")
        if prompt:
            clock.mark("prefill")
        clock.replayed(None)
        clock.mark("collect")
    assert clock.take() is None
    assert clock.take() == ({"host": 0.0}, 1.0)
    assert clock.take() is None


def test_an_eager_cycle_is_timed_too(capturing: list[bool]) -> None:
    """Fault: a run without graphs that has no stages."""
    clock = GraphClock()
    for _ in range(2):
        clock.mark("host")
        for stage in CYCLE:
            clock.mark(stage)
        clock.mark("collect")
    expected = {"host": 0.0, "draft": 1.0, "verify": 2.0, "extend": 3.0, "collect": 4.0}
    assert clock.take() == (expected, 5.0)
    clock.drop()
    assert clock.take() is None


@pytest.mark.parametrize("moved", [False, True])
def test_graphs_are_replayed_in_turn(
    capturing: list[bool], monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Faults: a capture where the graph itself would do; twins that outlive their clock."""
    engine = make_engine(tiny_target(), max_running_requests=2)
    graphs, key = engine.runner.graphs, GraphKey(2, False, False)
    made: list[bool] = []

    def capture(key: GraphKey, spans: GraphClock | None = None) -> object:
        made.append(spans is not None)
        capturing.append(True)
        for stage in CYCLE:
            (spans or NoSpans()).mark(stage)
        capturing.append(False)
        return object()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(graphs, "_capture", capture)
    clock = GraphClock()
    found = []
    for i in range(16):
        if moved and i == 8:
            clock = GraphClock()
        clock.mark("host")
        found.append(graphs.twin(key, clock))
    itself = graphs.get(key)
    assert all((graph is itself) == (i % 2 == 0) for i, graph in enumerate(found))
    assert len(set(map(id, found))) == 1 + len(CYCLE) * (2 if moved else 1)
    assert sum(made) == len(CYCLE) * (2 if moved else 1)
    graphs.drop_twins()
    assert graphs._twins == {}
