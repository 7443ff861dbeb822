"""Kernels of a replay get the stage and component of the eager run; what differs stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from eyas.report.components import DEVICE, STAGES
from eyas.report.explaining.device import cell_counts, replays
from eyas.report.explaining.labels import Labels, by_ranges, labelled
from eyas.report.traces.reading import read_trace
from eyas.report.traces.trace import Trace
from tests.report.traces.writing import ALL_REDUCE, K, Recorder

CYCLE = (
    ("host", "", K("Memset (Device)", 1.0)),
    ("draft", "metadata", K("_slot_rows_kernel", 2.0)),
    ("draft", "dense linear", K("_skinny_kernel", 10.0)),
    ("draft", "sampling/acceptance", K("_draw_tile_kernel", 3.0)),
    ("verify", "norm/rope/elementwise", K("_norm_kernel", 2.0)),
    ("verify", "dense linear", K("_skinny_kernel", 40.0)),
    ("verify", "attention", K("paged_attention_kernel", 20.0)),
    ("verify", "all-reduce", K(ALL_REDUCE, 9.0)),
    ("verify", "LM head", K("nvjet_tst_head", 30.0)),
    ("accept", "", K("_accept_kernel", 3.0)),
    ("extend", "MoE", K("mystery", 4.0)),
)
"""Stage, innermost range, kernel of a cycle."""
RANGES = {"": [], "all-reduce": ["norm/rope/elementwise", "dense linear"]}
"""Ranges that enclose; a collective is found by its name inside another's range."""


def rehearsal(folder: Path) -> Trace:
    """The eager run, in ranges."""
    r = Recorder()
    for stage, part, kernel in CYCLE:
        with ExitStack() as stack:
            if stage != "host":
                stack.enter_context(r.span(f"eyas.stage:{stage}"))
            for name in RANGES.get(part, ["norm/rope/elementwise", part]):
                r.rest(0.5)
                stack.enter_context(r.span(f"eyas.part:{name}"))
            r.launch(kernel)
    [trace] = read_trace(r.save(folder / "rehearsal.json"))
    return trace


def replayed(
    folder: Path, kernels: Sequence[K], steps: int = 12, gap: float = 5.0, early: float = 0.0
) -> Trace:
    """Cycles of one graph each, with a copy behind it, as the profiler stretches them."""
    r = Recorder()
    for _ in range(steps):
        r.graph(kernels, gap=gap, early=early)
        r.to_host()
        r.wait("cudaEventSynchronize")
    [trace] = read_trace(r.save(folder / "live.json"))
    return trace


KERNELS = [kernel for _, _, kernel in CYCLE]


@pytest.fixture
def labels(tmp_path: Path) -> Labels:
    return by_ranges(rehearsal(tmp_path))


def test_ranges_tell_stage_and_component(labels: Labels) -> None:
    """Fault: the outer range of nested ones; a range that is over; the stage before."""
    found = [(STAGES[s], DEVICE[c]) for s, c in zip(labels.stage, labels.code, strict=True)]
    expected = [(stage, part) for stage, part, _ in CYCLE]
    expected[0] = ("host", "copies")
    expected[9] = ("accept", "sampling/acceptance")
    assert found == expected


def test_a_replay_takes_the_labels_in_order(tmp_path: Path, labels: Labels) -> None:
    """Fault: equal kernels of different stages taken for each other."""
    trace = replayed(tmp_path, KERNELS)
    cycles = replays(trace)
    code, stage, told = labelled(trace, cycles, labels, single=False)
    assert told == pytest.approx(1.0)
    own = slice(int(cycles.cuts[4]), int(cycles.cuts[5]))
    assert code[own].tolist()[:-1] == labels.code
    assert stage[own].tolist()[:-1] == labels.stage
    assert STAGES[stage[own][-1]] == "collect", "the copy behind the graph"
    counts = cell_counts(code, stage, cycles)
    assert counts["verify", "dense linear"] == counts["draft", "dense linear"] == 1


def test_a_kernel_that_the_eager_run_had_not_is_said(tmp_path: Path, labels: Labels) -> None:
    """Fault: one more kernel in the graph shifts all labels behind it."""
    more = [*KERNELS[:5], K("another_kernel", 13.4), *KERNELS[5:]]
    trace = replayed(tmp_path, more)
    cycles = replays(trace)
    _, stage, told = labelled(trace, cycles, labels, single=False)
    own = slice(int(cycles.cuts[4]), int(cycles.cuts[5]))
    assert stage[own].tolist()[:-1] == [*labels.stage[:5], labels.stage[4], *labels.stage[5:]]
    assert told == pytest.approx(1 - 13.4 / (sum(k.us for k in more) + 2.0), abs=0.01)


def test_verify_of_one_node_is_a_decode_step(tmp_path: Path, labels: Labels) -> None:
    """Fault: plain decoding that seems to speculate."""
    trace = replayed(tmp_path, KERNELS)
    _, stage, _ = labelled(trace, replays(trace), labels, single=True)
    assert STAGES.index("verify") not in stage
    assert STAGES.index("decode") in stage
