"""A cycle of a GPU's engine taken apart without disturbing the run that is reported.

Three looks at the same answers, none of which is scaled to fit another:

- cycles that nobody watches, by the host's clock from result to result: what a cycle takes;
- cycles of the same graph, and in turn with them cycles of twins of it that hold one event node
  each: when each stage begins, and what a cycle takes from launch to launch. A stage's span is what
  lies between its beginning and the next one's, so spans add up to a time that no node disturbed;
  what the clock around the graph costs is measured, and what the dearest node costs;
- cycles under torch's profiler: for how long each kernel runs, counted from its turn where kernels
  are launched early (`traces/turns.py`). It stretches the gaps between kernels, so gaps are never
  taken from it: a stage idles for what its kernels leave of its span. Where they take more than the
  span, neighbours overlap in a run that is not profiled, and that is shown as overlap.

Which stage and component a kernel belongs to is learnt from one eager run of the very function
that was captured, on the dummy slot, inside named ranges; a replay's kernels come in the same
order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from eyas.engine.graphs import GraphKey
from eyas.errors import RecordError
from eyas.report.components import (
    COLLECT,
    DECODE,
    DEVICE,
    HOST,
    STAGES,
    VERIFY,
)
from eyas.report.explaining.labels import Recorded, by_ranges, labelled, rehearsed
from eyas.report.explaining.ranges import watched
from eyas.report.explaining.workload import Step, Workload
from eyas.report.traces.account import OTHER, account, stage_name, unknown_kernels
from eyas.report.traces.collectives import collectives
from eyas.report.traces.cycles import ALIKE, Cycles
from eyas.report.traces.places import components
from eyas.report.traces.reading import read_trace
from eyas.report.traces.timeline import timeline
from eyas.report.traces.trace import Ints, Trace
from eyas.report.traces.turns import in_turn
from eyas.spans import GraphClock, NoSpans, Timing

BLOCK, WARM = 8, 2
"""Cycles of a kind in turn, at least, and timed ones at the start of a turn that are left out."""
SHARE = 4
"""A stage's beginning is looked at in one cycle for so many that are not watched, at least."""
QUIETER = 3
"""How many times less what follows must differ."""
PROFILED, FIRST = 12, 3
"""Cycles under the profiler, and those at its start that are left out."""
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
"""Without the host's the profiler need not show launches."""
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Timed:
    """Cycles by the three looks."""

    quiet: list[Step] = field(default_factory=list)
    timed: list[Timing] = field(default_factory=list)

    def fewest(self, places: int) -> int:
        """How often the beginning was timed of the stage where that was done least."""
        seen = Counter(name for one in self.timed for name in one.begins)
        del seen[HOST]
        return min(seen.values()) if len(seen) >= places else 0

    @property
    def whole(self) -> list[Timing]:
        """Cycles with the fewest marks."""
        least = min(len(one.begins) for one in self.timed)
        return [one for one in self.timed if len(one.begins) == least]


def take_apart(
    workload: Workload, count: int, folder: str
) -> tuple[list[Step], dict[str, Any], dict[tuple[str, str], float]]:
    """Unwatched cycles, the cycle's parts, and kernels by stage and component."""
    engine = workload.engine
    before = Counter(engine.runner.graphs.counts)
    timed = sample(workload, count)
    used = engine.runner.graphs.counts - before
    keys = [key for key in used if isinstance(key, GraphKey)]
    key = max(keys, key=lambda k: used[k]) if keys else None
    single = engine.speculation.num_nodes == 1
    traces, profiled_ms = profiled(workload, key, folder)
    cycles = _eager_cycles(traces[0]) if key is None else replays(traces[0])
    require_cycles(traces[0], cycles)
    labels = None if key is None else rehearsed(engine.runner, key, folder)
    code, stage, told = labelled(traces[0], cycles, labels, single)
    values = values_of(timed, traces[0], code, stage, cycles, single)
    values |= {
        "classified_fraction": told,
        "ranks": _ranks(traces, code, stage, cycles, values),
        "collectives": _shared(traces),
        "copies_to_host": values["copies_to_host"],
    }
    values["watching"] |= {
        "profiled_ms": profiled_ms,
        "profiled_overhead": profiled_ms / values["cycle_ms"] - 1,
        "labels": "an eager run of what was captured" if labels else "the profiled cycles' ranges",
    }
    return timed.quiet, values, cell_counts(code, stage, cycles)


