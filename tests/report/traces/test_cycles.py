"""Cycles and stages are found in three ways that agree; only alike cycles are averaged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eyas.report.components import (
    ACCEPT,
    DECODE,
    DRAFT,
    EXTEND,
    PREFILL,
    STAGES,
    UNKNOWN,
    VERIFY,
)
from eyas.report.foreign import Reading, read
from eyas.report.traces.account import account
from eyas.report.traces.reading import read_trace
from eyas.report.traces.stages import span_stage
from tests.report.traces import writing as w
from tests.report.traces.conftest import Save


def reading(save: Save, recorder: w.Recorder) -> Reading:
    [trace] = read_trace(save(recorder))
    return read(trace)


def stages_of(found: Reading) -> list[str]:
    """Stages of the first steady cycle, in order, neighbours joined."""
    assert found.cycles is not None
    i = int(np.flatnonzero(found.cycles.steady)[0])
    own = found.staging.stage[found.cycles.cuts[i] : found.cycles.cuts[i + 1]]
    keep = np.concatenate([[True], own[1:] != own[:-1]])
    return [STAGES[s] for s in own[keep]]


@pytest.mark.parametrize("engine", [w.sglang_cycles, w.vllm_cycles])
def test_a_speculative_cycle_has_its_stages_in_order(
    save: Save, engine: Callable[..., w.Recorder]
) -> None:
    found = reading(save, engine(steps=6))
    assert stages_of(found) == [DRAFT, VERIFY, ACCEPT, EXTEND]
    assert found.staging.layers == 4


def test_spans_are_not_needed(save: Save) -> None:
    """vLLM's older versions and eyas name none: graphs and passes must do."""
    found = reading(save, w.vllm_cycles(spans=False))
    assert found.cycles is not None
    assert found.cycles.found_by == "graph launches"
    assert stages_of(found) == [DRAFT, VERIFY, ACCEPT, EXTEND]
    plain = reading(save, w.sglang_decode(spans=False))
    assert plain.cycles is not None
    assert plain.cycles.found_by == "graph launches"
    assert stages_of(plain) == [DECODE]


def test_a_cycle_of_this_engine_is_one_graph(save: Save) -> None:
    """Stages lie within one launch: only the order of passes can tell them."""
    found = reading(save, w.eyas_cycles(layers=6))
    assert found.cycles is not None
    assert found.cycles.found_by == "graph launches"
    assert stages_of(found) == [DRAFT, VERIFY, ACCEPT, EXTEND]
    assert found.staging.layers == 6
    values = account(found.trace, found.code, found.staging.stage, found.cycles)
    assert values["graph_launches"] == 1
    assert UNKNOWN not in values["components"]
    parts = values["stages"]["verify"]["components"]
    assert parts["attention"] == pytest.approx(6 * 8.8e-3)
    assert parts["dense linear"] == pytest.approx(6 * 111e-3)
    assert parts["LM head"] == pytest.approx(0.244)
    assert values["stages"]["draft"]["components"]["LM head"] == pytest.approx(0.12)
    assert values["stages"]["extend"]["components"]["LM head"] == pytest.approx(0.06)


def test_spans_and_graphs_find_the_same_cycles(save: Save) -> None:
    lengths = []
    for spans in (True, False):
        found = reading(save, w.sglang_decode(steps=9, spans=spans))
        assert found.cycles is not None
        cuts = found.trace.work.start[found.cycles.cuts]
        lengths.append(float(np.diff(cuts)[found.cycles.steady].mean()))
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)


@pytest.mark.parametrize("layers", [2, 4, 48])
def test_eager_steps_are_found_by_repetition(save: Save, layers: int) -> None:
    """A layer repeats too, and more often: it is no cycle."""
    found = reading(save, w.eager_decode(steps=7, layers=layers))
    assert found.cycles is not None
    assert found.cycles.found_by == "repeating kernels"
    assert len(found.cycles.cuts) - 1 == 6
    assert np.all(np.diff(found.cycles.cuts) == 13 * layers + 4)
    assert found.staging.layers == layers


def test_graphs_of_pieces_are_no_cycles(save: Save) -> None:
    """Where every layer is a graph of its own, a layer must not pass for a step."""
    r = w.Recorder()
    for _ in range(6):
        for _ in range(8):
            r.graph(w.layer(1))
        r.launch(w.K(w.HEAD, 250.0))
        r.launch(w.K(w.ARGMAX, 20.0))
    found = reading(save, r)
    assert found.cycles is not None
    assert found.cycles.found_by == "repeating kernels"
    assert len(found.cycles.cuts) - 1 == 5


def test_prompts_and_odd_cycles_are_left_out(save: Save) -> None:
    """A prompt between two steps would make a step of milliseconds."""
    r = w.sglang_decode(steps=4)
    with r.span("step[EXTEND bs=1 toks=64]"):
        w.prompt(r, 4)
    second = w.sglang_decode(steps=4)
    shift = max(e["ts"] + e["dur"] for e in r.events) + 50.0 - w.BASE
    for event in second.events:
        event["ts"] += shift
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 100_000
    r.events += second.events
    found = reading(save, r)
    assert found.cycles is not None
    assert not found.cycles.steady.all()
    length = np.diff(found.trace.work.start[found.cycles.cuts])[found.cycles.steady]
    assert length.max() < 1.1 * length.min()
    assert (found.staging.stage == STAGES.index(PREFILL)).any()


def test_a_stall_is_counted_and_left_out(save: Save) -> None:
    r = w.sglang_decode(steps=5)
    r.rest(50_000.0)
    for _ in range(5):
        with r.span("step[DECODE bs=1]"):
            r.launch(w.K(w.PLAN, 3.0))
            r.graph(w.forward(4, 1, 244.0))
        r.launch(w.K(w.ARGMAX, 27.0))
        r.launch(w.K(w.INDEX, 2.0))
        r.to_host()
        r.wait("cudaEventSynchronize")
    found = reading(save, r)
    assert found.cycles is not None
    assert found.cycles.stalls == 1


def test_what_does_not_repeat_has_no_cycles(save: Save) -> None:
    r = w.Recorder()
    for i in range(5):
        r.launch(w.K(f"kernel_{i}", 5.0))
    assert reading(save, r).cycles is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("step[DECODE bs=8]", (DECODE, 8, None)),
        ("step[TARGET_VERIFY bs=1]", (VERIFY, 1, None)),
        ("step[EXTEND bs=1 toks=512]", (PREFILL, 1, None)),
        ("step[DRAFT_EXTEND_V2 bs=1]", (EXTEND, 1, None)),
        ("draft", (DRAFT, None, None)),
        ("draft_extend", (EXTEND, None, None)),
        ("execute_context_0(0)_generation_2(8)", (VERIFY, 2, 4.0)),
        ("execute_context_0(0)_generation_3(3)", (DECODE, 3, 1.0)),
        ("execute_context_1(512)_generation_2(2)", (PREFILL, None, None)),
        ("execute_context_0(0)_generation_0(0)", None),
        ("scheduler.run_batch", None),
        ("drafting", None),
    ],
)
def test_spans_of_the_engines(name: str, told: object) -> None:
    assert span_stage(name) == told
