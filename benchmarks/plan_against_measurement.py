"""Holds predictions of `eyas plan` against measurements on the same GPU.

The profile is that of `eyas calibrate`, so predictions rest on parts alone. Compared are plain
steps, verify passes, whole cycles, and launches: of a record of `benchmarks/gpu.py`, or measured
now over batches and contexts.

    eyas calibrate --device cuda --json profile.json
    python benchmarks/plan_against_measurement.py --measure --profile profile.json
    python benchmarks/plan_against_measurement.py gpu.json --profile profile.json
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_parts.builds import SPECS
from gpu_parts.timing import running, step_ms, verify_ms
from rich.console import Console
from rich.table import Table

from eyas.config import EngineConfig, SpeculationConfig
from eyas.cost import target_pass, touched
from eyas.engine.engine import LLM, Engine
from eyas.estimate import Scenario, estimate, predict
from eyas.fingerprint import fingerprint
from eyas.operations import Work
from eyas.report.options import PlanConfig
from eyas.report.scenarios import read_target, scenario_of

STEP = re.compile(
    r"(?P<shape>\S+) (?P<run>decode|K=\d+|tree [\d-]+) B=(?P<batch>\d+)( C=(?P<context>\d+))?"
)
VERIFY = re.compile(
    r"(?P<shape>\S+) verify\((?P<nodes>\d+)\)( B=(?P<batch>\d+))?( C=(?P<context>\d+))?"
)
EXPERTS = re.compile(r"(?P<shape>\S+) experts a layer in verify\((?P<nodes>\d+)\)")
Counted = dict[tuple[str, int], float]
"""Distinct experts of a layer that a request's nodes touched, of a shape and so many nodes."""
LAUNCHES = " launches"
MEDIAN, WORST = 0.10, 0.20
"""What errors may be."""
SHAPES = ("llama-3.1-8b", "smollm2-135m", "deepseek-v2-lite")
RUNS = ("decode", "K=3", "K=7")
NODES = (2, 4, 8, 16)
STEPS = 40
WARM = 5 + 3 * STEPS // 2
"""Steps after which half of those that are timed are done: where a request's context stands."""
ROOM = 1024
"""Positions behind a context; a model with fewer is measured at a shorter one."""


def measure(shapes: list[str], batches: list[int], contexts: list[int]) -> Iterator[dict[str, Any]]:
    """Rows as `benchmarks/gpu.py` writes them, with their context, as they are taken."""
    for shape in shapes:
        longest = read_target(f"shape:{shape}").max_position
        fitting = sorted({min(context, longest - ROOM) for context in contexts})
        config = EngineConfig(
            device="cuda",
            load_format="dummy",
            max_running_requests=max(batches),
            context_length=max(fitting) + ROOM,
            chunked_prefill_size=8192,
        )
        first = LLM(f"shape:{shape}", speculation=SPECS["K=3"], config=config)
        for run in RUNS:
            llm = first if run == "K=3" else first.sibling(SPECS[run], config)
            for batch in batches:
                for context in fitting:
                    yield from _measured(llm.engine, shape, run, batch, context)
            if llm is not first:
                del llm
                gc.collect()
                torch.cuda.empty_cache()
        del first
        gc.collect()
        torch.cuda.empty_cache()