def sample(workload: Workload, count: int) -> Timed:
    """At least `count` unwatched cycles of the whole group, and as many timed ones, in turns."""
    size = max(len(prompts) for prompts, _ in workload.groups)
    runner, clock, found = workload.engine.runner, GraphClock(), Timed()
    for _ in range(WARM):  # the first twin tells how many there are
        _timed(workload, clock, size, Timed())
    while not _enough(found, clock.num_places, count):
        workload.pause()
        for i in range(BLOCK):
            step = workload.step()
            if step is not None and step.requests == size and i:
                found.quiet.append(step)
        _timed(workload, clock, size, found)
    runner.graphs.drop_twins()
    return found


def _enough(found: Timed, places: int, count: int) -> bool:
    if min(len(found.quiet), len(found.timed)) < count or len(found.whole) < count:
        return False
    return found.fewest(places) >= count // SHARE


def _timed(workload: Workload, clock: GraphClock, size: int, found: Timed) -> None:
    """A block of cycles of the whole group that are timed: all twins have their turn.

    It has one cycle more than turns, so that those left out are others in the next block.
    """
    runner, taken, whole = workload.engine.runner, 0, False
    workload.pause()
    try:
        for _ in range(max(BLOCK, 2 * clock.num_places) + 1):
            if workload.running != size:
                _to_whole(workload, size)
                clock.drop()
                taken, whole = 0, False
            runner.spans = clock
            step = workload.step(watched=True)
            timing = clock.take()
            if timing is not None and whole and taken >= WARM:
                found.timed.append(timing)
            whole = step is not None and step.requests == size
            taken += 1
    finally:
        runner.spans = NoSpans()
        clock.drop()
    workload.pause()


def _to_whole(workload: Workload, size: int) -> None:
    """Go on unwatched until a whole group runs, so that no twins are made for fewer."""
    workload.engine.runner.spans = NoSpans()
    while workload.running != size:
        workload.step(watched=True)


def profiled(workload: Workload, key: GraphKey | None, folder: str) -> tuple[list[Trace], float]:
    """Traces of all ranks over steady cycles, and the median cycle under the profiler.

    Without graphs cycles run inside named ranges.
    """
    runner = workload.engine.runner
    size = max(len(prompts) for prompts, _ in workload.groups)
    with profile(activities=ACTIVITIES):  # its first start takes seconds
        workload.step(watched=True)
        torch.cuda.synchronize()
    path = Path(folder) / "rank0.json"
    runner.watch()
    with profile(activities=ACTIVITIES) as profiler:
        took = _in_ranges(workload, size) if key is None else _steps(workload, size)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    notes = runner.unwatch(folder)
    workload.pause()
    files = [path, *(Path(one.trace) for one in notes)]
    return [trace for file in files for trace in read_trace(file)], median(took)


def _steps(workload: Workload, size: int) -> list[float]:
    """ms of cycles of the whole group, the first ones left out."""
    workload.pause()
    took: list[float] = []
    while len(took) < PROFILED + FIRST:
        step = workload.step(watched=True)
        if step is not None and step.requests == size:
            took.append(step.ms)
    return took[FIRST:]


def _in_ranges(workload: Workload, size: int) -> list[float]:
    ranges, runner = Recorded(), workload.engine.runner
    with watched(runner.parts, ranges):
        runner.spans = ranges
        try:
            return _steps(workload, size)
        finally:
            ranges.mark(None)
            runner.spans = NoSpans()


def replays(trace: Trace) -> Cycles:
    """Cycles from one graph launch to the next; steady are those with as many kernels as most."""
    work, calls = trace.work, trace.calls
    inside = np.flatnonzero(work.call >= 0)
    inside = inside[calls.graph[work.call[inside]]]
    _, first = np.unique(work.call[inside], return_index=True)
    return _cut(np.sort(inside[first]), "graph launches")


def _eager_cycles(trace: Trace) -> Cycles:
    """Cycles from the first kernel of drafting to the next."""
    stage = np.array(by_ranges(trace).stage, dtype=np.int64)
    is_draft = stage == STAGES.index("draft")
    starts = np.flatnonzero(is_draft & ~np.concatenate([[False], is_draft[:-1]]))
    return _cut(starts, "ranges of the host")


def _cut(cuts: Ints, found_by: str) -> Cycles:
    count = np.diff(cuts)
    usual = np.bincount(count).argmax() if len(count) else 0
    steady = np.abs(count - usual) <= ALIKE * usual
    steady[:FIRST] = False
    return Cycles(found_by=found_by, cuts=cuts, steady=steady, stalls=0)


