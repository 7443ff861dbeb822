"""Stage spans: how long each stage of a cycle took on the device that ran it.

On a GPU a mark is a CUDA event, read after the run; on a CPU, where work is synchronous, it is a
clock reading. `NoSpans` is what a run without measurement is handed: it does nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Protocol

import torch


class Spans(Protocol):
    """Receives the name of the stage that starts now; `None` ends the last one."""

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""


class NoSpans:
    """Measures nothing and costs nothing."""

    def mark(self, stage: str | None) -> None:
        """Ignore the stage."""


class StageClock:
    """Collects milliseconds per stage; `milliseconds()` waits for the device once."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`, ending the stage before it."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((stage, event))
        else:
            self._marks.append((stage, time.perf_counter()))

    def milliseconds(self) -> dict[str, list[float]]:
        """Every span since the last call, in ms by stage; forgets them."""
        if self._cuda:
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = defaultdict(list)
        for (stage, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if stage is not None:
                spans[stage].append(_elapsed(start, end))
        self._marks.clear()
        return dict(spans)


def _elapsed(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return (end - start) * 1e3
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end)
