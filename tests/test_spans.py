"""Clocks of stages; events and captures of a GPU are stood in for."""

from __future__ import annotations

import itertools

import pytest
import torch

from eyas.spans import GraphClock

CYCLE = ("draft", "verify", "extend", None)


class Event:
    """Time passes by one at every record; one recorded in a graph is recorded by replays."""

    now = itertools.count(1)

    def __init__(self, enable_timing: bool, external: bool) -> None:
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


def captured(clock: GraphClock, name: str, capturing: list[bool]) -> list[Event]:
    """Capture a cycle, with a run before it whose marks must not count; its events."""
    with clock.capturing(name):
        for stage in CYCLE:
            clock.mark(stage)
        capturing.append(True)
        for stage in CYCLE:
            clock.mark(stage)
        capturing.append(False)
    return [mark.event for mark in clock._captured[name]]  # type: ignore[misc]


def test_a_replay_is_timed_from_launch_to_launch(capturing: list[bool]) -> None:
    """Faults: marks of the run before the capture; the gap behind the graph lost."""
    clock = GraphClock()
    twins = [captured(clock, name, capturing) for name in ("a", "b")]
    found = []
    for turn in (0, 1, 0, 1):
        clock.mark("host")
        clock.replayed("ab"[turn])
        for event in twins[turn]:
            event.replay()
        clock.mark("collect")
        clock.mark(None)  # the host's, about the step before
        found.append(clock.take())
    assert found[0] is None, "there is no next launch yet"
    whole = [("host", 1.0), ("draft", 1.0), ("verify", 1.0), ("extend", 1.0), ("collect", 2.0)]
    assert found[1:] == [whole] * 3


def test_a_step_with_a_prompt_is_no_cycle(capturing: list[bool]) -> None:
    """Fault: a prompt's time taken for the launch of a graph."""
    clock = GraphClock()
    twin = captured(clock, "a", capturing)
    for prompt in (True, False, False):
        clock.mark("host")
        if prompt:
            clock.mark("prefill")
        clock.replayed("a")
        for event in twin:
            event.replay()
        clock.mark("collect")
    assert clock.take() == []
    assert len(clock.take() or []) == 5
    assert clock.take() is None


def test_an_eager_cycle_is_timed_too(capturing: list[bool]) -> None:
    """Fault: a run without graphs that has no stages."""
    clock = GraphClock()
    for _ in range(2):
        clock.mark("host")
        for stage in CYCLE:
            clock.mark(stage)
        clock.mark("collect")
    assert clock.take() == [(n, 1.0) for n in ("host", "draft", "verify", "extend", "collect")]
    clock.drop()
    assert clock.take() is None
