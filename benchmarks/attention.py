"""Time of paged attention per layer on a GPU, in a CUDA graph: decode, verify, trees, prefill.

    python benchmarks/attention.py [--models 8B V2-Lite] [--sweep] [--jobs 8] [--json FILE]

Rotation and the write of new keys are part of the time. Every call reads another layer, so that
keys come from memory and not from the cache. `GB/s` counts keys and values once, `ratio` is the
time over that of N = 1, or in a sweep over the engine's own plan. `floor` is what an H200 needs at
`FLOPS` or `BYTES`, whichever is longer. `--sweep` times other plans (tiles, warps, stages, splits,
programs, merges) at a few points instead, to choose the constants of
`eyas.kernels.attention_plan`. `--jobs` processes compile the kernels first, side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eyas.attention.rope import Rope
from eyas.batch import ForwardBatch, ForwardMode
from eyas.fingerprint import fingerprint
from eyas.kernels.attention_plan import (
    CAUSAL,
    MASKED,
    RANKS,
    SPARE_SLOTS,
    Plan,
    Workspace,
    make_plan,
    most_splits,
)
from eyas.kernels.kv_write import Layout, write_kv
from eyas.kernels.lang import shared_bytes
from eyas.kernels.node_orders import node_orders
from eyas.kernels.paged_attention import cost, paged_attention
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape

CONTEXTS, BATCHES, NODES = (1024, 8192, 32768, 131072), (1, 8, 32), (1, 4, 8, 16)
PAGE_SIZE = 16
WARM_CONTEXT = 256
"""Context at which kernels are compiled; those of other plans are right before they are timed."""
COLD_BYTES = 2**28
"""Keys of all layers together: several times the cache."""
GOAL = 1.15
"""Verify over decode, at most."""
FLOPS, BYTES = 700e12, 4.1e12
"""A second of an H200: what dense 16-bit products reach in a long kernel, and reads of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a model's attention."""

    heads: int
    shape: AttentionShape
    rope_dim: int


MODELS = {
    "8B": Model(heads=32, shape=AttentionShape.heads(1, 8, 128), rope_dim=128),
    "V2-Lite": Model(
        heads=16,
        shape=AttentionShape(
            num_layers=1, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, latent=True
        ),
        rope_dim=64,
    ),
    "V3": Model(
        heads=128,
        shape=AttentionShape(
            num_layers=1, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, latent=True
        ),
        rope_dim=64,
    ),
    "SmolLM2": Model(heads=9, shape=AttentionShape.heads(1, 3, 64), rope_dim=64),
}


