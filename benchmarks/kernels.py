"""Times our small kernels in CUDA graphs, at the shapes of real models, against what they move.

A figure is a launch among others of its kind in one graph, the median of repeats; so it holds what
a launch costs. Bytes are those that have to move, held against the H200's measured read bandwidth.
`torch` is the same in torch's operators. Weights of experts are read from several layers in turn,
so that no cache holds them.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --only experts --sweep
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from eyas.fingerprint import fingerprint
from eyas.kernels import (
    accept,
    begin,
    draw,
    experts,
    experts_triton,
    gated,
    grow,
    lang,
    norm,
    route,
    router,
    rows,
    skinny,
    terms,
    tree,
)
from eyas.model_config import MoEConfig
from eyas.sampling import SamplingRows

BANDWIDTH = 4.39e12
"""Bytes a second one H200 reads."""
DEVICE = torch.device("cuda")
ROWS = (1, 4, 8, 16)
DENSE = {"llama-3.1-8b": (4096, 14336, 128256), "smollm2-135m": (576, 1536, 49152)}
"""Hidden size, intermediate size, vocabulary."""
ROUTED = {
    "deepseek-v2-lite": MoEConfig(
        num_experts=64,
        top_k=6,
        intermediate_size=1408,
        shared_size=2816,
        normalize=False,
        float32_router=True,
    ),
    "qwen3-30b-a3b": MoEConfig(num_experts=128, top_k=8, intermediate_size=768),
}
HIDDEN = 2048
"""Of both routed models."""
DRAFT_VOCAB = 32000
LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel at a shape: `run(i)` launches it on the i-th of several inputs."""

    name: str
    run: Callable[[int], object]
    moved: float
    torch: Callable[[int], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    floor: float
    of_bandwidth: float
    torch: float | None


def micros(run: Callable[[int], object], calls: int = 16, repeats: int = 5) -> float:
    """Microseconds a call, in a graph of `calls`."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for i in range(2):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                run(i)
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 4 / calls * 1e3)
    return statistics.median(times)


def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(*size, device=DEVICE).to(dtype)


def integers(most: int, *size: int) -> torch.Tensor:
    """Random int64 below `most`."""
    return torch.randint(0, most, size, device=DEVICE)


def norms(name: str, count: int) -> Iterator[Case]:
    """Norms and the gate of a dense model's layer, and its drafter's first layer."""
    hidden, inner, _ = DENSE[name]
    x, delta, w, wide = randn(count, hidden), randn(count, hidden), randn(hidden), None
    wide = randn(count, 2 * inner)
    yield Case(
        name="add_rms_norm",
        run=lambda _: norm.add_rms_norm(x, delta, w, 1e-5),
        torch=lambda _: norm.add_rms_norm_reference(x, delta, w, 1e-5),
        moved=norm.cost(count, hidden, 2, 2, 2)[1],
    )
    yield Case(
        name="rms_norm_pair",
        run=lambda _: norm.rms_norm_pair(x, delta, w, w, 1e-5),
        torch=lambda _: norm.rms_norm_pair_reference(x, delta, w, w, 1e-5),
        moved=2 * norm.cost(count, hidden, 2, 1, 1)[1],
    )
    yield Case(
        name="gated",
        run=lambda _: gated.gated(wide),
        torch=lambda _: gated.gated_reference(wide),
        moved=gated.cost(count, inner, 2)[1],
    )


def draws(name: str, count: int) -> Iterator[Case]:
    """Draws over the vocabulary and candidates over a draft vocabulary."""
    vocab = DENSE[name][2]
    logits, few, index = randn(count, vocab), randn(count, DRAFT_VOCAB), integers(99, count)
    ids = torch.arange(DRAFT_VOCAB, device=DEVICE)
    given = SamplingRows(
        temperature=torch.full((count,), 0.8, device=DEVICE),
        top_k=integers(1, count),
        top_p=torch.ones(count, device=DEVICE),
        min_p=torch.zeros(count, device=DEVICE),
        seed=integers(2**40, count),
    )
    for kind, sampled in (("greedy", False), ("sampled", True)):
        yield Case(
            name=f"draw {kind}",
            run=lambda _, s=sampled: draw.draw(logits, given, index, 1, sampled=s, filtered=False),
            moved=draw.cost(count, vocab, 2, 1, sampled)[1],
        )
    slots, states = torch.arange(count, device=DEVICE), randn(count, HIDDEN)
    for topk in (1, 4, 8):
        scored = draw.Scored(few, ids, topk, given, index, 1, sampled=False, noise=False)
        kept = draw.Kept(
            randn(count, HIDDEN), integers(9, count, topk), randn(count, topk, dtype=torch.float32)
        )
        yield Case(
            name=f"keep best topk {topk}",
            run=lambda _, s=scored, k=kept: draw.keep_best(s, slots, k, states),
            torch=lambda _, s=scored, k=kept: draw.keep_best_reference(s, slots, k, states),
            moved=draw.cost(count, DRAFT_VOCAB, 2, topk, False)[1] + 4 * count * HIDDEN,
        )


def moe(name: str, count: int) -> Iterator[Case]:
    """A routed layer, with random choices that differ from layer to layer."""
    config = ROUTED[name]
    every, top_k, size = config.num_experts, config.top_k, config.intermediate_size
    weights = [
        (randn(every, 2 * size, HIDDEN) * 0.02, randn(every, HIDDEN, size) * 0.02)
        for _ in range(LAYERS)
    ]
    x, more = randn(count, HIDDEN), config.shared_size
    shared = experts_triton.Shared(randn(2 * more, HIDDEN) * 0.02, randn(HIDDEN, more) * 0.02)
    logits = [randn(count, every) for _ in range(LAYERS)]
    chosen = [route.route_reference(one, config) for one in logits]
    touched = statistics.fmean(len(ids.unique()) for ids, _ in chosen)

    def run(way: Callable[..., torch.Tensor]) -> Callable[[int], torch.Tensor]:
        return lambda i: way(x, *chosen[i % LAYERS], *weights[i % LAYERS])

    def ours(*given: torch.Tensor) -> torch.Tensor:
        return terms.summed(experts_triton.experts_triton(*given, shared=shared if more else None))

    yield Case(
        name=f"experts ({touched:.1f} touched)",
        run=run(ours),
        torch=run(experts.experts_grouped),
        moved=experts_triton.cost(count, top_k, touched, HIDDEN, size, more)[1],
    )
    yield Case(
        name="route",
        run=lambda i: route.route(logits[i % LAYERS], config),
        torch=lambda i: route.route_reference(logits[i % LAYERS], config),
        moved=route.cost(count, config, 2)[1],
    )
    kind = torch.float32 if config.float32_router else torch.bfloat16
    gates = [randn(every, HIDDEN, dtype=kind) * 0.02 for _ in range(LAYERS)]
    counters = [skinny.Counters() for _ in range(LAYERS)]
    yield Case(
        name="router, lists included",
        run=lambda i: router.router(x, gates[i % LAYERS], config, None, counters[i % LAYERS]),
        torch=lambda i: router.router_reference(x, gates[i % LAYERS], config),
        moved=router.cost(count, config, HIDDEN, kind.itemsize)[1],
    )


def bookkeeping(count: int) -> Iterator[Case]:
    """What a cycle of `count` requests does between its passes."""
    slots, table = torch.arange(count, device=DEVICE), integers(99, 64, 128)
    hidden, lens = randn(64, 4096), integers(999, 64)
    yield Case(
        name="take_rows",
        run=lambda _: rows.take_rows(slots, lens, lens, table, hidden),
        torch=lambda _: rows.take_rows_reference(slots, lens, lens, table, hidden),
        moved=rows.cost(count, 16 + 8 * 128 + 2 * 4096)[1],
    )
    history = integers(9, 64, 4096)
    state = accept.Slots(slots, lens[:count], lens.clone(), lens.clone(), history)
    for topk, steps, nodes in ((1, 3, 4), (4, 5, 16), (8, 6, 60)):
        label, drawn = f"{steps}-{topk}-{nodes}", integers(2, count, nodes)
        parents = None if topk == 1 else torch.zeros_like(drawn)
        given = (integers(2, count, nodes), parents, drawn, steps, state)
        yield Case(
            name=f"settle {label}",
            run=lambda _, g=given: accept.settle(*g),
            torch=lambda _, g=given: accept.settle_reference(*g),
            moved=accept.cost(count, nodes, steps)[1],
        )
        if topk > 1:
            yield from growing(count, topk, steps, nodes)


def growing(count: int, topk: int, steps: int, nodes: int) -> Iterator[Case]:
    """A level of `count` trees behind its pass, and the choice of their nodes."""
    label, num_rows = f"{steps}-{topk}-{nodes}", count * topk
    slots, lens = torch.arange(count, device=DEVICE), integers(999, count)
    given = SamplingRows(
        temperature=torch.zeros(count, device=DEVICE),
        top_k=lens,
        top_p=torch.ones(count, device=DEVICE),
        min_p=torch.zeros(count, device=DEVICE),
        seed=lens,
    )
    kept = draw.Kept(
        randn(count, HIDDEN), integers(9, count, topk), -randn(count, topk).float().abs()
    )
    ids = torch.arange(DRAFT_VOCAB, device=DEVICE)
    scored = draw.Scored(randn(num_rows, DRAFT_VOCAB), ids, topk, given, lens, 1, False, False)
    frontier, pool = begin.begin_tree(slots, lens, kept, steps)
    states = randn(num_rows, HIDDEN)
    for step in range(1, steps):
        grow.advance_reference(scored, frontier, pool, lens, states, step)
    level = (scored, frontier, pool, lens, states, 1)
    yield Case(
        name=f"advance {label}",
        run=lambda _: grow.advance(*level),
        torch=lambda _: grow.advance_reference(*level),
        moved=draw.cost(num_rows, DRAFT_VOCAB, 2, topk, False)[1] + 4 * num_rows * HIDDEN,
    )
    whole = (lens, lens, pool, nodes, steps)
    yield Case(
        name=f"plant {label}",
        run=lambda _: tree.plant(*whole),
        torch=lambda _: tree.plant_reference(*whole),
        moved=tree.cost(count, pool.scores.shape[1], nodes)[1],
    )


def cases(only: str) -> Iterator[tuple[str, Case]]:
    """(Label, case) of everything whose label holds `only`."""
    for count in ROWS:
        groups = [(name, norms(name, count)) for name in DENSE]
        groups += [(name, draws(name, count)) for name in DENSE]
        groups += [(name, moe(name, count)) for name in ROUTED]
        groups += [("cycle", bookkeeping(count))] if count < ROWS[-1] else []
        for name, group in groups:
            for case in group:
                label = f"{case.name} {name} {'B' if name == 'cycle' else 'T'}={count}"
                if only in label:
                    yield label, case


def measure(label: str, case: Case) -> Row:
    """Time a case."""
    value, floor = micros(case.run), case.moved / BANDWIDTH * 1e6
    other = None if case.torch is None else micros(case.torch)
    return Row(
        name=label, value=value, unit="us", floor=floor, of_bandwidth=floor / value, torch=other
    )


def sweep(console: Console) -> None:
    """Times of the experts for other tiles of weights."""
    for outputs, depth, stages in itertools.product((16, 32, 64), (64, 128, 256), (3, 4, 5)):
        if outputs * depth * stages > 64 * 128 * 4:
            continue
        experts_triton.OUTPUTS, experts_triton.DEPTH = outputs, depth
        experts_triton.STAGES = stages
        line = []
        for name, count in itertools.product(ROUTED, (1, 4, 16)):
            case = next(iter(moe(name, count)))
            line.append(f"{100 * case.moved / BANDWIDTH * 1e6 / micros(case.run):.0f}%")
        console.print(f"outputs {outputs} depth {depth} stages {stages}: {' '.join(line)}")


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names to measure")
    parser.add_argument("--sweep", action="store_true", help="other tiles for the experts instead")
    parser.add_argument("--late", action="store_true", help="launch no kernel early")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    console = Console(width=110)
    lang.EARLY = not args.late
    if args.sweep:
        sweep(console)
        return
    with torch.inference_mode():
        measured = [measure(label, case) for label, case in cases(args.only)]
    table = Table("kernel", "us", "floor", "of bandwidth", "torch, us")
    for row in measured:
        other = "" if row.torch is None else f"{row.torch:.1f}"
        share = f"{100 * row.of_bandwidth:.0f} %"
        table.add_row(row.name, f"{row.value:.2f}", f"{row.floor:.2f}", share, other)
    console.print(table)
    if args.json:
        record = {
            "rows": [asdict(row) for row in measured],
            "flags": vars(args),
            "provenance": fingerprint(),
        }
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
