"""The cycle as CUDA graphs: which ones exist, when one may be replayed, and why one may not.

A graph holds the whole of `cycle` for a number of requests (its bucket) and a kind of sampling.
Fewer requests are padded with the dummy slot, whose row is reset inside the graph. Everything a
cycle reads lies in `DeviceState`, in pools and in the bucket's own slot buffer, so nothing can be
stale at replay. All graphs share one memory pool: they never run at the same time.

Knows neither requests nor plans. A cycle that runs eagerly always has a reason of `Reason`.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from eyas.batch import PassShape
from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.cycle import Parts, cycle
from eyas.spans import GraphClock, NoSpans, Spans


class Reason(enum.Enum):
    """Why a cycle runs without a graph."""

    NO_GPU = "graphs are for CUDA devices"
    DISABLED = "disable_cuda_graph is set"
    BATCH_NOT_CAPTURED = "more requests than cuda_graph_max_bs"
    BACKEND_NEEDS_BOUND = "this attention backend's work depends on the host's bound on lengths"
    STAGED = "stages are being timed one by one"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was captured for."""

    num_requests: int
    sampled: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class CycleGraph:
    """One captured cycle: write `slots`, replay, read `out`."""

    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    """int64[bucket]"""
    out: torch.Tensor
    """int64[bucket, depth + 2]; see `cycle`."""
    held: list[int] = field(default_factory=list)
    """The requests' slots that were written last, as the host knows."""


def buckets(config: EngineConfig) -> list[int]:
    """Batch sizes to capture, finer where a padded row costs more; the last is the largest."""
    most = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
    fine = [1, 2, 4, *range(8, 64, 8)]
    coarse = [*range(64, 256, 32), *range(256, 512, 64), *range(512, most, 256)]
    return [size for size in (*fine, *coarse) if size < most] + [most]


class CycleGraphs:
    """Captures cycles, says which cycle may replay one, and counts what happened."""

    def __init__(self, parts: Parts, config: EngineConfig, speculation: SpeculationConfig) -> None:
        self.parts, self.config, self.speculation = parts, config, speculation
        self.device = parts.state.device
        self.counts: Counter[GraphKey | Reason] = Counter()
        self.capture_seconds = 0.0
        self.capture_bytes = 0
        self._graphs: dict[GraphKey, CycleGraph] = {}
        self._twins: dict[tuple[GraphKey, int], CycleGraph] = {}
        self._clock: GraphClock | None = None
        self._buckets = buckets(config)
        self._memory: Any = None
        self._stream: torch.cuda.Stream | None = None
        """Of all captures: the matrix library keeps a workspace for every stream it meets."""
        self._why_not = self._never()

    def _never(self) -> Reason | None:
        """The reason that holds for every cycle of this engine, if any."""
        if self.device.type != "cuda":
            return Reason.NO_GPU
        if self.config.disable_cuda_graph:
            return Reason.DISABLED
        return Reason.BACKEND_NEEDS_BOUND if self.parts.needs_bound else None

    def decide(self, shape: PassShape) -> GraphKey | Reason:
        """The graph that runs a cycle of `shape`, or why it runs eagerly."""
        if self._why_not is not None:
            return self._why_not
        fitting = [size for size in self._buckets if size >= shape.num_requests]
        if not fitting:
            self._warn(shape.num_requests)
            return Reason.BATCH_NOT_CAPTURED
        return GraphKey(fitting[0], shape.sampled, shape.filtered)

    def _warn(self, num_requests: int) -> None:
        """Say once on stderr that larger batches than were captured run slower."""
        if self.counts[Reason.BATCH_NOT_CAPTURED]:
            return
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(
            f"warning: {num_requests} requests at once run without a CUDA graph: graphs are for up "
            f"to {self._buckets[-1]}; raise cuda_graph_max_bs",
            style="yellow",
            markup=False,
        )

    def capture_all(self, progress: bool = False) -> None:
        """Capture greedy and sampled cycles of every bucket, largest first."""
        if self._why_not is not None:
            return
        keys = [GraphKey(n, s, False) for n in reversed(self._buckets) for s in (True, False)]
        with Progress(disable=not progress, transient=True) as bar:
            for key in bar.track(keys, description="capturing graphs"):
                self.get(key)

    def clear(self) -> None:
        """Free all graphs; a communicator whose collectives they hold waits for that at its end."""
        self._graphs.clear()
        self.drop_twins()

    def twin(self, key: GraphKey, clock: GraphClock) -> CycleGraph:
        """The graph of `key`, or the twin of it whose turn it is, with a mark of `clock`.

        It must be replayed at once. Twins are captured at their first use; another clock gets new
        ones.
        """
        if clock is not self._clock:
            self.drop_twins()
            self._clock = clock
        place = clock.turn()
        if place is None:
            graph = self.get(key)
            clock.replayed(None)
            return graph
        name = key, place
        if name not in self._twins:
            with clock.capturing(name, place):
                self._twins[name] = self._capture(key, clock)
        clock.replayed(name)
        return self._twins[name]

    def drop_twins(self) -> None:
        """Free the graphs that hold marks, once none of them runs any more."""
        if self._twins:
            torch.cuda.synchronize(self.device)
        self._twins.clear()
        self._clock = None

    def get(self, key: GraphKey) -> CycleGraph:
        """The graph of `key`; captured now if this is its first use (filtered sampling)."""
        if key not in self._graphs:
            start, before = perf_counter(), torch.cuda.memory_reserved(self.device)
            self._graphs[key] = self._capture(key)
            self.capture_seconds += perf_counter() - start
            self.capture_bytes += torch.cuda.memory_reserved(self.device) - before
        return self._graphs[key]

    @torch.inference_mode()
    def _capture(self, key: GraphKey, spans: Spans | None = None) -> CycleGraph:
        """Run the cycle on dummy slots once, for kernels to compile, then capture it."""
        slots, shape = self._stand_ins(key)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._cycle(slots, shape)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                out = self._cycle(slots, shape, spans)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return CycleGraph(graph, slots, out)

    @torch.inference_mode()
    def rehearse(self, key: GraphKey, spans: Spans) -> None:
        """Run eagerly what the graph of `key` holds, on the dummy slot: no request changes."""
        self._cycle(*self._stand_ins(key), spans)

    def _stand_ins(self, key: GraphKey) -> tuple[torch.Tensor, PassShape]:
        """Dummy slots and the shape of a graph's cycle."""
        dummy = self.parts.state.dummy_slot
        slots = torch.full((key.num_requests,), dummy, dtype=torch.int64, device=self.device)
        shape = PassShape(
            num_requests=key.num_requests,
            num_new=self.speculation.num_nodes,
            max_kv_len=self.config.context_length + self.speculation.scratch,
            sampled=key.sampled,
            filtered=key.filtered,
        )
        return slots, shape

    def _cycle(
        self, slots: torch.Tensor, shape: PassShape, spans: Spans | None = None
    ) -> torch.Tensor:
        self.parts.state.rest_dummy()
        return cycle(self.parts, slots, shape, spans or NoSpans())
