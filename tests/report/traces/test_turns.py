"""What a kernel of a stream does before its turn is waiting, and nobody's time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from eyas.report.foreign import read
from eyas.report.traces.account import account
from eyas.report.traces.reading import read_trace
from eyas.report.traces.timeline import timeline
from eyas.report.traces.trace import Work
from eyas.report.traces.turns import in_turn, turns, waits
from tests.report.traces import writing as w
from tests.report.traces.conftest import Save


def work(*kernels: tuple[float, float, int]) -> Work:
    """Kernels of (start, end, stream), us."""
    start, end, stream = zip(*sorted(kernels), strict=True)
    none = np.full(len(start), -1, dtype=np.int64)
    return Work(
        start=np.array(start, float),
        dur=np.array(end, float) - np.array(start, float),
        stream=np.array(stream, np.int64),
        kind=none * 0,
        call=none,
    )


def test_a_turn_begins_where_all_before_in_the_stream_have_ended() -> None:
    """Faults: only the neighbour looked at; another stream's kernels waited for."""
    found = work((0, 10, 7), (2, 14, 7), (3, 9, 7), (4, 20, 7), (5, 30, 9), (40, 45, 7))
    start, dur = turns(found)
    assert start.tolist() == [0, 10, 14, 14, 5, 40]
    assert dur.tolist() == [10, 4, 0, 6, 25, 5]
    assert waits(found, np.ones(6, np.bool_)) == 8 + 6 + 10
    assert waits(found, np.arange(6) == 1) == 8


def test_kernels_one_after_the_other_stay_as_they_are() -> None:
    """Fault: time lost where nothing overlaps."""
    found = work((0, 10, 7), (10, 14, 7), (15, 30, 7), (0, 30, 9))
    start, dur = turns(found)
    assert start.tolist() == found.start.tolist()
    assert dur.tolist() == found.dur.tolist()


@pytest.mark.parametrize("early", [0.0, 2.0, 40.0])
def test_a_traces_totals_are_its_own_and_its_waits_are_told(save: Save, early: float) -> None:
    """Faults: totals that are no longer the trace's; waiting that passes for work unsaid."""
    [trace] = read_trace(save(w.eyas_cycles(early=early)))
    found = read(trace)
    assert found.cycles is not None
    stage = found.staging.stage
    values = account(trace, found.code, stage, found.cycles)
    own = account(in_turn(trace), found.code, stage, found.cycles)
    assert sum(values["components"].values()) == pytest.approx(values["device_ms"])
    assert values["device_ms"] - values["early_ms"] == pytest.approx(own["device_ms"])
    assert own["overlap_ms"] == pytest.approx(0.0, abs=1e-9)
    assert values["overlap_ms"] == pytest.approx(values["early_ms"], abs=1e-9)
    assert (values["early_ms"] > 0) == (early > 0)
    for key in ("idle_ms", "cycle_ms", "kernels"):
        assert values[key] == pytest.approx(own[key]), key
    drawn = timeline(trace, found.code, stage, found.cycles)
    for stream in drawn["streams"].values():
        assert all(a[0] + a[1] <= b[0] + 1e-6 for a, b in pairwise(stream))
