"""Speculation against plain decoding of the same weights, in one process, on the same prompts.

The two take turns prompt by prompt and swap the order every round, so that a machine that drifts
drifts for both; rates are medians over turns, the speed-up is the median of the ratios of paired
turns. Plain decoding is this engine at its fastest: algorithm NONE, one node a pass, no drafter.
The record is a plain dict that ends in provenance; `table.py` renders it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from eyas.config import SamplingParams, SpeculationConfig, require
from eyas.engine.engine import LLM, Engine
from eyas.fingerprint import fingerprint
from eyas.report.acceptance import summarise
from eyas.report.answering import Answering, staged
from eyas.report.options import BenchConfig, ExplainConfig
from eyas.report.prompts import PROMPTS, load_prompts
from eyas.report.records import stamped

WARMUP_TOKENS = 32
WARMUP_RUNS = (3, 8)
"""Fewest and most warm-up runs of an engine."""
STABLE = 0.05
"""Warm-up ends once the last three rates lie within this share of each other."""

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One group of prompts answered by both sides, one right after the other."""

    plain: Answering
    spec: Answering

    def ratio(self, rate: Callable[[Answering], float | None]) -> float | None:
        """Speculation's rate over plain decoding's; None where one of them has none."""
        plain, spec = rate(self.plain), rate(self.spec)
        return spec / plain if plain and spec else None


def bench(
    llm: LLM, texts: Sequence[str], config: BenchConfig, params: SamplingParams, progress: bool
) -> dict[str, Any]:
    """Measure `llm` against plain decoding on prompts `texts`; returns the record.

    `llm` must speculate. Raises `ConfigError` if it does not and `RequestError` for a prompt that
    cannot be served, before anything runs.
    """
    engine = llm.engine
    spec = engine.speculation
    require(
        spec.algorithm != "NONE",
        "bench without speculation",
        "it compares speculation with plain decoding",
        "give --drafter with a drafter of this target, or --speculative-algorithm NGRAM",
    )
    require(
        config.batch_size <= engine.config.max_running_requests,
        f"batch_size={config.batch_size}",
        f"at most max_running_requests={engine.config.max_running_requests} run together",
        "raise max_running_requests",
    )
    prompts = encode(llm, texts, not config.raw)
    seeds = [(params.seed or 0) + i for i in range(len(prompts))]
    each = [dataclasses.replace(params, seed=seed) for seed in seeds]
    plain = llm.sibling(SpeculationConfig(algorithm="NONE")).engine
    record = measure(plain, engine, prompts, each, config, progress)
    if config.compare_noise and params.temperature > 0:
        quiet = llm.sibling(dataclasses.replace(spec, shared_noise=False)).engine
        record["drafts_without_noise"] = _acceptance(quiet, prompts, each, config.batch_size)
    record["flags"] = {
        "bench": dataclasses.asdict(config),
        "sampling": dataclasses.asdict(params),
        "speculation": dataclasses.asdict(spec),
        "engine": dataclasses.asdict(engine.config),
    }
    dtype = str(llm.target.embed.weight.dtype).removeprefix("torch.")
    record["simulated"] = engine.config.simulated
    record["row_check"] = engine.runner.row_check.record()
    record["seeds"] = seeds
    record["provenance"] = fingerprint() | {"device": str(engine.runner.device), "dtype": dtype}
    dependent = [str(one) for one in engine.runner.row_check.dependent]
    record["provenance"]["rows depend on each other in"] = dependent
    record["provenance"]["ranks"] = llm.ranks.record() if llm.ranks else None
    return stamped("bench", record)


def select(config: BenchConfig | ExplainConfig) -> list[str]:
    """The prompts a config names."""
    texts = load_prompts(config.prompts) if config.prompts else [text for _, text in PROMPTS]
    return texts[: config.num_prompts or None]


def encode(llm: LLM, texts: Sequence[str], chat_template: bool) -> list[list[int]]:
    """Token ids of prompts, as the only turn of a conversation or as they are."""
    if not chat_template:
        return [llm.tokenizer.encode(text) for text in texts]
    return [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in texts]


def measure(
    plain: Engine,
    spec: Engine,
    prompts: Tokens,
    params: Sequence[SamplingParams],
    config: BenchConfig,
    progress: bool = False,
) -> dict[str, Any]:
    """The measured part of the record, of two engines over the same weights."""
    for engine in (plain, spec):
        for prompt, one in zip(prompts, params, strict=True):
            engine.check(prompt, one)
    groups = _groups(prompts, params, config.batch_size)
    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("warming up", total=None)
        warmup = {"plain": warm_up(plain, groups[0]), "spec": warm_up(spec, groups[0])}
        total = len(groups) * config.rounds + min(len(groups), config.stage_prompts)
        bar.update(task, description="measuring", total=total, completed=0)
        pairs = []
        for turn in range(config.rounds):
            for i, group in enumerate(groups):
                pairs.append(_pair(plain, spec, group, spec_first=(turn + i) % 2 == 1))
                bar.advance(task)
        stage_pairs = []
        with staged(plain), staged(spec):
            for i, group in enumerate(groups[: config.stage_prompts]):
                stage_pairs.append(_pair(plain, spec, group, spec_first=i % 2 == 1))
                bar.advance(task)
    return _record(pairs, stage_pairs, warmup, spec.speculation)


