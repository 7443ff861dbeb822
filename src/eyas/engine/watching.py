"""What a rank notes of its own steps while they are watched: for how long it is in collectives.

On a CPU a collective is timed around its call, which returns when it is done. On a GPU the profiler
keeps the kernels in a trace file. Knows neither components nor reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from eyas.distributed.group import Group

COLLECTIVES = ("all_reduce", "all_gather", "share")
"""Methods of a `Group`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """A step of one rank."""

    ms: float
    collectives_ms: tuple[float, ...]
    """In order; empty on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """What a rank noted while it was watched."""

    rank: int
    steps: tuple[WatchedStep, ...]
    trace: str = ""
    """File of a GPU's trace, on the rank's machine."""


@dataclass(slots=True)
class RankWatch:
    """Notes the steps of one rank from `start` to `stop`."""

    group: Group
    device: torch.device
    steps: list[WatchedStep] = field(default_factory=list)
    _inside: list[float] = field(default_factory=list)
    _profiler: Any = None
    _undo: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin."""
        if self.device.type == "cuda":
            kinds = torch.profiler.ProfilerActivity
            self._profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
            self._profiler.start()
        else:
            self._undo = timed_collectives(self.group, self._inside)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        self._inside.clear()
        start = perf_counter()
        yield
        ms = (perf_counter() - start) * 1e3
        self.steps.append(WatchedStep(ms=ms, collectives_ms=tuple(self._inside)))

    def stop(self, folder: str) -> RankNotes:
        """End; a GPU's trace is written to `folder`."""
        trace = ""
        if self._undo is not None:
            self._undo()
        if self._profiler is not None:
            torch.cuda.synchronize(self.device)
            self._profiler.stop()
            trace = str(Path(folder) / f"rank{self.group.rank}.json")
            self._profiler.export_chrome_trace(trace)
        return RankNotes(rank=self.group.rank, steps=tuple(self.steps), trace=trace)


def timed_collectives(group: Group, into: list[float]) -> Callable[[], None]:
    """Time the calls of `group`'s collectives, ms, until the returned function is called."""

    def timed(call: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            start = perf_counter()
            y = call(x)
            into.append((perf_counter() - start) * 1e3)
            return y

        return run

    for name in COLLECTIVES:
        setattr(group, name, timed(getattr(group, name)))

    def undo() -> None:
        for name in COLLECTIVES:
            delattr(group, name)

    return undo
