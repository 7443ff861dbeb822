"""Where a trace's cycles begin: a decode step, or a speculative cycle, from one verify to the next.

Three ways are tried in turn, and the one that finds cycles is named: spans of the host that tell a
decode or verify pass; the graph with most attention layers, if it is no piece of a pass; and
kernels that come back once a period. A cycle is a stretch of time, so all that runs in it is its
own. Where drafting can be told, cycles begin with it. Steady cycles are those that look like most.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.report.components import ATTENTION, DEVICE, DRAFT, LM_HEAD, PREFILL, SAMPLING, STAGES
from eyas.report.traces.stages import Staging, main_stream
from eyas.report.traces.trace import Ints, Trace

ALIKE = 0.1
"""Steady cycles have this share more or fewer kernels than the median at most."""
STALL = 3.0
"""A cycle longer than this many medians is a stall, and not steady."""
BIG = 0.75
"""Graphs with this share of the deepest one's attention kernels are of cycles too: other widths."""
PERIODIC = 0.93
"""The shortest period with this share of the best one's votes wins."""
REPEATED = 0.5
"""Kernels that are equal to that one period later, at least, in a trace that repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """Consecutive cycles of a trace."""

    found_by: str
    cuts: Ints
    """int64[cycles + 1]: first kernel of each cycle, and of what follows the last"""
    steady: np.ndarray
    """bool[cycles]"""
    stalls: int
    """Cycles left out because they took much longer than others."""


def find_cycles(trace: Trace, code: Ints, staging: Staging) -> Cycles | None:
    """The cycles of a trace; None if nothing repeats."""
    ways = (
        ("spans of the host", lambda: staging.target),
        ("graph launches", lambda: _by_graphs(trace, code)),
        ("repeating kernels", lambda: _by_repetition(trace)),
    )
    for found_by, way in ways:
        cuts = way()
        if len(cuts) >= 2:
            return _steady(trace, found_by, _from_draft(cuts, staging.stage), staging.stage)
    return None


def _by_graphs(trace: Trace, code: Ints) -> Ints:
    """First kernels of the launches of the graphs with most attention, or that take most time."""
    work, calls = trace.work, trace.calls
    inside = np.flatnonzero(work.call >= 0)
    inside = inside[calls.graph[work.call[inside]]]
    if not len(inside):
        return np.zeros(0, np.int64)
    launch, first, inverse = np.unique(work.call[inside], return_index=True, return_inverse=True)
    took = np.bincount(inverse, weights=work.dur[inside])
    mixed = np.random.default_rng(0).integers(1, 2**31, len(trace.kinds))
    names = {name: i for i, name in enumerate(sorted({k.name for k in trace.kinds}))}
    value = mixed[[names[kind.name] for kind in trace.kinds]][work.kind[inside]]
    look = np.zeros(len(launch), dtype=np.int64)
    np.add.at(look, inverse, value)
    _, group = np.unique(look, return_inverse=True)
    total = np.bincount(group, weights=took)
    depth = np.bincount(inverse, weights=code[inside] == DEVICE.index(ATTENTION))
    often = np.bincount(group)[group] >= 2
    deepest = float(depth[often].max(initial=0.0))
    chosen = depth >= BIG * deepest if deepest else group == total.argmax()
    cuts = np.sort(inside[first[chosen]])
    return cuts if _whole(cuts, code) else np.zeros(0, np.int64)


def _whole(cuts: Ints, code: Ints) -> bool:
    """Whether most stretches between cuts hold an LM head or a draw: pieces of a pass do not."""
    ends = np.isin(code, (DEVICE.index(LM_HEAD), DEVICE.index(SAMPLING)))
    if not ends.any():
        return True
    count = np.concatenate([[0], np.cumsum(ends)])
    return bool((np.diff(count[cuts]) > 0).mean() >= 0.5) if len(cuts) >= 2 else True


def _by_repetition(trace: Trace) -> Ints:
    """Occurrences of a kernel that comes once a period, on the stream that works most.

    Every distinct kernel has one vote on a period: the share of its occurrences with an equal
    kernel one period later. Kernels of layers vote for a layer's length too, those that come once
    a pass do not. The shortest period that gets about as many votes as the best one wins.
    """
    main = np.flatnonzero(trace.work.stream == main_stream(trace))
    names = {name: i for i, name in enumerate(dict.fromkeys(k.name for k in trace.kinds))}
    own = np.array([names[k.name] for k in trace.kinds], dtype=np.int64)[trace.work.kind[main]]
    count = np.bincount(own, minlength=len(names))
    places = {n: np.flatnonzero(own == n) for n in np.flatnonzero(count >= 3)}
    gaps = {n: int(np.median(np.diff(at))) for n, at in places.items()}
    votes = {}
    for period in sorted(set(gaps.values())):
        same = own[period:] == own[:-period]
        agreed = np.bincount(own[:-period], weights=same, minlength=len(names))
        could = np.bincount(own[:-period], minlength=len(names))
        votes[period] = float((agreed / np.maximum(could, 1)).sum())
    if not votes:
        return np.zeros(0, np.int64)
    period = next(p for p, v in votes.items() if v >= PERIODIC * max(votes.values()))
    if (own[period:] == own[:-period]).mean() < REPEATED:
        return np.zeros(0, np.int64)
    took = np.bincount(own, weights=trace.work.dur[main], minlength=len(names))
    once = [n for n, gap in gaps.items() if abs(gap - period) <= ALIKE * period]
    return main[places[max(once, key=lambda n: took[n])]]


def _from_draft(cuts: Ints, stage: Ints) -> Ints:
    """Cuts moved back to where drafting begins, if most cycles draft."""
    is_draft = stage == STAGES.index(DRAFT)
    moved = []
    for start, end in pairwise(cuts):
        inside = np.flatnonzero(is_draft[start:end])
        if len(inside):
            moved.append(start + inside[0])
    many = len(moved) >= 2 and len(moved) >= 0.9 * (len(cuts) - 1)
    return np.array(moved, dtype=np.int64) if many else cuts


def _steady(trace: Trace, found_by: str, cuts: Ints, stage: Ints) -> Cycles:
    count = np.diff(cuts)
    length = np.diff(trace.work.start[cuts])
    prompts = np.concatenate([[0], np.cumsum(stage == STAGES.index(PREFILL))])
    plain = np.diff(prompts[cuts]) == 0
    chosen = plain if plain.any() else np.ones(len(count), np.bool_)
    usual = float(np.median(count[chosen]))
    steady = chosen & (np.abs(count - usual) <= ALIKE * usual)
    stalled = steady & (length > STALL * np.median(length[steady]))
    return Cycles(found_by=found_by, cuts=cuts, steady=steady & ~stalled, stalls=int(stalled.sum()))