def warm_up(engine: Engine, group: tuple[Tokens, Sequence[SamplingParams]]) -> dict[str, Any]:
    """Answer `group` in short runs until three rates agree within 5 %, or eight have been tried."""
    prompts, params = group
    short = [
        dataclasses.replace(one, max_tokens=min(one.max_tokens, WARMUP_TOKENS)) for one in params
    ]
    fewest, most = WARMUP_RUNS
    rates: list[float] = []
    stable = False
    while not stable and len(rates) < most:
        run = Answering(engine, prompts, short).run()
        rates.append(run.decode_rate() or run.end_to_end_rate())
        last = rates[-fewest:]
        stable = len(rates) >= fewest and max(last) <= (1 + STABLE) * min(last)
    return {"runs": len(rates), "stable": stable, "tok_per_s": rates}


def _groups(
    prompts: Tokens, params: Sequence[SamplingParams], size: int
) -> list[tuple[Tokens, Sequence[SamplingParams]]]:
    starts = range(0, len(prompts), size)
    return [(prompts[i : i + size], params[i : i + size]) for i in starts]


def _pair(
    plain: Engine,
    spec: Engine,
    group: tuple[Tokens, Sequence[SamplingParams]],
    spec_first: bool,
) -> Pair:
    prompts, params = group
    if spec_first:
        second = Answering(spec, prompts, params).run()
        return Pair(plain=Answering(plain, prompts, params).run(), spec=second)
    first = Answering(plain, prompts, params).run()
    return Pair(plain=first, spec=Answering(spec, prompts, params).run())


def _acceptance(
    engine: Engine, prompts: Tokens, params: Sequence[SamplingParams], size: int
) -> dict[str, Any]:
    lengths: list[int] = []
    for group, one in _groups(prompts, params, size):
        lengths += Answering(engine, group, one).run().accept_lengths()
    return summarise(lengths, engine.speculation.depth)


def _record(
    pairs: Sequence[Pair],
    stage_pairs: Sequence[Pair],
    warmup: dict[str, Any],
    speculation: SpeculationConfig,
) -> dict[str, Any]:
    plain, spec = _side([p.plain for p in pairs]), _side([p.spec for p in pairs])
    lengths = [length for p in pairs for length in p.spec.accept_lengths()]
    accepted = summarise(lengths, speculation.depth)
    histogram = accepted.pop("histogram")
    stages = {
        "plain": _stages([p.plain for p in stage_pairs]),
        "spec": _stages([p.spec for p in stage_pairs]),
    }
    differing = [i for i, p in enumerate(pairs) if _tokens(p.plain) != _tokens(p.spec)]
    return {
        "plain": plain,
        "spec": spec | accepted,
        "speedup": _median(p.ratio(Answering.decode_rate) for p in pairs),
        "speedup_end_to_end": _median(p.ratio(Answering.end_to_end_rate) for p in pairs),
        "break_even": _over(spec["step_ms"], plain["step_ms"]),
        "verify_over_decode": _over(stages["spec"].get("verify"), stages["plain"].get("verify")),
        "stages_ms": stages,
        "histogram": histogram,
        "tokens_equal": not differing,
        "differing_pairs": differing,
        "num_pairs": len(pairs),
        "num_nodes": speculation.num_nodes,
        "warmup": warmup,
    }


def _side(runs: Sequence[Answering]) -> dict[str, Any]:
    """Medians over the turns of one side."""
    firsts = [s for run in runs for s in run.first_token_seconds if s is not None]
    return {
        "tok_per_s": _median(run.decode_rate() for run in runs),
        "end_to_end_tok_per_s": _median(run.end_to_end_rate() for run in runs),
        "first_token_ms": None if not firsts else median(firsts) * 1e3,
        "step_ms": _median(s.seconds * 1e3 for run in runs for s in run.steps if s.decoding),
        "tokens": sum(run.num_tokens for run in runs),
    }


def _stages(runs: Sequence[Answering]) -> dict[str, float]:
    """Median milliseconds of each stage over all measured cycles."""
    spans: dict[str, list[float]] = {}
    for run in runs:
        for step in run.steps:
            for name, value in step.stages_ms.items() if step.decoding else ():
                spans.setdefault(name, []).append(value)
    return {name: median(values) for name, values in spans.items()}


def _tokens(run: Answering) -> list[list[int]]:
    return [request.output for request in run.requests]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None
