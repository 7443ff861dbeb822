"""Microseconds of single operations: on a CPU by the clock, on a GPU inside a CUDA graph by events.

Calls that are timed together run one after another in turn, so that each finds the caches as the
others left them. The clock is read only once the device is through. On a GPU a long read may go
before what is timed: it ends after the graph was handed over, so that handing it over does not
count, and leaves nothing of the calls in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

Call = Callable[[], Any]

FEWEST_ROUNDS, MOST_ROUNDS = 3, 1000
IN_A_GRAPH = 24
"""Calls of a graph at least: its own start and end then hardly count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Times calls on one device."""

    device: torch.device
    seconds: float = 0.3
    """That one figure takes, about."""
    rounds: int = 0
    """Rounds exactly, for ranks that must do the same; 0: by the time."""
    cushion: torch.Tensor | None = field(default=None, compare=False)
    """What is read before a graph is timed; several times the last cache."""

    def us(self, calls: Sequence[Call]) -> float:
        """Median time of one of `calls`."""
        with torch.inference_mode():
            if self.device.type == "cuda":
                return self._in_a_graph(calls)
            for call in calls:
                call()
            return self._median(lambda: self._round(calls)) / len(calls)

    def wall_us(self, call: Call, count: int) -> float:
        """Median wall time of `call`, of which `count` run before the device is waited for."""
        with torch.inference_mode():
            self._many(call, count)
            return self._median(lambda: self._many(call, count)) / count

    def _many(self, call: Call, count: int) -> float:
        self.wait()
        start = perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (perf_counter() - start) * 1e6

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def replay_us(self, graph: torch.cuda.CUDAGraph, count: int = 1) -> float:
        """Median device time of a replay, of `count` that are started one behind the other."""
        graph.replay()
        self.wait()
        return self._median(lambda: self._replays(graph, count)) / count

    def _replays(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if self.cushion is not None:
            self.cushion.sum()
        marks[0].record()
        for _ in range(count):
            graph.replay()
        marks[1].record()
        self.wait()
        return float(marks[0].elapsed_time(marks[1]) * 1e3)

    def _round(self, calls: Sequence[Call]) -> float:
        start = perf_counter()
        for call in calls:
            call()
        return (perf_counter() - start) * 1e6

    def _in_a_graph(self, calls: Sequence[Call]) -> float:
        turns = max(1, -(-IN_A_GRAPH // len(calls)))
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for call in calls:  # kernels compile here
                call()
            self.wait()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(turns):
                    for call in calls:
                        call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        us = self.replay_us(graph) / (turns * len(calls))
        graph.reset()
        return us

    def _median(self, once: Callable[[], float]) -> float:
        """Of rounds until the time is up, or of as many as are asked for."""
        found: list[float] = []
        end = perf_counter() + self.seconds
        while len(found) < (self.rounds or MOST_ROUNDS):
            found.append(once())
            enough = len(found) >= FEWEST_ROUNDS and perf_counter() > end
            if not self.rounds and enough:
                break
        return statistics.median(found)
