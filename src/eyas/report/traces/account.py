"""What an average steady cycle holds: time by component and stage, idle time by cause, counts.

A cycle is the time from its first kernel to the next cycle's. `device_ms` sums kernels over all
streams; `overlap_ms` is how much of that ran beside other kernels; what is left of the cycle is
idle: `cycle_ms = device_ms - overlap_ms + idle_ms`, to rounding. `early_ms` is the part of
`device_ms`, and of `overlap_ms`, in which kernels that were launched early wait for those before
them in their stream (`turns.py`). All values are means over the steady cycles, so that parts add
up. Idle time is laid to what ended it:

- `host`: the host had not yet asked for the next kernel;
- `graph launch`, `launch`: it had asked, and the kernel did not start yet;
- `inside graphs`: between two kernels of one graph launch;
- `untold`: the trace does not say when the kernel was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.report.components import DEVICE, STAGES, UNKNOWN
from eyas.report.traces.cycles import Cycles
from eyas.report.traces.trace import Floats, Ints, Trace
from eyas.report.traces.turns import waits

CAUSES = ("host", "graph launch", "launch", "inside graphs", "untold")
OTHER = "other"
"""Stage of kernels that nothing tells the stage of."""
MOST_GAPS = 12
"""Kinds of gaps that a record lists."""
GAP = 3.0
"""us of idle time from which on a gap is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Idle time before each kernel, on any stream; arrays as long as `Trace.work`."""

    whole: Floats
    """us"""
    host: Floats
    """us of it until the host asked for the kernel"""
    cause: Ints
    """index into `CAUSES` of the rest"""

    def main_cause(self, i: int) -> str:
        """What most of the gap before kernel `i` is laid to."""
        if self.host[i] > self.whole[i] / 2:
            return CAUSES[0]
        return CAUSES[int(self.cause[i])]

    def by_cause(self, chosen: np.ndarray, each: float) -> dict[str, float]:
        """Idle time of the chosen gaps by cause."""
        rest = np.bincount(
            self.cause[chosen],
            weights=(self.whole - self.host)[chosen],
            minlength=len(CAUSES),
        )
        rest[0] += self.host[chosen].sum()
        return {name: float(rest[i]) / each for i, name in enumerate(CAUSES)}


def find_gaps(trace: Trace) -> Gaps:
    """Idle time of a trace and its causes."""
    work, calls = trace.work, trace.calls
    busy_until = np.maximum.accumulate(work.end) if len(work.end) else work.end
    before = np.concatenate([work.start[:1], busy_until[:-1]])
    whole = np.maximum(work.start - before, 0.0)
    host = np.zeros(len(whole))
    cause = np.full(len(whole), CAUSES.index("untold"), dtype=np.int64)
    known = np.flatnonzero(work.call >= 0)
    call = work.call[known]
    host[known] = np.clip(calls.start[call] - before[known], 0.0, whole[known])
    same = np.concatenate([[False], work.call[1:] == work.call[:-1]])[known]
    cause[known] = np.select(
        [calls.graph[call] & same, calls.graph[call]],
        [CAUSES.index(c) for c in ("inside graphs", "graph launch")],
        CAUSES.index("launch"),
    )
    return Gaps(whole=whole, host=host, cause=cause)


def account(trace: Trace, code: Ints, stage: Ints, cycles: Cycles) -> dict[str, Any]:
    """The averages described above, as plain values in milliseconds a cycle."""
    work = trace.work
    count = int(cycles.steady.sum())
    inside = np.zeros(len(work.start), dtype=np.bool_)
    ending = np.zeros(len(work.start), dtype=np.bool_)
    for i in np.flatnonzero(cycles.steady):
        inside[cycles.cuts[i] : cycles.cuts[i + 1]] = True
        # the gap before a cycle's first kernel belongs to the cycle before
        ending[cycles.cuts[i] + 1 : cycles.cuts[i + 1] + 1] = True
    each = 1e3 * count
    gaps = find_gaps(trace)
    length = np.diff(work.start[cycles.cuts])[cycles.steady] / 1e3
    device = float(work.dur[inside].sum()) / each
    idle = float(gaps.whole[ending].sum()) / each
    cycle = float(length.mean())
    known = inside & (work.call >= 0)
    in_graph = np.zeros(len(inside), dtype=np.bool_)
    in_graph[known] = trace.calls.graph[work.call[known]]
    return {
        "cycle_ms": cycle,
        "device_ms": device,
        "busy_ms": cycle - idle,
        "overlap_ms": device - (cycle - idle),
        "early_ms": waits(work, inside) / each,
        "idle_ms": idle,
        "idle": gaps.by_cause(ending, each),
        "components": by_component(work.dur[inside], code[inside], each),
        "stages": _stages(trace, code, stage, inside, ending, gaps.whole, each),
        "streams": {
            str(s): float(work.dur[inside & (work.stream == s)].sum()) / each
            for s in np.unique(work.stream[inside]).tolist()
        },
        "launches": len(np.unique(work.call[known & ~in_graph])) / count,
        "graph_launches": len(np.unique(work.call[in_graph])) / count,
        "kernels": float(inside.sum()) / count,
        "graph_fraction": float(work.dur[in_graph].sum() / max(work.dur[inside].sum(), 1e-9)),
        "syncs": _syncs(trace, cycles),
        "copies_to_host": _copies_to_host(trace, inside) / count,
        "gaps": _gap_list(stage, gaps, ending, each),
        "cycles": _lengths(cycles, length),
        "kernels_by_time": kernels_by_time(trace, code, inside, each),
    }


def by_component(dur: Floats, code: Ints, each: float) -> dict[str, float]:
    """Time by component, those without any left out."""
    sums = np.bincount(code, weights=dur, minlength=len(DEVICE)) / each
    return {name: float(sums[i]) for i, name in enumerate(DEVICE) if sums[i] > 0}


def kernels_by_time(
    trace: Trace, code: Ints, chosen: np.ndarray, each: float
) -> list[dict[str, Any]]:
    """Time and count of each kernel by name and component, the longest first."""
    sums: defaultdict[tuple[str, int], float] = defaultdict(float)
    number: defaultdict[tuple[str, int], int] = defaultdict(int)
    pairs, inverse = np.unique(
        np.stack([trace.work.kind[chosen], code[chosen]]), axis=1, return_inverse=True
    )
    inverse = inverse.reshape(-1)
    took = np.bincount(inverse, weights=trace.work.dur[chosen], minlength=pairs.shape[1])
    counts = np.bincount(inverse, minlength=pairs.shape[1])
    for (kind, component), ms, n in zip(pairs.T.tolist(), took, counts, strict=True):
        sums[trace.kinds[kind].name, component] += float(ms) / each
        number[trace.kinds[kind].name, component] += int(n)
    ordered = sorted(sums, key=lambda key: -sums[key])
    return [
        {"name": n, "component": DEVICE[c], "ms": sums[n, c], "count": number[n, c] * 1e3 / each}
        for n, c in ordered
    ]


def unknown_kernels(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a list of kernels, those that no rule knows."""
    return [k for k in kernels if k["component"] == UNKNOWN]


