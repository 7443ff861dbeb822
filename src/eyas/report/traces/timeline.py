"""One cycle of a trace as bars to draw: the steady cycle of median length, stream by stream.

A bar is as long as its kernel's turn (`turns.py`), so bars of a stream never overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eyas.report.components import DEVICE
from eyas.report.traces.account import stage_name
from eyas.report.traces.cycles import Cycles
from eyas.report.traces.trace import Ints, Trace
from eyas.report.traces.turns import in_turn

MOST_BARS = 1200
"""Bars of one timeline; with more kernels, neighbours of a stream are drawn as one."""


def timeline(trace: Trace, code: Ints, stage: Ints, cycles: Cycles) -> dict[str, Any]:
    """`length_ms`, and `streams`: bars [start ms, length ms, component, stage, kernels] by stream.

    Starts count from the cycle's first kernel. Bars of one stream are in order of start. A bar of
    several kernels has the component that took most time in it, and the first one's stage.
    """
    trace = in_turn(trace)
    work = trace.work
    steady = np.flatnonzero(cycles.steady)
    length = np.diff(work.start[cycles.cuts])[steady]
    middle = steady[np.argsort(length, kind="stable")[len(length) // 2]]
    own = np.arange(cycles.cuts[middle], cycles.cuts[middle + 1])
    begin = work.start[own[0]]
    span = float(work.start[cycles.cuts[middle + 1]] - begin)
    width = 0.0 if len(own) <= MOST_BARS else span / MOST_BARS
    streams = {}
    for stream in np.unique(work.stream[own]).tolist():
        streams[str(stream)] = _bars(trace, code, stage, own[work.stream[own] == stream], width)
    for bars in streams.values():
        for bar in bars:
            bar[0] = round((bar[0] - begin) / 1e3, 6)
            bar[1] = round(bar[1] / 1e3, 6)
    return {"length_ms": span / 1e3, "streams": streams}


def _bars(trace: Trace, code: Ints, stage: Ints, own: Ints, width: float) -> list[list[Any]]:
    """Bars in us; kernels that start within `width` of a bar's start join it."""
    work = trace.work
    bars: list[list[Any]] = []
    sums: dict[str, float] = {}
    for i in own.tolist():
        start, dur, name = float(work.start[i]), float(work.dur[i]), DEVICE[code[i]]
        label = stage_name(int(stage[i]))
        if bars and start < bars[-1][0] + width and bars[-1][3] == label:
            last = bars[-1]
            last[1] = max(last[1], start + dur - last[0])
            last[4] += 1
            sums[name] = sums.get(name, 0.0) + dur
            last[2] = max(sums, key=lambda key: sums[key])
        else:
            bars.append([start, dur, name, label, 1])
            sums = {name: dur}
    return bars
