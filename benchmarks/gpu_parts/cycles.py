"""Plain steps, verify passes and whole cycles of a shape with random weights.

Greedy, prompts of 512 random tokens; drafts of random networks are hardly ever accepted, so times
are those of cycles. Ratios are between figures of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from eyas.cost import target_pass, touched_in_pass
from eyas.engine.engine import Engine
from eyas.engine.graphs import GraphKey, Reason
from eyas.gpu_state import state_under
from eyas.layers.moe import Router
from eyas.model_config import ModelConfig
from eyas.operations import Work
from eyas.setting import Setting
from gpu_parts.builds import CHANGES, SPECS, Builds
from gpu_parts.goals import READ_BANDWIDTH, Row, row
from gpu_parts.record import NO_TIME, Record
from gpu_parts.timing import (
    PROMPT,
    graph_of,
    kept_state,
    pass_ms,
    profiled,
    replay_ms,
    running,
    step_ms,
    verify_pass,
)

NODES = (1, 4, 8, 16)
DEFAULT_REQUESTS = 8
STEPS = 40
BATCH_STEPS = 20
MOST_REQUESTS = 128
SIZES = (1, 2, 4, 8, 16, 32, 64, MOST_REQUESTS)
LATER_SECONDS = 12.0
"""What a batch size may take at most, about."""


def build(shape: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Draw the weights."""
    builds.llm(shape)
    yield row(f"{shape} build, weights drawn", builds.build_seconds, "s")


def cycles(
    shape: str, run: str, batches: tuple[int, ...], builds: Builds, record: Record
) -> Iterator[Row]:
    """Steps of one run at several batch sizes; its graph alone, and the gap between the two."""
    config = builds.config(max(batches), **CHANGES.get(run, {}))
    engine = builds.engine(shape, SPECS[run], config)
    yield from graph_rows(f"{shape} {run}, up to {max(batches)}", engine)
    before = eager_cycles(engine)
    for batch in batches:
        label = f"{shape} {run} B={batch}"
        with running(engine, batch):
            yield from _step_rows(label, shape, run, batch, engine, record)
            yield from _graph_rows(label, engine, batch, record, batch == min(batches))
    eager = eager_cycles(engine) - before
    yield row(f"{shape} {run} eager cycles", eager, "")
    if eager:
        reasons = [k.value for k in engine.runner.graphs.counts if isinstance(k, Reason)]
        record.details[f"{shape} {run} eager cycles"] = "; ".join(reasons)


def _step_rows(
    label: str, shape: str, run: str, batch: int, engine: Engine, record: Record
) -> Iterator[Row]:
    value = step_ms(engine, STEPS)
    yield row(label, value)
    yield from clock_rows(label, engine)
    if run != "decode" and (decode := record.value(f"{shape} decode B={batch}")):
        yield row(f"{label} / decode", value / decode, "x")
    if run == "decode" and batch == 1:
        config = engine.runner.parts.target.config
        count = pass_bytes(config, 1, PROMPT)
        share = 100 * count / READ_BANDWIDTH / (value / 1e3)
        yield row(f"{label} share of the read bandwidth", share, "%")


def _graph_rows(
    label: str, engine: Engine, batch: int, record: Record, with_kernels: bool
) -> Iterator[Row]:
    graph = graph_of(engine, batch)
    if graph is None:
        return
    with kept_state(engine):
        device = replay_ms(graph.graph)
        yield row(f"{label} graph alone", device)
        step = record.value(label) or device
        yield row(f"{label} host gap", max(0.0, 100 * (step - device) / step), "%")
        if with_kernels:
            seen = profiled(graph.graph.replay, engine.runner.device)
            layers = engine.runner.parts.target.config.num_layers
            yield row(f"{label} launches", seen.launches(), "")
            yield row(f"{label} launches a layer", seen.launches() / layers, "")
            record.details[label] = seen.table()


def graph_rows(label: str, engine: Engine) -> Iterator[Row]:
    """What an engine's captures took, and its trial of rows at the start."""
    graphs, tried = engine.runner.graphs, engine.runner.row_check
    yield row(f"{label}: trial of rows", tried.seconds, "s")
    yield row(f"{label}: products whose rows depend on each other", len(tried.dependent), "")
    yield row(f"{label}: capture", graphs.capture_seconds, "s")
    yield row(f"{label}: graph memory", graphs.capture_bytes / 2**20, "MiB")


def clock_rows(label: str, engine: Engine) -> Iterator[Row]:
    """The GPU's clock and power while the engine goes on; a full one holds the other back."""
    state = state_under(engine.step, engine.runner.device)
    if state is not None:
        yield row(f"{label} clock", state.clock_mhz, "MHz")
        yield row(f"{label} power", state.power_w, "W")


