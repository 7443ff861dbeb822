"""Times decode, verify and whole cycles on a GPU, and holds them against goals, floors and peers.

Real model shapes with random weights (one-layer EAGLE-3 drafter, 32,000 draft tokens), greedy,
prompts of 512 random tokens, accept length 1: milliseconds a cycle are what is compared. A figure
is the median of repeats within one run. Peers are SGLang 0.5.15.post1 and vLLM 0.24.0, measured
alone on one H200 in the same setting (`docs/performance.md`).

    python benchmarks/gpu.py --shapes llama-3.1-8b --batches 1 8 32 --json gpu.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from eyas.batch import PassShape
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine import cycle as cycles
from eyas.engine.engine import LLM, Engine
from eyas.engine.graphs import GraphKey
from eyas.engine.request import Status
from eyas.fingerprint import fingerprint
from eyas.speculate.tree import chain_draft

PROMPT = 512
SPECS = {
    "decode": SpeculationConfig(algorithm="NONE"),
    "K=3": SpeculationConfig.chain(3),
    "K=7": SpeculationConfig.chain(7),
    "tree 5-4-16": SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
    "tree 6-8-60": SpeculationConfig(num_steps=6, eagle_topk=8, num_draft_tokens=60),
}
GOALS: dict[tuple[str, str, int], tuple[float | None, float | None, float | None]] = {
    ("llama-3.1-8b", "decode", 1): (4.30, 3.42, 4.78),
    ("llama-3.1-8b", "K=3", 1): (4.90, 3.9, 5.80),
    ("llama-3.1-8b", "K=7", 1): (5.50, None, 7.00),
    ("llama-3.1-8b", "tree 5-4-16", 1): (5.6, None, 9.2),
    ("llama-3.1-8b", "decode", 8): (None, None, 5.09),
    ("llama-3.1-8b", "K=3", 8): (6.17 * 0.9, None, 6.17),
    ("llama-3.1-8b", "K=7", 8): (7.47 * 0.9, None, 7.47),
    ("llama-3.1-8b", "decode", 32): (None, None, 5.72),
    ("llama-3.1-8b", "K=3", 32): (7.37 * 0.9, None, 7.37),
    ("llama-3.1-8b", "K=7", 32): (10.74 * 0.9, None, 10.74),
    ("smollm2-135m", "decode", 1): (0.80, None, 1.25),
    ("smollm2-135m", "K=3", 1): (1.10, None, 2.97),
    ("deepseek-v2-lite", "decode", 1): (2.2, 1.12, 3.19),
    ("deepseek-v2-lite", "K=3", 1): (4.2, 2.9, 6.63),
}
"""(shape, run, batch) -> (goal, floor, best peer), ms."""
OVER_DECODE = {("llama-3.1-8b", "K=3", 1): 1.13, ("llama-3.1-8b", "K=7", 1): 1.28}
"""(shape, run, batch) -> goal for the cycle over the same engine's decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str = "ms"
    goal: float | None = None
    floor: float | None = None
    peer: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met."""
        return None if self.goal is None else self.value <= self.goal


@contextmanager
def running(engine: Engine, batch: int, prompt: int = PROMPT) -> Iterator[None]:
    """`batch` requests past their prompts, in steady decoding."""
    vocab = engine.runner.parts.target.config.vocab_size
    generator = torch.Generator().manual_seed(batch)
    requests = []
    for _ in range(batch):
        ids = torch.randint(0, vocab, (prompt,), generator=generator).tolist()
        room = engine.config.context_length - prompt
        requests.append(engine.add(ids, SamplingParams(max_tokens=room, ignore_eos=True)))
    while any(r.status is not Status.RUNNING or not r.output for r in requests):
        engine.step()
    for _ in range(5):
        engine.step()
    try:
        yield
    finally:
        for request in requests:
            engine.abort(request)
        torch.cuda.synchronize()


def step_ms(engine: Engine, steps: int, repeats: int = 3) -> float:
    """Wall time of an engine step, host included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
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


