"""A GPU's cycle from hand-made looks: stages by marks, kernels by their turns, nothing scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.errors import RecordError
from eyas.report.components import DEVICE
from eyas.report.explaining.device import (
    Timed,
    replays,
    require_cycles,
    sample,
    spans_of,
    values_of,
)
from eyas.report.explaining.labels import by_ranges, labelled
from eyas.report.explaining.workload import Step
from eyas.report.traces.reading import read_trace
from eyas.report.traces.trace import Trace
from eyas.spans import GraphClock, Timing
from tests.report.explaining.test_labels import KERNELS, rehearsal, replayed
from tests.report.traces.writing import Recorder

SPANS = {
    "host": 0.003,
    "draft": 0.016,
    "verify": 0.105,
    "accept": 0.003,
    "extend": 0.0045,
    "collect": 0.007,
}
WHOLE = sum(SPANS.values())


def timed(spans: dict[str, float], quiet_ms: float, node_ms: float = 0.0) -> Timed:
    """Eight rounds of a graph's cycle and of its twins, whose nodes cost `node_ms`."""
    step = Step(ms=quiet_ms, tokens=2, requests=1, context=10.0)
    whole, begins, found = sum(spans.values()), 0.0, []
    for name, ms in spans.items():
        own = {"host": 0.0, name: begins}
        found += [Timing(own, whole + (node_ms if name != "host" else 0.0))] * 8
        begins += ms
    return Timed(quiet=[step] * 8, timed=found)


def taken_apart(folder: Path, look: Timed, trace: Trace) -> dict[str, Any]:
    cycles = replays(trace)
    labels = by_ranges(rehearsal(folder))
    code, stage, _ = labelled(trace, cycles, labels, single=False)
    return values_of(look, trace, code, stage, cycles, single=False)


def parts(values: dict[str, Any]) -> float:
    return float(values["device_ms"] - values["overlap_ms"] + values["idle_ms"])


def test_idle_time_comes_from_marks_and_never_from_the_profile(tmp_path: Path) -> None:
    """Fault: gaps of 5 us that the profiler made are taken for the cycle's."""
    values = taken_apart(tmp_path, timed(SPANS, 0.140), replayed(tmp_path, KERNELS))
    assert values["cycle_ms"] == pytest.approx(0.140)
    assert values["stages"]["verify"]["idle_ms"] == pytest.approx(0.105 - 0.101)
    assert values["stages"]["draft"]["idle_ms"] == pytest.approx(0.001)
    assert values["idle"]["host"] == pytest.approx(0.007 - 0.002)
    assert values["idle"]["graph launch"] == pytest.approx(0.002)
    assert parts(values) == pytest.approx(WHOLE)
    assert values["unexplained_ms"] == pytest.approx(0.140 - WHOLE)
    assert values["gaps"][0]["from"] == "collect"
    assert values["graph_fraction"] > 0.98
    assert np.isclose(values["stages"]["verify"]["device_ms"], 0.101)
    assert values["early_ms"] == 0.0


def test_a_node_costs_its_twin_and_not_the_sum(tmp_path: Path) -> None:
    """Faults: nodes of all stages in what stages add up to; a cost of watching that is hidden."""
    look = timed(SPANS, WHOLE, node_ms=0.005)
    values = taken_apart(tmp_path, look, replayed(tmp_path, KERNELS))
    watching = values["watching"]
    assert parts(values) == pytest.approx(WHOLE)
    assert values["unexplained_ms"] == pytest.approx(0.0, abs=1e-9)
    assert watching["overhead"] == pytest.approx(0.0, abs=1e-9)
    assert watching["watched_cycles"] == 8
    assert watching["dearest_overhead"] == pytest.approx(0.005 / WHOLE)
    assert watching["marked_ms"].keys() == SPANS.keys() - {"host"}


def test_spans_are_differences_that_add_up_to_the_undisturbed_cycle() -> None:
    """Faults: a span from a single cycle; noise below zero that others must pay for."""
    look = timed(SPANS, WHOLE, node_ms=0.005)
    look.timed += [Timing({"host": 0.0, "verify": 0.9}, 1.5), Timing({"host": 0.0}, 3.0)]
    assert spans_of(look, False) == pytest.approx(SPANS), "cycles in the middle count"
    assert "decode" in spans_of(look, True)
    late = {name: ms for name, ms in SPANS.items() if name != "accept"}
    look = timed({**SPANS, "accept": -0.001}, WHOLE)
    found = spans_of(look, False)
    assert found["accept"] == 0.0
    assert {name: found[name] for name in late} == pytest.approx(late)
    assert sum(found.values()) == pytest.approx(sum(late.values()))
    eager = Timing({"host": 0.0, "draft": 0.2, "verify": 0.5, "collect": 0.9}, 1.0)
    found = spans_of(Timed(timed=[eager] * 4), False)
    assert found == pytest.approx({"host": 0.2, "draft": 0.3, "verify": 0.4, "collect": 0.1})


