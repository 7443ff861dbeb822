"""Clocks around steps, replays and passes, and requests that decode steadily meanwhile.

On a CPU, where there are no graphs, passes are timed by the clock: for trying the script out.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.batch import PassShape
from eyas.config import SamplingParams
from eyas.engine import cycle as cycles
from eyas.engine.engine import Engine
from eyas.engine.graphs import CycleGraph, GraphKey
from eyas.engine.request import Request, Status
from eyas.speculate.tree import chain_draft

PROMPT = 512
SETTLING = 5
"""Steps before a clock starts."""
MOST_KERNELS = 28
"""In a table of the longest."""
TO_HOST = "Memcpy DtoH"


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def running(engine: Engine, batch: int, prompt: int = 0) -> Iterator[list[Request]]:
    """`batch` requests past their prompts (0: of the usual length), in steady decoding.

    Raises `RuntimeError` behind the block if one ended within it.
    """
    prompt = prompt or PROMPT
    vocab = engine.runner.parts.target.config.vocab_size
    generator = torch.Generator().manual_seed(batch)
    requests = []
    for _ in range(batch):
        ids = torch.randint(0, vocab, (prompt,), generator=generator).tolist()
        room = engine.config.context_length - prompt
        requests.append(engine.add(ids, SamplingParams(max_tokens=room, ignore_eos=True)))
    try:
        while any(r.status is not Status.RUNNING or not r.output for r in requests):
            engine.step()
        for _ in range(SETTLING):
            engine.step()
        yield requests
        ended = [r.id for r in requests if r.status is not Status.RUNNING]
        if ended:
            raise RuntimeError(f"requests {ended} ended while they were timed: raise the context")
    finally:
        for request in requests:
            engine.abort(request)
        wait(engine.runner.device)


def step_ms(engine: Engine, steps: int, repeats: int = 3) -> float:
    """Wall time of an engine step, host included; the median of repeats."""
    times = []
    for _ in range(repeats):
        wait(engine.runner.device)
        start = perf_counter()
        for _ in range(steps):
            engine.step()
        wait(engine.runner.device)
        times.append((perf_counter() - start) / steps * 1e3)
    return statistics.median(times)


def replay_ms(graph: torch.cuda.CUDAGraph, count: int = 30, repeats: int = 3) -> float:
    """Device time of a replay among others."""
    times = []
    for _ in range(repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(count):
            graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) / count)
    return statistics.median(times)


@contextmanager
def kept_state(engine: Engine) -> Iterator[None]:
    """Lengths and roots are afterwards as they were: replays move them on."""
    state = engine.runner.parts.state
    kv_lens, roots = state.kv_lens.clone(), state.roots.clone()
    try:
        yield
    finally:
        state.kv_lens.copy_(kv_lens)
        state.roots.copy_(roots)


def graph_of(engine: Engine, batch: int) -> CycleGraph | None:
    """The graph that greedy cycles of `batch` requests replay; None where they run eagerly."""
    shape = PassShape(
        num_requests=batch,
        num_new=engine.speculation.num_nodes,
        max_kv_len=engine.config.context_length,
        sampled=False,
        filtered=False,
    )
    key = engine.runner.graphs.decide(shape)
    return engine.runner.graphs.get(key) if isinstance(key, GraphKey) else None


def pass_ms(run: Callable[[], object], device: torch.device, count: int = 3) -> float:
    """Time of `run`: on a GPU captured and replayed."""
    with torch.inference_mode():
        run()
        wait(device)
        if device.type != "cuda":
            start = perf_counter()
            for _ in range(count):
                run()
            return (perf_counter() - start) / count * 1e3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return replay_ms(graph)


def verify_pass(engine: Engine, slots: Sequence[int], nodes: int) -> Callable[[], object]:
    """One verify pass over random drafts of the requests in `slots`, logits included.

    Equal drafts would be sent to the same experts.
    """
    parts, device = engine.runner.parts, engine.runner.device
    shape = PassShape(
        num_requests=len(slots),
        num_new=nodes,
        max_kv_len=engine.config.context_length,
        sampled=False,
        filtered=False,
    )
    with torch.inference_mode():
        context = cycles._context(parts, torch.tensor(slots, device=device), shape)
        vocab = parts.target.config.vocab_size
        drafts = torch.randint(vocab, (len(slots), nodes - 1), device=device)
        draft = chain_draft(context.roots, context.kv_lens, drafts)
    return lambda: cycles._verify(parts, context, draft)


def verify_ms(engine: Engine, slots: Sequence[int], nodes: int) -> float:
    """Time of `verify_pass`, in a graph."""
    return pass_ms(verify_pass(engine, slots, nodes), engine.runner.device)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a profile saw."""

    kernels: dict[str, list[float]]
    """Name on the device -> microseconds of each launch; copies and fills too."""
    calls: Counter[str]
    """Calls of the CUDA runtime and others on the host."""

    def launches(self) -> int:
        """Kernels, copies and fills on the device."""
        return sum(map(len, self.kernels.values()))

    def named(self, pattern: str) -> list[float]:
        """Microseconds of every launch whose name holds `pattern`."""
        found = [us for name, us in self.kernels.items() if re.search(pattern, name)]
        return [one for many in found for one in many]

    def called(self, pattern: str) -> int:
        """Calls on the host whose name begins so."""
        return sum(n for name, n in self.calls.items() if re.match(pattern, name))

    def table(self) -> str:
        """The longest kernels, a line each."""
        ranked = sorted(self.kernels.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]
        lines = [f"{sum(t):9.1f} us {len(t):5d} x {sum(t) / len(t):7.2f}  {n}" for n, t in ranked]
        return "\n".join(lines)


def profiled(run: Callable[[], object], device: torch.device, host: bool = False) -> Seen:
    """Watch `run`; `host`: calls of the runtime too, which slows it."""
    on_gpu = device.type == "cuda"
    watched = [ProfilerActivity.CUDA] * on_gpu + [ProfilerActivity.CPU] * (host or not on_gpu)
    with profile(activities=watched) as seen:
        run()
        wait(device)
    events: Any = seen.events() or []
    return sort_events((str(e.device_type), e.name, e.device_time) for e in events)


def sort_events(events: Iterator[tuple[str, str, float]]) -> Seen:
    """(device type, name, microseconds) of a profile's events by where they ran."""
    found = Seen({}, Counter())
    for device, name, us in events:
        if "CUDA" in device:
            found.kernels.setdefault(name[:90], []).append(us)
        else:
            found.calls[name] += 1
    return found