def require_cycles(trace: Trace, cycles: Cycles) -> None:
    """Raise `RecordError` where a profile holds no steady cycle to take apart."""
    if not cycles.steady.any():
        graphs = len(np.unique(trace.work.call[trace.work.call >= 0]))
        raise RecordError(
            f"a profile with {len(trace.work.start)} kernels of {graphs} launches",
            f"has {len(cycles.steady)} cycles by {cycles.found_by}, none of them steady",
            "run it again where nothing else profiles this GPU, or with disable_cuda_graph",
        )


def values_of(
    timed: Timed, trace: Trace, code: Ints, stage: Ints, cycles: Cycles, single: bool
) -> dict[str, Any]:
    """The cycle: its time unwatched, stages by marks, kernels by the profiler, from their turns."""
    early, trace = account(trace, code, stage, cycles)["early_ms"], in_turn(trace)
    values = account(trace, code, stage, cycles)
    quiet = middle(timed.quiet, lambda step: step.ms)
    cycle = sum(step.ms for step in quiet) / len(quiet)
    stages, spans = values["stages"], spans_of(timed, single)
    busy = _busy(trace, stage, cycles)
    overlap = 0.0
    for name in {**stages, **spans}:
        one = {"device_ms": 0.0, "kernels": 0.0, "components": {}} | stages.get(name, {})
        span, own = spans.get(name, 0.0), busy.get(name, 0.0)
        stages[name] = one | {"span_ms": span, "idle_ms": max(0.0, span - own)}
        overlap += one["device_ms"] - min(own, span)
    around = {"host": COLLECT, "graph launch": HOST}
    idle = {cause: stages[name]["idle_ms"] for cause, name in around.items() if name in stages}
    within = sum(stages[n]["idle_ms"] for n in stages if n not in (COLLECT, HOST))
    idle["inside graphs" if values["graph_launches"] else "launch"] = within
    idle_ms = sum(idle.values())
    rest = cycle - (values["device_ms"] - overlap + idle_ms)
    return values | {
        "cycle_ms": cycle,
        "idle_ms": idle_ms,
        "idle": idle,
        "busy_ms": values["device_ms"] - overlap,
        "overlap_ms": overlap,
        "early_ms": early,
        "stages": {n: stages[n] for n in (*STAGES, OTHER) if n in stages},
        "gaps": _gaps(stages, values["gaps"], bool(values["graph_launches"])),
        "unexplained_ms": rest,
        "unexplained_fraction": rest / cycle,
        "unknown": unknown_kernels(values["kernels_by_time"]),
        "watching": _watching(timed, cycle, len(timed.quiet)),
    }


def _watching(timed: Timed, cycle: float, unwatched: int) -> dict[str, Any]:
    """What was watched how, and what that costs."""
    watched_ms = _mean([one.ms for one in timed.whole])
    by_place = {
        name: _mean([one.ms for one in timed.timed if name in one.begins])
        for name in {name: None for one in timed.timed for name in one.begins if name != HOST}
    }
    dearest = max(by_place, key=lambda name: by_place[name])
    replayed = len(timed.whole[0].begins) == 1
    one_by_one = "one event node at a time in twin graphs for stages, the profiler for kernels"
    return {
        "how": one_by_one if replayed else "events for stages, the profiler for kernels",
        "unwatched_ms": cycle,
        "watched_ms": watched_ms,
        "overhead": watched_ms / cycle - 1,
        "unwatched_cycles": unwatched,
        "watched_cycles": len(timed.whole),
        "marked_ms": by_place,
        "dearest": dearest,
        "dearest_overhead": by_place[dearest] / cycle - 1,
    }


def _busy(trace: Trace, stage: Ints, cycles: Cycles) -> dict[str, float]:
    """ms a cycle in which kernels of each stage run; of those that overlap the later one's rest."""
    work, count = trace.work, int(cycles.steady.sum())
    before = np.concatenate([work.start[:1], np.maximum.accumulate(work.end)[:-1]])
    alone = np.maximum(work.end - np.maximum(work.start, before), 0.0)
    found: defaultdict[str, float] = defaultdict(float)
    for i in np.flatnonzero(cycles.steady):
        own = slice(int(cycles.cuts[i]), int(cycles.cuts[i + 1]))
        for s in np.unique(stage[own]).tolist():
            chosen = stage[own] == s
            found[stage_name(s)] += float(alone[own][chosen].sum()) / 1e3 / count
    return dict(found)


