"""The lesson: stages by a host clock that does not wait for the device, beside the truth.

Both clocks are read at the same marks of the same cycles, which run eagerly: inside a graph there
is nothing for a host clock to mark.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from eyas.report.components import COLLECT, HOST
from eyas.report.explaining.workload import Workload
from eyas.spans import NoSpans, StageClock

CYCLES, FIRST = 12, 3
"""Cycles that are timed, and those before them that only warm up."""


class BothClocks:
    """Spans that read the host's clock and mark the device's time."""

    def __init__(self, device: torch.device) -> None:
        self._true = StageClock(device)
        self._marks: list[tuple[str | None, float]] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        self._marks.append((stage, perf_counter()))
        self._true.mark(stage)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """(host ms, true ms) by stage of what was marked since the last call."""
        host: defaultdict[str, float] = defaultdict(float)
        for (stage, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if stage is not None:
                host[stage] += (end - start) * 1e3
        self._marks.clear()
        return host, {name: sum(ms) for name, ms in self._true.milliseconds().items()}


def lesson(workload: Workload) -> dict[str, Any]:
    """Median ms of each stage by both clocks, and what follows in words."""
    runner = workload.engine.runner
    clocks = BothClocks(runner.device)
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    runner.spans = clocks
    try:
        while len(found) < CYCLES + FIRST:
            step = workload.step(watched=True)
            taken = clocks.take()
            if step is not None:
                found.append(taken)
    finally:
        runner.spans = NoSpans()
        workload.pause()
    found = found[FIRST:]
    names = [name for name in found[0][1] if name not in (HOST, COLLECT)]
    stages = {
        name: {
            "host_ms": median(host.get(name, 0.0) for host, _ in found),
            "true_ms": median(true.get(name, 0.0) for _, true in found),
        }
        for name in names
    }
    return {"stages": stages, "words": _words(stages, runner.device)}


def _words(stages: dict[str, dict[str, float]], device: torch.device) -> str:
    if device.type == "cpu":
        return "On a CPU a call returns when its work is done: both clocks agree."
    worst = max(stages, key=lambda name: abs(stages[name]["host_ms"] - stages[name]["true_ms"]))
    one = stages[worst]
    host, true = (sum(stage[key] for stage in stages.values()) for key in ("host_ms", "true_ms"))
    return (
        f"A host clock around each stage sees launches, not work: it would say {worst} takes "
        f"{one['host_ms']:.2f} ms where it takes {one['true_ms']:.2f}, and {host:.2f} ms for all "
        f"stages where they take {true:.2f}."
    )