class Bench:
    """A model's pool at one context and batch, and passes over it."""

    def __init__(self, model: Model, requests: int, context: int) -> None:
        self.model, self.requests, self.context = model, requests, context
        device, width = torch.device("cuda"), context + 4096
        each = -(-width // PAGE_SIZE)
        size = requests * each * PAGE_SIZE * model.shape.values_per_position * 2
        layers = min(32, max(2, -(-COLD_BYTES // size)))
        shape = replace(model.shape, num_layers=layers)
        self.layout = Layout(shape=shape, page_size=PAGE_SIZE)
        self.workspace = Workspace.of(shape, torch.bfloat16, device)
        self.pool = KVPool(
            shape,
            num_pages=requests * each + 1,
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            device=device,
        )
        self.pool.k.normal_()
        if not shape.latent:
            self.pool.v.normal_()
        self.table = (torch.randperm(requests * each, device=device) + 1).view(requests, each)

    def batch(self, num_new: int, tree: int) -> ForwardBatch:
        """A pass of `num_new` rows behind the context, a binary tree or a chain."""
        rows, device = self.requests * num_new, self.table.device
        ancestors = None
        if tree != CAUSAL:
            bits = [1]
            for n in range(1, num_new):
                bits.append(bits[(n - 1) // 2] | 1 << n)
            ancestors = torch.tensor(bits, device=device).repeat(self.requests)
        return ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            prefix_lens=torch.full((self.requests,), max(self.context - num_new, 0), device=device),
            page_table=self.table,
            num_new=num_new,
            max_kv_len=self.context,
            ancestors=ancestors,
        )

    def plan(self, num_new: int, tree: int) -> Plan:
        """What the engine would do."""
        heads = self.model.shape.num_kv_heads
        processors = torch.cuda.get_device_properties(self.table.device).multi_processor_count
        return make_plan(
            self.layout,
            self.pool.k.dtype,
            self.model.heads // heads,
            self.requests,
            num_new,
            tree,
            most_splits(self.layout.shape, self.model.heads // heads),
            2 * processors,
            self.workspace,
            self.context,
            shared_bytes(self.pool.k.device),
        )

    def rows(self, num_new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rope]:
        """Queries, keys, values and tables of a pass."""
        shape, count = self.layout.shape, self.requests * num_new
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        q = normal(count, self.model.heads, shape.key_dim).bfloat16()
        k = normal(count, shape.num_kv_heads, shape.key_dim).bfloat16()
        v = normal(count, shape.num_kv_heads, shape.value_dim).bfloat16()
        cos, sin = normal(count, 1, 2 * self.model.rope_dim).cos().chunk(2, -1)
        return q, k, v, (cos, sin)

    def layers(self, num_new: int, tree: int, plan: Plan) -> Callable[[], None]:
        """A pass over all layers."""
        batch = self.batch(num_new, tree)
        q, k, v, rope = self.rows(num_new)
        out = torch.empty(
            q.shape[0], q.shape[1] * self.layout.shape.value_dim, dtype=q.dtype, device="cuda"
        )
        order = node_orders(batch, PAGE_SIZE) if tree == RANKS else None

        def layers() -> None:
            for layer in range(self.layout.shape.num_layers):
                pooled = (self.pool.k[layer], self.pool.v[layer])
                if not plan.write:
                    write_kv(k, v, self.layout, *pooled, batch, rope)
                paged_attention(
                    q, (k, v), pooled, self.layout, batch, rope, plan, self.workspace, 0, order, out
                )

        return layers

    def time(self, num_new: int, tree: int, plan: Plan) -> float:
        """Microseconds per layer, median of replays."""
        return graph_time(self.layers(num_new, tree, plan)) / self.layout.shape.num_layers


def graph_time(run: Callable[[], None], replays: int = 7) -> float:
    """Microseconds of one replay of `run`, captured; the median."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One figure to take."""

    model: str
    requests: int
    context: int
    num_new: int
    tree: int = CAUSAL
    changes: tuple[tuple[str, Any], ...] = ()
    """Of the engine's plan."""


def standard(
    names: list[str],
    batches: Sequence[int] = BATCHES,
    chains_only: bool = False,
    contexts: Sequence[int] = CONTEXTS,
) -> Iterator[Work]:
    """Decode and verify over contexts and batches, then trees and prefill."""
    for name in names:
        for requests in batches:
            for context in contexts:
                for num_new in NODES:
                    yield Work(model=name, requests=requests, context=context, num_new=num_new)
                if context > 8192 or requests > 1 or chains_only:
                    continue
                for tree in (MASKED, RANKS):
                    yield Work(model=name, requests=1, context=context, num_new=16, tree=tree)
                chunk = min(context, 2048)
                yield Work(model=name, requests=1, context=context, num_new=chunk)


POINTS = {
    False: (*product((1,), (1024, 8192, 131072), (1, 8, 16)), (32, 2048, 4)),
    True: (*product((1,), (1024, 8192, 131072), (1, 4, 16)), (32, 2048, 1)),
}
"""(requests, context, nodes) of a sweep: not latent, latent."""
VARIANTS: dict[bool, tuple[dict[str, int], ...]] = {
    False: (
        {"merge": False},
        {"merge": True},
        {"num_stages": 3},
        {"tile": 64, "num_warps": 8, "num_stages": 5, "merge": False},
        {"tile": 64, "num_warps": 8, "num_stages": 3, "merge": False},
        {"tile": 64, "num_warps": 4, "num_stages": 3, "merge": False},
        {"tile": 64, "num_warps": 8, "num_stages": 3, "merge": False, "block": 128},
        {"programs": 264, "tile": 32, "num_warps": 4, "num_stages": 3, "merge": False},
        {"programs": 264, "tile": 32, "num_warps": 4, "num_stages": 5, "merge": True},
        {"splits": 48},
        {"splits": 48, "programs": 264},
        {
            "splits": 48,
            "programs": 264,
            "tile": 64,
            "num_warps": 4,
            "num_stages": 3,
            "merge": False,
        },
        {
            "splits": 48,
            "programs": 264,
            "tile": 32,
            "num_warps": 4,
            "num_stages": 3,
            "merge": False,
        },
    ),
    True: (
        {"num_warps": 4},
        {"num_stages": 2},
        {"tile": 32, "num_warps": 8},
        {"tile": 64, "num_warps": 8, "num_stages": 1},
        {"programs": 264},
        {"programs": 66},
        {"splits": 48},
        {"splits": 96},
        {"splits": 132},
        {"splits": 132, "programs": 264},
        {"splits": 192, "programs": 264},
    ),
}
"""What to try: not latent, latent. `programs` are those of a launch; two or more share a
multiprocessor where its registers (65,536) and shared memory (227 KiB) last."""


def sweep(names: list[str]) -> Iterator[Work]:
    """Other plans than the engine's, behind it."""
    for name in names:
        latent = MODELS[name].shape.latent
        for requests, context, num_new in POINTS[latent]:
            own = Work(model=name, requests=requests, context=context, num_new=num_new)
            yield own
            for changes in VARIANTS[latent]:
                yield replace(own, changes=tuple(changes.items()))


def changed(bench: Bench, work: Work) -> Plan:
    """The engine's plan with the changes of `work`; `ValueError` where it can't run."""
    plan, changes = bench.plan(work.num_new, work.tree), dict(work.changes)
    if not changes:
        return plan
    heads = bench.layout.shape.num_kv_heads
    rows = work.num_new * bench.model.heads // heads
    pairs = plan.requests_at_once * heads
    programs = changes.pop("programs", plan.parts * pairs * plan.tiles_at_once)
    tile = changes.get("tile", plan.tile)
    at_once = -(-plan.columns // tile)
    plan = replace(plan, **changes, num_tiles=-(-rows // tile), tiles_at_once=at_once)
    each = pairs * at_once
    plan = replace(plan, parts=max(1, min(plan.splits + 1, programs // each)))
    slots = (plan.splits + SPARE_SLOTS) * bench.layout.constants["SIZE_V"] * plan.tile
    if plan.parts > 1 and each * slots > bench.workspace.sums.numel():
        raise ValueError("its sums do not fit in the workspace")
    if plan.block > plan.least:
        raise ValueError("a block would hold two splits")
    return plan


def take(all_work: list[Work], console: Console) -> Iterator[dict[str, Any]]:
    """Figures in order; the first of a place, or of a sweep's point, is what ratios are over."""
    place, bench, base = None, None, 0.0
    swept = any(work.changes for work in all_work)
    for work in all_work:
        here = (work.model, work.requests, work.context, swept and work.num_new)
        if bench is None or here != place:
            bench = None  # frees its pool before the next is made
            bench = Bench(MODELS[work.model], work.requests, work.context)
            place, base = here, 0.0
        try:
            plan = changed(bench, work)
            time = bench.time(work.num_new, work.tree, plan)
        except Exception as error:  # a plan may not fit
            console.print(f"{work}: {type(error).__name__}: {error}"[:300])
            continue
        base = base or time
        yield row_of(bench, work, plan, time) | {"ratio": time / base}


def row_of(bench: Bench, work: Work, plan: Plan, time: float) -> dict[str, Any]:
    """One figure as a record."""
    flops, size = cost(bench.layout, bench.batch(work.num_new, work.tree), bench.model.heads, 2)
    return {
        "model": work.model,
        "batch": work.requests,
        "context": work.context,
        "nodes": work.num_new,
        "tree": ("causal", "masked", "ranks")[work.tree],
        "us": time,
        "gb_per_s": size / time / 1e3,
        "tflop_per_s": flops / time / 1e6,
        "floor_us": max(flops / FLOPS, size / BYTES) * 1e6,
        "plan": {
            "tile": plan.tile,
            "block": plan.block,
            "splits": plan.splits,
            "launches": len(list(plan.launches(work.requests))),
            "parts": plan.parts,
            "warps": plan.num_warps,
            "stages": plan.num_stages,
            "merge": int(plan.merge),
        },
    }


def compile_all(all_work: list[Work]) -> None:
    """Launch everything once, at a short context."""
    for work in all_work:
        bench = Bench(MODELS[work.model], work.requests, WARM_CONTEXT)
        try:
            plan = changed(bench, work)
            bench.layers(work.num_new, work.tree, plan)()
            torch.cuda.synchronize()
        except Exception:
            continue  # the run that times it says so


def show(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    plan = " ".join(f"{name} {value}" for name, value in row["plan"].items())
    numbers = [f"{row['us']:.1f}", f"{row['floor_us']:.1f}"]
    numbers += [f"{row['gb_per_s']:.0f}", f"{row['tflop_per_s']:.0f}"]
    place = [row["model"], *(str(row[k]) for k in ("batch", "context", "nodes")), row["tree"]]
    return [*place, *numbers, f"{row['ratio']:.2f}" + " !" * (row["ratio"] > GOAL), plan]


def main() -> None:
    """Compile, time, print the table, end in JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["8B", "V2-Lite"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--chains", action="store_true", help="decode and verify alone")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--compile", type=int, help="compile this job's share and stop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    usual = standard(options.models, options.batches, options.chains, options.contexts)
    all_work = list(sweep(options.models) if options.sweep else usual)
    console = Console(width=150)
    if options.compile is None:
        command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
        jobs = [subprocess.Popen([*command, str(i)]) for i in range(options.jobs)]
        for job in jobs:
            job.wait()
    with torch.inference_mode():
        if options.compile is not None:
            alike = dict.fromkeys(replace(work, context=WARM_CONTEXT) for work in all_work)
            compile_all(list(alike)[options.compile :: options.jobs])
            return
        rows = list(take(all_work, console))
    columns = (
        "model",
        "batch",
        "context",
        "N",
        "tail",
        "us",
        "floor",
        "GB/s",
        "TFLOP/s",
        "ratio",
        "plan",
    )
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*show(row))
    console.print(table)
    record = {"rows": rows, "provenance": fingerprint()}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    console.print_json(json.dumps(record), indent=None)


if __name__ == "__main__":
    main()
