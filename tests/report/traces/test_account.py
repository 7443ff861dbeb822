"""Averages of a cycle add up to it, and name what idle time is for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from eyas.report.foreign import read
from eyas.report.traces.account import account
from eyas.report.traces.reading import read_trace
from eyas.report.traces.timeline import MOST_BARS, timeline
from tests.report.traces import writing as w
from tests.report.traces.conftest import Save

ENGINES = [w.sglang_decode, w.sglang_cycles, w.vllm_cycles, w.eager_decode]


def accounted(save: Save, recorder: w.Recorder) -> dict[str, Any]:
    [trace] = read_trace(save(recorder))
    found = read(trace)
    assert found.cycles is not None
    return account(trace, found.code, found.staging.stage, found.cycles)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_add_up(save: Save, engine: Callable[..., w.Recorder]) -> None:
    """What is left out of one part and not put into another would hide behind the total."""
    found = accounted(save, engine())
    assert sum(found["components"].values()) == pytest.approx(found["device_ms"])
    assert sum(found["streams"].values()) == pytest.approx(found["device_ms"])
    assert sum(found["idle"].values()) == pytest.approx(found["idle_ms"])
    stages = found["stages"].values()
    assert sum(s["device_ms"] for s in stages) == pytest.approx(found["device_ms"])
    assert sum(s["idle_ms"] for s in stages) == pytest.approx(found["idle_ms"])
    assert sum(s["kernels"] for s in stages) == pytest.approx(found["kernels"])
    whole = found["device_ms"] - found["overlap_ms"] + found["idle_ms"]
    assert whole == pytest.approx(found["cycle_ms"])
    assert sum(k["ms"] for k in found["kernels_by_time"]) == pytest.approx(found["device_ms"])


def test_a_cycle_written_by_hand(save: Save) -> None:
    """Known times: 4 layers of 137 us, an LM head of 244, and so on."""
    found = accounted(save, w.sglang_decode(steps=6, layers=4))
    assert found["components"]["LM head"] == pytest.approx(0.244)
    assert found["components"]["attention"] == pytest.approx(4 * 10e-3)
    assert found["components"]["dense linear"] == pytest.approx(4 * 117.5e-3)
    assert found["components"]["KV write"] == pytest.approx(4 * 1.5e-3)
    assert found["graph_launches"] == 1
    assert found["launches"] == 4
    assert found["copies_to_host"] == 1
    assert found["syncs"]["cudaEventSynchronize"]["count"] == 1
    assert found["kernels"] == 4 * 13 + 3 + 4


def test_the_host_is_named_where_it_came_late(save: Save) -> None:
    """A host that sleeps between draft and verify must not pass for a slow device."""
    quick = accounted(save, w.sglang_cycles(host_gap=0.0))
    slow = accounted(save, w.sglang_cycles(host_gap=1500.0))
    assert slow["components"] == pytest.approx(quick["components"])
    assert slow["idle"]["host"] - quick["idle"]["host"] == pytest.approx(1.5 - 0.43, abs=0.05)
    assert slow["idle"]["inside graphs"] == pytest.approx(quick["idle"]["inside graphs"])
    first = slow["gaps"][0]
    assert (first["from"], first["to"], first["cause"]) == ("draft", "verify", "host")
    assert first["ms"] == pytest.approx(1.5 - 0.43, abs=0.05)


def test_latency_behind_a_launch_is_not_the_hosts(save: Save) -> None:
    r = w.Recorder()
    for _ in range(6):
        r.graph([*w.forward(4, 1, 244.0), w.K(w.ARGMAX, 27.0)], latency=90.0)
        r.wait()
    found = accounted(save, r)
    assert found["idle"]["graph launch"] == pytest.approx(0.09, abs=0.001)
    assert found["idle"]["host"] < 0.002


def test_streams_that_overlap_are_counted_once_as_busy(save: Save) -> None:
    """Two kernels at once are two kernels of work, and one stretch of time."""
    r = w.Recorder()
    for _ in range(6):
        r.launch(w.K(w.UP, 100.0))
        r.launch(w.K(w.FLASH, 60.0), stream=8)
        r.launch(w.K(w.HEAD, 100.0))
        r.launch(w.K(w.ARGMAX, 20.0))
        r.wait()
    found = accounted(save, r)
    assert found["device_ms"] == pytest.approx(0.280)
    assert found["overlap_ms"] == pytest.approx(0.060)
    assert found["streams"] == pytest.approx({"7": 0.220, "8": 0.060})


def test_a_trace_without_launches_leaves_idle_time_untold(save: Save) -> None:
    r = w.eager_decode()
    for event in r.events:
        event["args"].pop("correlation", None)
        event["ts"] = w.BASE + 2 * (event["ts"] - w.BASE)
    r.events = [e for e in r.events if e["cat"] == "kernel"]
    found = accounted(save, r)
    assert found["idle_ms"] > 0.1
    assert found["idle"]["untold"] == pytest.approx(found["idle_ms"])


@pytest.mark.parametrize("layers", [4, 150])
def test_the_timeline_is_one_cycle(save: Save, layers: int) -> None:
    """With more kernels than can be drawn, neighbours are drawn as one; none is lost."""
    [trace] = read_trace(save(w.sglang_cycles(steps=4, layers=layers)))
    found = read(trace)
    assert found.cycles is not None
    drawn = timeline(trace, found.code, found.staging.stage, found.cycles)
    bars = [bar for stream in drawn["streams"].values() for bar in stream]
    kernels = np.diff(found.cycles.cuts)[found.cycles.steady]
    assert sum(bar[4] for bar in bars) == kernels[0]
    assert len(bars) <= 2 * MOST_BARS
    assert {bar[3] for bar in bars} == {"draft", "verify", "accept", "extend"}
    assert all(bar[0] >= 0 and bar[0] + bar[1] <= drawn["length_ms"] * 1.01 for bar in bars)
    for stream in drawn["streams"].values():
        assert all(a[0] + a[1] <= b[0] + 1e-6 for a, b in pairwise(stream))
