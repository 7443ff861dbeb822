"""Two GPUs or more: a target's shape divided among ranks, its cycles in graphs with NCCL inside.

Figures are rank 0's. A collective's time holds the wait for the other ranks. Random weights are
drawn by every rank for itself, so texts are compared with one rank's on the small real model.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

import torch

from eyas.config import SpeculationConfig
from eyas.cost import require_shares
from eyas.distributed.group import SOLO
from eyas.engine.engine import LLM, Engine
from eyas.engine.ranks import Ranks
from eyas.errors import ConfigError
from eyas.report.scenarios import read_target
from gpu_parts.builds import SPECS, Builds, model_of, release
from gpu_parts.cycles import eager_cycles, graph_rows
from gpu_parts.goals import Row, row
from gpu_parts.real import RUN, answer, engine_of, source_of
from gpu_parts.record import Record
from gpu_parts.timing import profiled, running, step_ms

STEPS = 40
WATCHED = 10
"""Steps under the profiler."""
RUNS = {
    "decode": SPECS["decode"],
    "n-gram K=3": SpeculationConfig.chain(3, "NGRAM"),
    "K=3": SPECS["K=3"],
}
"""Drafts from the text cost next to nothing: their cycle is little more than a verify of 4."""
COLLECTIVES = {
    "all-reduces": r"nccl\w*Kernel\w*AllReduce",
    "all-gathers": r"nccl\w*Kernel\w*AllGather",
    "broadcasts": r"nccl\w*Kernel\w*Broadcast",
}
"""What is counted -> names of NCCL's kernels."""


def ranks(shape: str, size: int, builds: Builds, record: Record) -> Iterator[Row]:
    """Decode, verify and cycle of a shape with random weights."""
    label = f"{shape} tp={size}"
    try:
        require_shares(read_target(model_of(shape)), size)
        require_devices(size, builds)
    except ConfigError as error:
        record.skip(label, str(error))
        return
    builds.free()
    config = builds.config(1, tp=size)
    llm = LLM(model_of(shape), speculation=RUNS["K=3"], config=config)
    try:
        yield from graph_rows(f"{label} K=3, up to 1", llm.engine)
        for run, spec in RUNS.items():
            engine = llm.engine if run == "K=3" else llm.sibling(spec, config).engine
            yield from _rank_rows(label, run, engine, record)
            del engine
            release()
    finally:
        llm.close()


def _rank_rows(label: str, run: str, engine: Engine, record: Record) -> Iterator[Row]:
    name, before = f"{label} {run} B=1", eager_cycles(engine)
    with running(engine, 1):
        value = step_ms(engine, STEPS)
        yield row(name, value)
        decode = record.value(f"{label} decode B=1")
        if run != "decode" and decode:
            yield row(f"{name} / decode", value / decode, "x")
        yield from _collective_rows(name, run, engine, record)
        yield row(f"{name} ranks apart", len(set(engine.runner.digests())) - 1, "")
    yield row(f"{name} eager cycles", eager_cycles(engine) - before, "")


def _collective_rows(name: str, run: str, engine: Engine, record: Record) -> Iterator[Row]:
    """Collectives of a step, counted; decode's beside two a layer, and two around the layers."""

    def steps() -> None:
        for _ in range(WATCHED):
            engine.step()

    seen = profiled(steps, engine.runner.device)
    counts = {}
    for what, pattern in COLLECTIVES.items():
        times = seen.named(pattern)
        counts[what] = len(times) / WATCHED
        yield row(f"{name} {what} a step", counts[what], "")
        if times:
            yield row(f"{name} {what}, median", statistics.median(times), "us")
    if run == "decode":
        layers = engine.runner.parts.target.config.num_layers
        off = abs(counts["all-reduces"] + counts["all-gathers"] - 2 * layers - 2)
        yield row(f"{name} collectives off two a layer and two", off, "")
    record.details[f"{name}, {WATCHED} steps of rank 0"] = seen.table()


def require_devices(size: int, builds: Builds) -> None:
    """Raise `ConfigError` where there are fewer GPUs than ranks; prepare NCCL."""
    count = torch.cuda.device_count()
    if builds.device == "cuda" and count < size:
        raise ConfigError(f"tp={size}", f"this machine has {count} GPUs", "use a larger one")
    # where only some of the GPUs take part in NVLink multicast, NCCL fails over it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def same_texts(size: int, num_tokens: int, builds: Builds, record: Record) -> Iterator[Row]:
    """The small real model in float32: texts of `size` ranks against one rank's."""
    label = f"small-deepseek tp={size}"
    try:
        require_devices(size, builds)
    except ConfigError as error:
        record.skip(label, str(error))
        return
    builds.free()
    device = torch.device(builds.device)
    source = source_of("small-deepseek", torch.float32)
    alone = engine_of(source.load(device, SOLO), "decode", device)
    expected = answer(alone, num_tokens)[2]
    shared = Ranks(source, size, builds.device)
    try:
        for run in ("decode", RUN):
            engine = engine_of(shared.networks, run, device, shared)
            texts = answer(engine, num_tokens)[2]
            apart = sum(a != b for a, b in zip(texts, expected, strict=True))
            yield row(f"{label} {run}, texts that differ from one rank's", apart, "")
            yield row(f"{label} {run} ranks apart", len(set(engine.runner.digests())) - 1, "")
            del engine
    finally:
        shared.close()