def launches(graph: torch.cuda.CUDAGraph) -> tuple[int, str]:
    """Kernels of a replay, and a table of the longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if "CUDA" in str(e.device_type)]
    totals: dict[str, list[float]] = {}
    for event in kernels:
        totals.setdefault(event.name[:70], []).append(event.device_time)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
    lines = [f"{sum(t):9.1f} us {len(t):5d} x {sum(t) / len(t):7.2f}  {n}" for n, t in ranked[:28]]
    return len(kernels), "\n".join(lines)


def verify_ms(engine: Engine, nodes: int) -> float:
    """One verify pass of one request over random drafts, logits included, in a graph.

    Equal drafts would be sent to the same experts.
    """
    parts = engine.runner.parts
    slots = torch.zeros(1, dtype=torch.int64, device=engine.runner.device)
    shape = PassShape(
        num_requests=1,
        num_new=nodes,
        max_kv_len=engine.config.context_length,
        sampled=False,
        filtered=False,
    )
    context = cycles._context(parts, slots, shape)
    vocab = parts.target.config.vocab_size
    drafts = torch.randint(0, vocab, (1, nodes - 1), device=slots.device)
    draft = chain_draft(context.roots, drafts)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        cycles._verify(parts, context, draft)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            cycles._verify(parts, context, draft)
    return replay_ms(graph)


def shape_rows(
    name: str, specs: list[str], batches: list[int], details: dict[str, str]
) -> list[Row]:
    """All figures of one shape."""
    most = max(batches)
    base = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_running_requests=most,
        context_length=2048,
        chunked_prefill_size=8192,
    )
    start = perf_counter()
    first = LLM(f"shape:{name}", speculation=SPECS["K=3"], config=base)
    rows = [Row(name=f"{name} build, weights drawn", value=perf_counter() - start, unit="s")]
    graphs = first.engine.runner.graphs
    rows.append(Row(name=f"{name} capture", value=graphs.capture_seconds, unit="s", goal=15.0))
    rows.append(Row(name=f"{name} graph memory", value=graphs.capture_bytes / 2**20, unit="MiB"))
    decode: dict[int, float] = {}
    for spec in specs:
        llm = first if spec == "K=3" else first.sibling(SPECS[spec], base)
        for batch in batches:
            with running(llm.engine, batch):
                value = step_ms(llm.engine, steps=40)
                if spec == "decode":
                    decode[batch] = value
                goal, floor, peer = GOALS.get((name, spec, batch), (None, None, None))
                label = f"{name} {spec} B={batch}"
                rows.append(Row(name=label, value=value, goal=goal, floor=floor, peer=peer))
                if batch in decode and spec != "decode":
                    over = OVER_DECODE.get((name, spec, batch))
                    ratio = value / decode[batch]
                    rows.append(Row(name=f"{label} / decode", value=ratio, unit="x", goal=over))
                key = GraphKey(batch, False, False)
                graph = llm.engine.runner.graphs.get(key).graph
                device = replay_ms(graph)
                gap = max(0.0, 100 * (value - device) / value)
                rows.append(Row(name=f"{label} host gap", value=gap, unit="%", goal=3.0))
                if batch == min(batches):
                    count, table = launches(graph)
                    rows.append(Row(name=f"{label} launches", value=count, unit=""))
                    details[label] = table
                if spec == "decode" and batch == 1:
                    rows += _verify_rows(name, llm.engine)
        eager = [k for k in llm.engine.runner.graphs.counts if not isinstance(k, GraphKey)]
        rows.append(Row(name=f"{name} {spec} eager reasons", value=len(eager), unit="", goal=0))
        if llm is not first:
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def _verify_rows(name: str, engine: Engine) -> list[Row]:
    one = verify_ms(engine, 1)
    rows = [Row(name=f"{name} verify(1)", value=one)]
    for nodes in (4, 8, 16):
        many = verify_ms(engine, nodes)
        rows.append(Row(name=f"{name} verify({nodes})", value=many))
        goal = 1.03 if (name, nodes) == ("llama-3.1-8b", 4) else None
        rows.append(Row(name=f"{name} verify({nodes})/(1)", value=many / one, unit="x", goal=goal))
    return rows


def show(console: Console, rows: list[Row]) -> None:
    """Figure, goal, floor, best peer."""
    table = Table("figure", "value", "goal", "floor", "best peer", "holds")
    for row in rows:
        cells = [row.goal, row.floor, row.peer]
        texts = ["" if c is None else f"{c:.2f}" for c in cells]
        mark = {None: "", True: "yes", False: "[red]no[/red]"}[row.holds]
        table.add_row(row.name, f"{row.value:.3f} {row.unit}", *texts, mark)
    console.print(table)


def main() -> None:
    """Run the shapes asked for, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "smollm2-135m"])
    parser.add_argument("--specs", nargs="+", default=list(SPECS)[:4], choices=list(SPECS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    console = Console(width=110)
    rows: list[Row] = []
    details: dict[str, str] = {}
    for name in args.shapes:
        rows += shape_rows(name, args.specs, args.batches, details)
        gc.collect()
        torch.cuda.empty_cache()
    show(console, rows)
    for label, table in details.items():
        console.print(f"[bold]{label}[/bold]\n{table}", highlight=False)
    if args.json:
        record: dict[str, Any] = {
            "rows": [asdict(row) | {"holds": row.holds} for row in rows],
            "kernels": details,
            "simulated": "random weights",
            "flags": vars(args),
            "provenance": fingerprint(),
        }
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
