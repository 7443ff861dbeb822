"""What the host does in a step: where its time goes, what it waits for, what it launches itself."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

from eyas.engine.engine import Engine
from eyas.engine.runner import Underway
from gpu_parts.builds import SPECS, Builds
from gpu_parts.goals import Row, row
from gpu_parts.record import Record
from gpu_parts.timing import TO_HOST, graph_of, kept_state, profiled, replay_ms, running, wait

STEPS = 48
"""Pages are granted within them."""
LAUNCH = r"cu(da)?Launch(Cooperative)?Kernel"
REPLAY = "cudaGraphLaunch"


def waits(shape: str, run: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Steady steps with torch's sync detector on error, and what a profile saw of others."""
    engine = builds.engine(shape, SPECS[run], builds.config(1))
    label = f"{shape} {run} B=1"
    with running(engine, 1):
        error = sync_error(engine, STEPS)
        yield row(f"{label} host waits", float(error is not None), "")
        if error is not None:
            record.details[f"{label} host waits"] = error
        yield from step_rows(label, engine, record)


def sync_error(engine: Engine, steps: int) -> str | None:
    """The first hidden wait for the device within so many steps, in the detector's words.

    The wait for the late result is an event's, which the detector does not count.
    """
    if engine.runner.device.type != "cuda":
        return None
    wait(engine.runner.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def step_rows(label: str, engine: Engine, record: Record) -> Iterator[Row]:
    """Copies, launches outside of graphs and replays of a step."""

    def steps() -> None:
        for _ in range(STEPS):
            engine.step()

    seen = profiled(steps, engine.runner.device, host=True)
    yield row(f"{label} copies to the host a step", len(seen.named(TO_HOST)) / STEPS, "")
    yield row(f"{label} launches outside of graphs a step", seen.called(LAUNCH) / STEPS, "")
    yield row(f"{label} replays a step", seen.called(REPLAY) / STEPS, "")
    record.details[f"{label}, {STEPS} steps"] = seen.table()


def host(shape: str, run: str, batch: int, builds: Builds, record: Record) -> Iterator[Row]:
    """Wall time of a step by what the host does, beside the device's."""
    engine = builds.engine(shape, SPECS[run], builds.config(32))
    label = f"{shape} {run} B={batch} host"
    with running(engine, batch):
        for what, us in host_us(engine, STEPS).items():
            yield row(f"{label}: {what}", us, "us")
        graph = graph_of(engine, batch)
        if graph is None:
            return
        with kept_state(engine):
            yield row(f"{label}: device", 1e3 * replay_ms(graph.graph), "us")
            yield row(f"{label}: call of a replay", replay_call_us(graph.graph), "us")


def host_us(engine: Engine, steps: int) -> dict[str, float]:
    """Microseconds a step by what the host does; all but the wait is work of its own.

    `launch` holds what is filled in and the call of the replay.
    """
    spent: dict[str, float] = defaultdict(float)
    places: dict[str, tuple[Any, str]] = {
        "plan": (engine.scheduler, "plan"),
        "launch": (engine.runner, "launch"),
        "wait for the result": (Underway, "collect"),
        "commit": (engine.scheduler, "commit"),
    }
    with ExitStack() as stack:
        for what, (owner, name) in places.items():
            stack.enter_context(watched(owner, name, what, spent))
        start = perf_counter()
        for _ in range(steps):
            engine.step()
        spent["step"] = perf_counter() - start
    spent["the rest"] = spent["step"] - sum(spent[what] for what in places)
    spent["work of its own"] = spent["step"] - spent["wait for the result"]
    return {what: seconds / steps * 1e6 for what, seconds in spent.items()}


@contextmanager
def watched(owner: Any, name: str, what: str, spent: dict[str, float]) -> Iterator[None]:
    """Within it, the time of calls of `owner.name` is added to `spent[what]`."""
    own, call = vars(owner).get(name), getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[what] += perf_counter() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def replay_call_us(graph: torch.cuda.CUDAGraph, count: int = 30) -> float:
    """Host time of the call that starts a replay, the device being idle."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = perf_counter()
        graph.replay()
        times.append(perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6
