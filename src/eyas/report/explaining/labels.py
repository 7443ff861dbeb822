"""Which stage and component each kernel of a profile belongs to, by named ranges of the host.

Kernels launched one by one belong to the range that their launch lies in. Kernels of a graph are
matched, in order and by name, with those of one eager run of what was captured. What a name tells
more precisely than a range goes first: collectives, KV writes, norms inside linear layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from eyas.engine.graphs import GraphKey
from eyas.engine.runner import Runner
from eyas.report.components import (
    ALL_REDUCE,
    COLLECT,
    COPIES,
    DECODE,
    DENSE,
    DEVICE,
    HOST,
    KV_WRITE,
    METADATA,
    NORM,
    STAGES,
    UNKNOWN,
    VERIFY,
)
from eyas.report.explaining.ranges import Nested, own_part, watched
from eyas.report.traces.cycles import Cycles
from eyas.report.traces.places import components
from eyas.report.traces.reading import read_trace
from eyas.report.traces.rules import by_name
from eyas.report.traces.trace import Ints, Trace

STAGE, PART = "eyas.stage:", "eyas.part:"
"""Names of ranges begin so."""


class Recorded(Nested):
    """Spans and ranges as named ranges of the profiler."""

    def __init__(self) -> None:
        self._stage: Any = None
        self._parts: list[Any] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        if self._stage is not None:
            self._stage.__exit__(None, None, None)
        self._stage = None if stage is None else self._begun(STAGE + stage)

    def enter(self, part: str) -> None:
        """See `Ranges`."""
        self._parts.append(self._begun(PART + part))

    def leave(self) -> None:
        """See `Ranges`."""
        self._parts.pop().__exit__(None, None, None)

    def _begun(self, name: str) -> Any:
        found = record_function(name)
        found.__enter__()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Stage and component of each kernel of a cycle, in order."""

    names: list[str]
    stage: list[int]
    """Index into `STAGES`, -1 where nothing tells."""
    code: list[int]
    """Index into `DEVICE`."""


def rehearsed(runner: Runner, key: GraphKey, folder: str) -> Labels:
    """Kernels of one cycle with their labels, from an eager run inside named ranges."""
    path, ranges = Path(folder) / "rehearsal.json", Recorded()
    with watched(runner.parts, ranges):
        runner.rehearse(key, ranges)  # what compiles at first use has done so
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            runner.rehearse(key, ranges)
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    [trace] = read_trace(path)
    return by_ranges(trace)


def by_ranges(trace: Trace) -> Labels:
    """Labels of all kernels of a trace by the ranges in which the host asked for them.

    A kernel whose launch the trace does not show belongs where the one before it does.
    """
    stages, parts = (_innermost(trace, prefix) for prefix in (STAGE, PART))
    kinds = [kind.name for kind in trace.kinds]
    names = [kinds[k] for k in trace.work.kind.tolist()]
    stage, code, last = list[int](), list[int](), (HOST, "")
    for name, call in zip(names, trace.work.call.tolist(), strict=True):
        if call >= 0:
            at = float(trace.calls.start[call])
            last = stages(at) or HOST, parts(at)
        stage.append(STAGES.index(last[0]))
        code.append(DEVICE.index(component(name, last[0], last[1])))
    return Labels(names=names, stage=stage, code=code)


def component(name: str, stage: str, part: str) -> str:
    """Component of a kernel launched in a range; what its name tells more precisely goes first."""
    named = by_name(name)
    if named in (ALL_REDUCE, KV_WRITE) or (named == NORM and part == DENSE):
        return named
    if part:
        return part
    if stage in (HOST, COLLECT):
        return COPIES if named == COPIES else METADATA
    return own_part(stage)


def _innermost(trace: Trace, prefix: str) -> Callable[[float], str]:
    """Function from a time to the innermost range there, without its prefix; "" if there is none.

    Ranges of one prefix are nested and of one thread.
    """
    chosen = [i for i, name in enumerate(trace.names) if name.startswith(prefix)]
    own = np.flatnonzero(np.isin(trace.spans.name, chosen))
    own = own[np.lexsort((-trace.spans.dur[own], trace.spans.start[own]))]
    start = trace.spans.start[own]
    end = start + trace.spans.dur[own]
    labels = [trace.names[n].removeprefix(prefix) for n in trace.spans.name[own].tolist()]
    outer, stack = [-1] * len(own), list[int]()
    for i in range(len(own)):
        while stack and end[stack[-1]] <= start[i]:
            stack.pop()
        outer[i] = stack[-1] if stack else -1
        stack.append(i)

    def at(time: float) -> str:
        i = int(np.searchsorted(start, time, side="right")) - 1
        while i >= 0 and end[i] <= time:
            i = outer[i]
        return labels[i] if i >= 0 else ""

    return at


def labelled(
    trace: Trace, cycles: Cycles, labels: Labels | None, single: bool
) -> tuple[Ints, Ints, float]:
    """Component and stage of each kernel; and the share of cycles' device time that is known.

    Kernels of a graph take the labels of the rehearsal's, matched in order by name; one without a
    match has the component that its name tells, and is not counted as known.
    """
    work, calls = trace.work, trace.calls
    kinds = [kind.name for kind in trace.kinds]
    names = np.array(kinds, dtype=object)[work.kind]
    code, _ = components(trace)
    stage = np.full(len(code), STAGES.index(HOST), dtype=np.int64)
    known = np.zeros(len(code), dtype=np.bool_)
    if labels is None:
        own = by_ranges(trace)
        code, stage = np.array(own.code, np.int64), np.array(own.stage, np.int64)
        known[:] = True
    else:
        in_graph = (work.call >= 0) & calls.graph[np.maximum(work.call, 0)]
        for begin, end in zip(cycles.cuts[:-1], cycles.cuts[1:], strict=True):
            own = begin + np.flatnonzero(in_graph[begin:end])
            found = _matched(labels, [str(n) for n in names[own]])
            place = np.flatnonzero(found >= 0)
            code[own[place]] = np.array(labels.code, np.int64)[found[place]]
            # what the eager run had not belongs to the stage around it
            before = np.maximum.accumulate(np.where(found >= 0, found, 0))
            stage[own] = np.array(labels.stage, np.int64)[before]
            known[own[place]] = True
        outside = ~in_graph
        to_host = np.array(["DtoH" in str(n) for n in names], dtype=np.bool_)
        stage[outside & to_host] = STAGES.index(COLLECT)
        known |= outside & (code != DEVICE.index(UNKNOWN))
    if single:
        stage[stage == STAGES.index(VERIFY)] = STAGES.index(DECODE)
    inside = slice(int(cycles.cuts[0]), int(cycles.cuts[-1]))
    total = float(work.dur[inside].sum())
    return code, stage, float(work.dur[inside][known[inside]].sum()) / total


def _matched(labels: Labels, names: list[str]) -> Ints:
    """Index into `labels` of each of `names`, -1 where the orders don't meet."""
    if names == labels.names:
        return np.arange(len(names))
    found = np.full(len(names), -1, dtype=np.int64)
    matcher = difflib.SequenceMatcher(a=labels.names, b=names, autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        found[b : b + size] = np.arange(a, a + size)
    return found