def test_cycles_that_differ_leave_later_stages_as_they_are() -> None:
    """Fault: twins whose verify passes touch other experts shift what begins behind them."""
    look = timed(SPANS, WHOLE)
    names = list(SPANS)
    behind = names[names.index("verify") + 1 :]
    for place, one in enumerate(look.timed):
        name = next(reversed(one.begins))
        more = (0.01 if name == "accept" else 0.004) * (place % 8 - 3.5)
        begins = {n: ms + (more if n in behind else 0.0) for n, ms in one.begins.items()}
        look.timed[place] = Timing(begins, one.ms + more)
    whole = [Timing({"host": 0.0}, WHOLE + 0.02)] * 8
    look.timed = [*whole, *(one for one in look.timed if len(one.begins) > 1)]
    found = spans_of(look, False)
    assert {n: found[n] for n in behind} == pytest.approx({n: SPANS[n] for n in behind})
    assert sum(found.values()) == pytest.approx(WHOLE + 0.02)


def test_kernels_that_take_longer_than_their_stage_overlap(tmp_path: Path) -> None:
    """Fault: neighbours that overlap in the real run make the parts more than the whole."""
    look = timed({"host": 0.001, "draft": 0.012, "verify": 0.085, "collect": 0.002}, 0.1)
    values = taken_apart(tmp_path, look, replayed(tmp_path, KERNELS))
    over = (15 - 12) + (101 - 85) + 3 + 4
    assert values["overlap_ms"] == pytest.approx(over / 1e3)
    assert values["idle_ms"] == pytest.approx(0.0, abs=1e-9)
    assert parts(values) == pytest.approx(0.1)


def test_kernels_launched_early_count_from_their_turn(tmp_path: Path) -> None:
    """Fault: a norm that waits for the linear before it seems to be the dearest kernel."""
    alone = replayed(tmp_path, KERNELS, gap=0.0)
    early = replayed(tmp_path, KERNELS, gap=0.0, early=1.5)
    raw = early.work.dur.sum() - alone.work.dur.sum()
    look = timed(SPANS, WHOLE)
    values, plain = (taken_apart(tmp_path, look, trace) for trace in (early, alone))
    assert values["components"] == pytest.approx(plain["components"])
    assert values["device_ms"] == pytest.approx(plain["device_ms"])
    assert values["overlap_ms"] == pytest.approx(plain["overlap_ms"], abs=1e-9)
    assert values["early_ms"] == pytest.approx(raw / 12e3), "12 cycles"
    cells = {name: one["components"] for name, one in values["stages"].items()}
    assert cells["verify"] == pytest.approx(plain["stages"]["verify"]["components"])
    norm = DEVICE[DEVICE.index("norm/rope/elementwise")]
    assert values["components"][norm] == pytest.approx(0.002)


def test_a_profile_without_cycles_is_refused(tmp_path: Path) -> None:
    """Fault: a mean of nothing, or an index error, where the profiler shows no graph."""
    r = Recorder()
    for kernel in KERNELS:
        r.launch(kernel)
    [trace] = read_trace(r.save(tmp_path / "live.json"))
    with pytest.raises(RecordError, match="0 cycles by graph launches, none of them steady"):
        require_cycles(trace, replays(trace))
    few = replayed(tmp_path, KERNELS, steps=4)
    with pytest.raises(RecordError, match="3 cycles"):
        require_cycles(few, replays(few))


class Runner:
    """Steps on a device that does not exist; its clock says which place each cycle marked."""

    def __init__(self, places: int) -> None:
        self.graphs, self.spans, self.places = self, object(), places
        self.counts: list[object] = []

    def drop_twins(self) -> None:
        """Nothing to free."""


class Steps:
    """A workload: groups of `length` cycles, a prompt before each."""

    def __init__(self, runner: Runner, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Any = self
        self.runner, self.length, self.left, self.taken = runner, length, 0, 0
        self.groups = [([0], [0])]
        self.under_way: list[int | None] = []
        monkeypatch.setattr(GraphClock, "take", lambda clock: self.timing(clock))
        monkeypatch.setattr(GraphClock, "drop", lambda clock: self.under_way.clear())

    @property
    def running(self) -> int:
        return int(self.left > 0)

    def pause(self) -> None:
        """Nothing to forget."""

    def step(self, watched: bool = False) -> Step | None:
        if not self.left:
            assert not isinstance(self.runner.spans, GraphClock), "a prompt is not timed"
            self.left = self.length
            return None
        self.left -= 1
        self.taken += 1
        assert self.taken < 1000, "some place never has its turn"
        if isinstance(self.runner.spans, GraphClock):
            self.under_way.append(self.runner.spans.turn())
            self.runner.spans.num_places = self.runner.places
        return Step(ms=1.0, tokens=1, requests=1, context=1.0)

    def timing(self, clock: GraphClock) -> Timing | None:
        if len(self.under_way) < 2:
            return None
        place = self.under_way.pop(0)
        return Timing({"host": 0.0} | ({} if place is None else {str(place): 1.0}), 1.0)


@pytest.mark.parametrize("length", [7, 13, 10_000])
def test_every_place_is_timed_often_and_the_whole_most(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a place whose cycles are always those left out; answers that end in a block."""
    found = sample(Steps(Runner(6), length, monkeypatch), 16)  # type: ignore[arg-type]
    assert len(found.quiet) >= 16
    assert len(found.whole) >= 16
    assert found.fewest(6) >= 4
    assert len(found.timed) < 16 * 8