def stage_name(index: int) -> str:
    """Name of a stage's index; -1 is `OTHER`."""
    return STAGES[index] if index >= 0 else OTHER


def _lengths(cycles: Cycles, length: Floats) -> dict[str, Any]:
    """How the cycles were found, and how long the steady ones are."""
    return {
        "found_by": cycles.found_by,
        "found": len(cycles.cuts) - 1,
        "steady": len(length),
        "stalls": cycles.stalls,
        "min_ms": float(length.min()),
        "median_ms": float(np.median(length)),
        "max_ms": float(length.max()),
    }


def _stages(
    trace: Trace,
    code: Ints,
    stage: Ints,
    inside: np.ndarray,
    ending: np.ndarray,
    gap: Floats,
    each: float,
) -> dict[str, Any]:
    """Device time, idle time before its kernels, and components of each stage."""
    found = {}
    for index in (*range(len(STAGES)), -1):
        own = inside & (stage == index)
        if own.any():
            found[stage_name(index)] = {
                "device_ms": float(trace.work.dur[own].sum()) / each,
                "idle_ms": float(gap[ending & (stage == index)].sum()) / each,
                "kernels": float(own.sum()) * 1e3 / each,
                "components": by_component(trace.work.dur[own], code[own], each),
            }
    return found


def _syncs(trace: Trace, cycles: Cycles) -> dict[str, dict[str, float]]:
    """Count and milliseconds a cycle of the calls in which the host waited for the device."""
    calls, work = trace.calls, trace.work
    first = work.call[cycles.cuts]
    if not len(calls.start) or (first < 0).any():
        return {}
    starts = calls.start[first]
    waits = np.flatnonzero(calls.sync)
    place = np.searchsorted(starts, calls.start[waits], side="right") - 1
    inside = (place >= 0) & (place < len(cycles.steady))
    waits, place = waits[inside], place[inside]
    waits = waits[cycles.steady[place]]
    count = int(cycles.steady.sum())
    found = {}
    for name in np.unique(calls.name[waits]).tolist():
        own = waits[calls.name[waits] == name]
        ms = float(calls.dur[own].sum()) / 1e3 / count
        found[trace.names[name]] = {"count": len(own) / count, "ms": ms}
    return found


def _copies_to_host(trace: Trace, inside: np.ndarray) -> int:
    to_host = np.array(["DtoH" in kind.name for kind in trace.kinds], dtype=np.bool_)
    return int(to_host[trace.work.kind[inside]].sum())


def _gap_list(stage: Ints, gaps: Gaps, ending: np.ndarray, each: float) -> list[dict[str, Any]]:
    """Idle time by the stages before and after it and by cause, the longest first."""
    sums: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    number: defaultdict[tuple[int, int, str], int] = defaultdict(int)
    for i in np.flatnonzero(ending & (gaps.whole >= GAP)).tolist():
        key = int(stage[i - 1]), int(stage[i]), gaps.main_cause(i)
        sums[key] += float(gaps.whole[i])
        number[key] += 1
    return [
        {
            "from": stage_name(before),
            "to": stage_name(after),
            "cause": why,
            "ms": sums[before, after, why] / each,
            "count": number[before, after, why] * 1e3 / each,
        }
        for before, after, why in sorted(sums, key=lambda key: -sums[key])[:MOST_GAPS]
    ]