def _measured(
    engine: Engine, shape: str, run: str, batch: int, context: int
) -> Iterator[dict[str, Any]]:
    where = f"B={batch} C={context}"
    with running(engine, batch, context) as requests:
        yield {"name": f"{shape} {run} {where}", "value": step_ms(engine, STEPS), "unit": "ms"}
        if run == "decode":
            for nodes in NODES:
                value = verify_ms(engine, [r.slot for r in requests], nodes)
                yield {"name": f"{shape} verify({nodes}) {where}", "value": value, "unit": "ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A measured figure and the predicted one."""

    name: str
    kind: str
    """decode, verify, cycle or launches."""
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured."""
        return self.predicted / self.measured - 1


def pairs(rows: list[dict[str, Any]], profile: str, context: int) -> Iterator[Pair]:
    """Every row that a prediction can stand beside.

    Distinct experts that were counted are what plans are told of a text, as accept lengths are.
    """
    counted: Counted = {}
    for row in rows:
        if found := EXPERTS.fullmatch(str(row["name"])):
            counted[found["shape"], int(found["nodes"])] = float(row["value"])
    for row in rows:
        name, value = str(row["name"]), float(row["value"])
        if row["unit"] == "ms" and (found := VERIFY.fullmatch(name)):
            nodes = int(found["nodes"])
            scenario = _told(_scenario(found, None, profile, context), found, nodes, counted)
            yield Pair(
                name=name, kind="verify", measured=value, predicted=_verify_ms(scenario, nodes)
            )
        bare = name.removesuffix(LAUNCHES)
        found = STEP.fullmatch(bare)
        if not found or row["unit"] not in ("ms", ""):
            continue
        spec = _speculation(found["run"])
        scenario = _scenario(found, spec, profile, context)
        predicted = predict(_told(scenario, found, spec.num_nodes, counted))
        if name != bare:
            whole = predicted.draft + predicted.verify + predicted.extend
            yield Pair(name=name, kind="launches", measured=value, predicted=whole.launches)
        elif row["unit"] == "ms":
            kind = "decode" if found["run"] == "decode" else "cycle"
            yield Pair(name=name, kind=kind, measured=value, predicted=predicted.cycle_ms)


def _scenario(
    found: re.Match[str], spec: SpeculationConfig | None, profile: str, context: int
) -> Scenario:
    config = PlanConfig(
        profile=profile,
        batch_size=int(found["batch"] or 1),
        context=int(found["context"] or context) + WARM,
        acceptance=(0.0,),
    )
    return scenario_of(f"shape:{found['shape']}", "usual", spec, config)


def _told(scenario: Scenario, found: re.Match[str], nodes: int, counted: Counted) -> Scenario:
    """The scenario with what nodes share of their experts, where that was counted."""
    moe, experts = scenario.target.moe, counted.get((found["shape"], nodes))
    if moe is None or experts is None or nodes == 1:
        return scenario
    apart = touched(moe, nodes) - moe.top_k
    overlap = min(1.0, max(0.0, 1 - (experts - moe.top_k) / apart))
    return scenario.change(expert_overlap=overlap)


def _speculation(run: str) -> SpeculationConfig:
    if run == "decode":
        return SpeculationConfig(algorithm="NONE")
    numbers = [int(n) for n in re.findall(r"\d+", run)]
    if len(numbers) == 1:
        return SpeculationConfig.chain(numbers[0])
    steps, topk, nodes = numbers
    return SpeculationConfig(num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes)


def _verify_ms(scenario: Scenario, nodes: int) -> float:
    """A target's pass with its logits, without draws."""
    ops = [
        op
        for op in target_pass(scenario.target, scenario.setting, nodes)
        if op.work is not Work.SAMPLE
    ]
    return estimate(ops, scenario.profile, scenario.software).us / 1e3


def summary(found: list[Pair]) -> list[dict[str, Any]]:
    """Median and worst size of the errors of each kind, and of all times together."""
    groups: dict[str, list[Pair]] = {}
    for pair in found:
        groups.setdefault(pair.kind, []).append(pair)
        if pair.kind != "launches":
            groups.setdefault("all times", []).append(pair)
    rows = []
    for kind, members in groups.items():
        sizes = [abs(pair.error) for pair in members]
        worst = max(members, key=lambda pair: abs(pair.error))
        median = statistics.median(sizes)
        holds = median <= MEDIAN and max(sizes) <= WORST
        rows.append(
            {
                "kind": kind,
                "count": len(members),
                "median": median,
                "worst": max(sizes),
                "worst_of": worst.name,
                "holds": holds,
            }
        )
    return rows


def show(console: Console, found: list[Pair], summed: list[dict[str, Any]]) -> None:
    """Each pair, then the errors."""
    table = Table("figure", "measured", "predicted", "error")
    for pair in found:
        digits = 0 if pair.kind == "launches" else 3
        numbers = [f"{value:.{digits}f}" for value in (pair.measured, pair.predicted)]
        table.add_row(pair.name, *numbers, f"{pair.error:+.1%}")
    console.print(table)
    errors = Table("kind", "figures", "median error", "worst", "of", "holds")
    for row in summed:
        shares = [f"{row[key]:.1%}" for key in ("median", "worst")]
        mark = "yes" if row["holds"] else "[red]no[/red]"
        errors.add_row(row["kind"], str(row["count"]), *shares, row["worst_of"], mark)
    console.print(errors)


def main() -> None:
    """Compare, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", nargs="?", help="the record of benchmarks/gpu.py")
    parser.add_argument("--measure", action="store_true", help="measure now instead")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 8192])
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--context", type=int, default=512, help="of rows that do not say theirs")
    parser.add_argument("--measured-json", default="", help="keep what --measure takes, at once")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.measure == bool(args.measured):
        parser.error("give a record of benchmarks/gpu.py, or --measure")
    if args.measure:
        record: dict[str, Any] = {"rows": [], "provenance": fingerprint()}
        for row in measure(args.shapes, args.batches, args.contexts):
            record["rows"].append(row)
            if args.measured_json:
                Path(args.measured_json).write_text(json.dumps(record, indent=1))
    else:
        record = json.loads(Path(args.measured).read_text())
    found = list(pairs(record["rows"], args.profile, args.context))
    if not found:
        parser.error(f"{args.measured}: no row that a prediction can stand beside")
    summed = summary(found)
    show(Console(width=110), found, summed)
    if args.json:
        result = {
            "schema": "eyas.plan-against-measurement",
            "version": 1,
            "rows": [asdict(pair) | {"error": pair.error} for pair in found],
            "summary": summed,
            "flags": vars(args),
            "measured_on": record.get("provenance"),
            "provenance": fingerprint(),
        }
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
