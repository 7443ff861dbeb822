"""Timing single operations: the clock is read after the work, and rounds can be fixed."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import torch

from eyas.report.timing import FEWEST_ROUNDS, Timer

CPU = torch.device("cpu")


def test_a_call_takes_what_it_takes() -> None:
    """Fault: the time of all calls reported for one, or milliseconds for microseconds."""
    timer = Timer(device=CPU, seconds=0.01)
    found = timer.us([lambda: time.sleep(0.002)] * 4)
    assert 2000 <= found < 20_000
    assert 2000 <= timer.wall_us(lambda: time.sleep(0.002), 3) < 20_000


def test_rounds_that_ranks_share_are_exact() -> None:
    """Fault: ranks that time by the clock and so call their collectives another number of times."""
    calls: Counter[str] = Counter()

    def call(name: str) -> None:
        calls[name] += 1

    Timer(device=CPU, seconds=0.0, rounds=5).us([partial(call, "a"), partial(call, "b")])
    assert calls == {"a": 6, "b": 6}, "one round warms up"
    Timer(device=CPU, seconds=0.0).us([partial(call, "c")])
    assert calls["c"] == 1 + FEWEST_ROUNDS


def test_nothing_is_recorded_for_gradients() -> None:
    """Fault: layers timed together with the graph of their gradients."""
    weight = torch.zeros(4, 4, requires_grad=True)
    seen: list[bool] = []
    timer = Timer(device=CPU, seconds=0.0)
    timer.us([lambda: seen.append((weight @ weight).requires_grad)])
    assert not any(seen)
