"""`eyas explain`: a real run taken apart, a cycle of speculation beside a plain decode step.

Each side runs until it is steady, then cycles are timed that nobody watches and, in turn with them
or in the same run, cycles that are watched (`explaining/`). What a cycle takes is what the
unwatched ones take; what its watched parts leave of that is unexplained, and said. The record has
the keys of `eyas trace`, so that pages draw it and `eyas diff` reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress

from eyas.config import SamplingParams, SpeculationConfig, require
from eyas.engine.engine import LLM
from eyas.fingerprint import fingerprint
from eyas.gpu_state import state_under
from eyas.report.acceptance import summarise
from eyas.report.bench import encode
from eyas.report.explaining.cells import cells, floors
from eyas.report.explaining.changes import Base, changes, predicted
from eyas.report.explaining.floors import Machine, counted, machine_of, setting_of
from eyas.report.explaining.lesson import lesson
from eyas.report.explaining.side import Side, take_apart
from eyas.report.explaining.steady import by_batch, by_context, figures, startup
from eyas.report.explaining.words import verdict
from eyas.report.explaining.workload import Group, Workload
from eyas.report.options import ExplainConfig
from eyas.report.records import stamped
from eyas.setting import Setting

BATCH_STEPS = 32
"""Cycles that a further batch size is measured for."""


def explain(
    llm: LLM, texts: Sequence[str], config: ExplainConfig, params: SamplingParams, progress: bool
) -> dict[str, Any]:
    """The record; raises `ConfigError` and `RequestError` before anything runs."""
    engine = llm.engine
    require(
        config.most_requests <= engine.config.max_running_requests,
        f"{config.most_requests} requests together",
        f"at most max_running_requests={engine.config.max_running_requests} run together",
        "raise max_running_requests",
    )
    prompts = encode(llm, texts, llm.tokenizer.has_template and not config.raw)
    each = [dataclasses.replace(params, seed=(params.seed or 0) + i) for i in range(len(prompts))]
    for prompt, one in zip(prompts, each, strict=True):
        engine.check(prompt, one)
    groups = groups_of(prompts, each, config.batch_size)
    dtype = llm.target.embed.weight.dtype
    machine = machine_of(config.profile, engine.runner.device, dtype)
    speculates = engine.speculation.algorithm != "NONE"
    with (
        TemporaryDirectory() as folder,
        Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
    ):
        task = bar.add_task("watching cycles", total=None)
        main = take_apart(engine, groups, config.cycles, folder)
        state = _gpu_state(main.workload)
        told = lesson(main.workload) if config.lesson else None
        more = _more_batches(llm, prompts, each, config)
        main.workload.close()
        plain = None
        if speculates:
            bar.update(task, description="watching plain decoding")
            sibling = llm.sibling(SpeculationConfig(algorithm="NONE")).engine
            plain = take_apart(sibling, groups, config.cycles, folder)
            plain.workload.close()
    record = _record(llm, machine, main, plain, config.batch_size)
    record |= {"lesson": told, "gpu_state": state}
    record["by_batch"] = by_batch([*main.workload.steps, *more])
    record |= {"flags": _flags(llm, config, params), "simulated": engine.config.simulated}
    record["provenance"] = _provenance(llm)
    record["mismatches"] = llm.ranks.record()["mismatches"] if llm.ranks else []
    return stamped("explain", record | {"verdict": verdict(record)})


def _flags(llm: LLM, config: ExplainConfig, params: SamplingParams) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "explain": config,
        "sampling": params,
        "speculation": llm.engine.speculation,
        "engine": llm.engine.config,
    }
    return {name: dataclasses.asdict(one) for name, one in parts.items()}


def _provenance(llm: LLM) -> dict[str, Any]:
    return fingerprint() | {
        "device": str(llm.engine.runner.device),
        "dtype": str(llm.target.embed.weight.dtype).removeprefix("torch."),
        "networks": llm.facts,
        "ranks": llm.ranks.record() if llm.ranks else None,
    }


def _gpu_state(workload: Workload) -> dict[str, Any] | None:
    """The GPU's clock while steps run that nobody watches."""
    device = workload.engine.runner.device
    state = state_under(lambda: workload.step(watched=True), device)
    workload.pause()
    return None if state is None else dataclasses.asdict(state)


def groups_of(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], size: int
) -> list[Group]:
    """Prompts in groups of `size`, all whole: the last is filled up from the first ones."""
    count = -(-len(prompts) // size) * size
    order = list(itertools.islice(itertools.cycle(range(len(prompts))), count))
    return [
        ([prompts[i] for i in order[k : k + size]], [params[i] for i in order[k : k + size]])
        for k in range(0, count, size)
    ]


def _more_batches(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    config: ExplainConfig,
) -> list[Any]:
    """Unwatched cycles of the other batch sizes."""
    found = []
    for size in config.by_batch:
        if size == config.batch_size:
            continue
        workload = Workload(llm.engine, groups_of(prompts, params, size))
        while len([s for s in workload.steps if s.requests == size]) < BATCH_STEPS:
            workload.step()
        workload.close()
        found += [s for s in workload.steps if s.requests == size]
    return found


def _record(
    llm: LLM, machine: Machine, main: Side, plain: Side | None, batch: int
) -> dict[str, Any]:
    """Everything that follows from the two sides."""
    spec = llm.engine.speculation
    acceptance = summarise(main.workload.accept_lengths(), spec.depth)
    length = acceptance["accept_length"]
    record: dict[str, Any] = {
        "kind": "speculative" if plain else "decode",
        **_side(llm, machine, main, batch, plain is None),
        "machine": machine.name,
        "accept_length": length,
        "acceptance": acceptance,
        "batch": batch,
        "nodes": spec.num_nodes,
        "layers": llm.target_config.num_layers,
        "by_context": by_context(main.steps, plain.steps if plain else []),
        **dict.fromkeys(("decode", "break_even", "rows")),
    }
    if plain is None:
        return record
    record["decode"] = _side(llm, machine, plain, batch, True)
    base = Base(
        cycle_ms=record["cycle_ms"],
        decode_ms=record["decode"]["cycle_ms"],
        accept_length=length,
        batch=batch,
    )
    record["break_even"] = base.cycle_ms / base.decode_ms
    chain = spec.num_steps if spec.eagle_topk == 1 else 0
    rows = changes(base, record, acceptance["acceptance_by_position"], chain)
    setting = _setting(llm, main, batch)
    rows += predicted(base, llm, setting, machine, acceptance["conditional_acceptance"])
    return record | {"rows": sorted(rows, key=lambda row: -row["gain"])}


def _side(llm: LLM, machine: Machine, side: Side, batch: int, single: bool) -> dict[str, Any]:
    """The parts of a cycle, or of a plain step, beside what they must take."""
    counts = counted(llm, _setting(llm, side, batch), machine, single)
    rows = cells(side.values["stages"], counts, side.launches)
    return side.values | {
        "cells": rows,
        "floors": floors(rows),
        "tok_per_s": figures(side.quiet)["tok_per_s"],
        "context": {"mean": side.context},
        "experts": side.experts,
        "startup": startup(side.steps, side.steady_from),
        "notes": list(side.notes),
    }


def _setting(llm: LLM, side: Side, batch: int) -> Setting:
    return setting_of(llm, batch, side.context, side.experts["mean"] if side.experts else None)