def spans_of(timed: Timed, single: bool) -> dict[str, float]:
    """ms of each stage, from its beginning to the next one's; the last one's to the whole's end.

    What noise makes less than nothing is nothing, so that the sum may be more than the whole.
    """
    begins: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in timed.timed:
        for name, ms in one.begins.items():
            begins[name].append((ms, one.ms))
    names = [name for name in (HOST, *STAGES[:-1]) if name in begins]
    whole = _mean([one.ms for one in timed.whole])
    at = [_beginning(begins[name], whole) for name in names] + [whole]
    return {
        DECODE if single and name == VERIFY else name: max(0.0, end - start)
        for name, start, end in zip(names, at[:-1], at[1:], strict=True)
    }


def _beginning(found: Sequence[tuple[float, float]], whole: float) -> float:
    """When a stage begins, of (its beginning, the cycle's end) in ms.

    Cycles differ, by the experts that they touch above all. Where what follows a beginning differs
    far less than what lies before it, the beginning is told from the end, the node's cost in it.
    """
    before = [begin for begin, _ in found]
    after = [end - begin for begin, end in found]
    late = _spread(before) > QUIETER * _spread(after)
    return whole - _mean(after) if late else _mean(before)


def _spread(values: Sequence[float]) -> float:
    """Of the half in the middle, in their unit."""
    chosen = middle(values, lambda ms: ms)
    return chosen[-1] - chosen[0]


def _mean(values: Sequence[float]) -> float:
    """Of the half in the middle."""
    chosen = middle(values, lambda ms: ms)
    return sum(chosen) / len(chosen)


def middle(values: Sequence[T], key: Callable[[T], float]) -> list[T]:
    """The half of `values` whose keys lie in the middle."""
    ordered = sorted(values, key=key)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]


def _gaps(
    stages: dict[str, Any], profiled_gaps: list[dict[str, Any]], graphs: bool
) -> list[dict[str, Any]]:
    """Idle stretches: of a graph's cycle by its marks, else as the profiler saw them."""
    if not graphs:
        return profiled_gaps
    found = []
    for name, one in stages.items():
        around = {COLLECT: (COLLECT, HOST, "host"), HOST: (HOST, "draft", "graph launch")}
        before, after, cause = around.get(name, (name, name, "inside graphs"))
        found.append(
            {"from": before, "to": after, "cause": cause, "ms": one["idle_ms"], "count": 1.0}
        )
    return sorted((g for g in found if g["ms"] > 0), key=lambda g: -g["ms"])


def cell_counts(code: Ints, stage: Ints, cycles: Cycles) -> dict[tuple[str, str], float]:
    """Kernels a cycle by stage and component."""
    count, found = int(cycles.steady.sum()), Counter[tuple[str, str]]()
    for i in np.flatnonzero(cycles.steady):
        own = slice(int(cycles.cuts[i]), int(cycles.cuts[i + 1]))
        for s, c in zip(stage[own].tolist(), code[own].tolist(), strict=True):
            found[STAGES[s] if s >= 0 else OTHER, DEVICE[c]] += 1
    return {cell: n / count for cell, n in found.items()}


def _ranks(
    traces: Sequence[Trace], code: Ints, stage: Ints, cycles: Cycles, values: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every rank's cycle; gaps of timelines, and of other ranks, are as profiled."""
    keys = ("cycle_ms", "device_ms", "idle_ms", "components")
    own = {"rank": 0, "timeline": timeline(traces[0], code, stage, cycles)}
    found = [own | {key: values[key] for key in keys}]
    for rank, trace in enumerate(traces[1:], 1):
        parts, cuts = components(trace)[0], replays(trace)
        if not cuts.steady.any():
            continue
        nothing = np.full(len(parts), -1, dtype=np.int64)
        other = account(in_turn(trace), parts, nothing, cuts)
        drawn = timeline(trace, parts, nothing, cuts)
        found.append({"rank": rank, "timeline": drawn} | {key: other[key] for key in keys})
    return found


def _shared(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """Transfer and waiting in collectives, from their turns."""
    traces = [in_turn(trace) for trace in traces]
    codes = [components(trace)[0] for trace in traces]
    return collectives(traces, codes, [replays(trace) for trace in traces])