def eager_cycles(engine: Engine) -> int:
    """Cycles so far that no graph ran."""
    counts = engine.runner.graphs.counts
    return sum(n for key, n in counts.items() if not isinstance(key, GraphKey))


def verify(shape: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Verify passes over decode; with routed experts, beside the ratio of bytes they touch."""
    engine = builds.engine(shape, SPECS["decode"], builds.config(1))
    config = builds.target(shape)
    times: dict[int, float] = {}
    sizes: dict[int, float] = {}
    with running(engine, 1) as requests:
        for nodes in NODES:
            run = verify_pass(engine, [requests[0].slot], nodes)
            times[nodes] = pass_ms(run, engine.runner.device)
            yield row(f"{shape} verify({nodes})", times[nodes])
            if nodes > 1:
                yield row(f"{shape} verify({nodes})/(1)", times[nodes] / times[1], "x")
            if config.moe is None:
                continue
            experts = touched_experts(engine.runner.parts.target, run)
            yield row(f"{shape} experts a layer in verify({nodes})", experts, "")
            sizes[nodes] = pass_bytes(config, nodes, PROMPT, experts)
            if nodes > 1:
                bytes_over = sizes[nodes] / sizes[1]
                yield row(f"{shape} bytes of verify({nodes})/(1)", bytes_over, "x")
                over = times[nodes] / times[1] / bytes_over
                yield row(f"{shape} verify({nodes})/(1) over that of bytes", over, "x")


def touched_experts(target: torch.nn.Module, run: Callable[[], object]) -> float:
    """Distinct experts a sparse layer in one eager `run` of the target, on average."""
    found: list[torch.Tensor] = []
    routers = [module for module in target.modules() if isinstance(module, Router)]
    hooks = [
        router.register_forward_hook(lambda _, __, out: found.append(out[0].unique()))
        for router in routers
    ]
    try:
        with torch.inference_mode():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(found) == len(routers) > 0, "every sparse layer chooses once in a pass"
    return sum(map(len, found)) / len(found)


def pass_bytes(
    config: ModelConfig, nodes: int, context: int, experts: float | None = None
) -> float:
    """Bytes that a target's pass of one request moves in 16 bits, `experts` touched a layer.

    Without `experts`, as many as even routing would touch.
    """
    total = 0.0
    for op in target_pass(config, Setting(context=context), nodes):
        weights = op.weights
        if op.work is Work.EXPERTS and experts is not None and config.moe is not None:
            weights *= experts / touched_in_pass(config.moe, 1, nodes, 0.0)
        total += op.times * (weights + op.kv + op.moved)
    return total


def batches(
    shape: str, run: str, sizes: tuple[int, ...], builds: Builds, record: Record
) -> Iterator[Row]:
    """Steps over all batch sizes not timed yet, and one request more than was captured."""
    most = max(sizes)
    config = builds.config(most + 1, cuda_graph_max_bs=most, context_length=1024)
    engine = builds.engine(shape, SPECS[run], config)
    yield from graph_rows(f"{shape} {run}, up to {most}", engine)
    before = eager_cycles(engine)
    for batch in sizes:
        label = f"{shape} {run} B={batch}"
        if record.value(label) is None:
            yield from _batch_row(label, engine, batch, record)
    yield row(f"{shape} {run} up to B={most} eager cycles", eager_cycles(engine) - before, "")
    more = f"{shape} {run} B={most + 1}, {most} captured"
    yield from _batch_row(more, engine, most + 1, record)
    largest, beyond = record.value(f"{shape} {run} B={most}"), record.value(more)
    if largest and beyond:
        yield row(f"{more} / B={most}", beyond / largest, "x")


def _batch_row(label: str, engine: Engine, batch: int, record: Record) -> Iterator[Row]:
    if not record.clock.fits(LATER_SECONDS):
        record.skip(label, NO_TIME)
        return
    with running(engine, batch):
        yield row(label, step_ms(engine, BATCH_STEPS))
        yield from clock_rows(label, engine)


def default_graphs(shape: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Capture what an engine captures by default, with kernels compiled by a first time."""
    config = builds.config(DEFAULT_REQUESTS)
    for label in (f"{shape} default graphs, and their kernels", f"{shape} default graphs"):
        builds.drop_engines()
        graphs = builds.engine(shape, SPECS["K=3"], config).runner.graphs
        yield row(label, graphs.capture_seconds, "s")
    yield row(f"{shape} default graph memory", graphs.capture_bytes / 2**20, "MiB")
