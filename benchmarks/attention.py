"""Time of paged attention per layer on a GPU, in a CUDA graph: decode, verify, trees, prefill.

    python benchmarks/attention.py [--only 8B] [--sweep] [--json FILE]

Rotation and the write of new keys are part of the time. Every call reads another layer, so that
keys come from memory and not from the cache. `GB/s` counts keys and values once, `ratio` is the
time over that of N = 1. `--sweep` times other plans (stages, warps, tiles, programs, merges) at a few
points instead, to choose the constants of `eyas.kernels.attention_plan`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    Plan,
    Workspace,
    make_plan,
    most_splits,
)
from eyas.kernels.kv_write import Layout, write_kv
from eyas.kernels.paged_attention import cost, node_orders, paged_attention
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape

CONTEXTS, BATCHES, NODES = (1024, 8192, 32768, 131072), (1, 8, 32), (1, 4, 8, 16)
PAGE_SIZE = 16
COLD_BYTES = 2**28
"""Keys of all layers together: several times the cache."""
GOAL = 1.15
"""Verify over decode, issue of PERFORMANCE.md's section 5."""


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
    "SmolLM2": Model(heads=9, shape=AttentionShape.heads(1, 3, 64), rope_dim=64),
}


class Bench:
    """A model's pool at one context and batch, and passes over it."""

    def __init__(self, model: Model, requests: int, context: int, workspace: Workspace) -> None:
        self.model, self.requests, self.context = model, requests, context
        self.workspace = workspace
        device, width = torch.device("cuda"), context + 4096
        each = -(-width // PAGE_SIZE)
        size = requests * each * PAGE_SIZE * model.shape.values_per_position * 2
        layers = min(32, max(2, -(-COLD_BYTES // size)))
        shape = replace(model.shape, num_layers=layers)
        self.layout = Layout(shape=shape, page_size=PAGE_SIZE)
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
        bits = [1]
        for n in range(1, num_new):
            bits.append(bits[(n - 1) // 2] | 1 << n)
        ancestors = torch.tensor(bits, device=device).repeat(self.requests)
        return ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            prefix_lens=torch.full((self.requests,), self.context - num_new, device=device),
            page_table=self.table,
            num_new=num_new,
            max_kv_len=self.context,
            ancestors=None if tree == CAUSAL else ancestors,
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
            most_splits(heads),
            2 * processors,
            self.workspace,
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

    def time(self, num_new: int, tree: int, plan: Plan) -> float:
        """Microseconds per layer, median of replays."""
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

        return graph_time(layers) / self.layout.shape.num_layers


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


def standard(models: dict[str, Model], workspace: Workspace) -> Iterator[dict[str, Any]]:
    """Decode and verify over contexts and batches, then trees and prefill."""
    for name, model in models.items():
        for requests in BATCHES:
            for context in CONTEXTS:
                bench = Bench(model, requests, context, workspace)
                base = None
                for num_new in NODES:
                    row = measure(bench, name, num_new, CAUSAL)
                    base = base or row["us"]
                    yield row | {"ratio": row["us"] / base}
                if context <= 8192 and requests == 1:
                    for tree in (MASKED, RANKS):
                        row = measure(bench, name, 16, tree)
                        yield row | {"ratio": row["us"] / (base or row["us"])}
                    yield measure(bench, name, 2048 if context > 2048 else 1024, CAUSAL)
                del bench


def measure(bench: Bench, name: str, num_new: int, tree: int, **changes: Any) -> dict[str, Any]:
    """One figure."""
    plan = replace(bench.plan(num_new, tree), **changes)
    batch = bench.batch(num_new, tree)
    time = bench.time(num_new, tree, plan)
    flops, size = cost(bench.layout, batch, bench.model.heads, 2)
    return {
        "model": name,
        "batch": bench.requests,
        "context": bench.context,
        "nodes": num_new,
        "tree": ("causal", "masked", "ranks")[tree],
        "us": time,
        "gb_per_s": size / time / 1e3,
        "tflop_per_s": flops / time / 1e6,
        "plan": {
            "tile": plan.tile,
            "parts": plan.parts,
            "warps": plan.num_warps,
            "stages": plan.num_stages,
            "merge": plan.merge,
        },
    }


def sweep(models: dict[str, Model], workspace: Workspace) -> Iterator[dict[str, Any]]:
    """Other plans than the engine's, each against it."""
    for name, model in models.items():
        for requests, context, num_new in (
            (1, 512, 1),
            (1, 512, 4),
            (1, 8192, 1),
            (1, 8192, 16),
            (32, 2048, 1),
            (32, 2048, 4),
        ):
            bench = Bench(model, requests, context, workspace)
            plan = bench.plan(num_new, CAUSAL)
            yield measure(bench, name, num_new, CAUSAL) | {"ratio": 1.0}
            for changes in other_plans(plan):
                try:
                    yield measure(bench, name, num_new, CAUSAL, **changes)
                except Exception as error:  # noqa: BLE001
                    Console().print(f"{name} {changes}: {type(error).__name__}")


def other_plans(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of one kind each."""
    for stages in {1, 2, 3, 4} - {plan.num_stages}:
        yield {"num_stages": stages}
    for warps in {4, 8} - {plan.num_warps}:
        yield {"num_warps": warps}
    if plan.parts > 1:
        yield {"merge": not plan.merge}
        for parts in (1, 2, 4, 8, 16):
            if parts != plan.parts:
                yield {"parts": parts, "merge": plan.merge and parts > 1}


def show(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    plan, ratio = row["plan"], row.get("ratio")
    said = "" if ratio is None else f"{ratio:.2f}" + (" !" if ratio > GOAL else "")
    return [
        row["model"],
        str(row["batch"]),
        str(row["context"]),
        str(row["nodes"]),
        row["tree"],
        f"{row['us']:.1f}",
        f"{row['gb_per_s']:.0f}",
        f"{row['tflop_per_s']:.0f}",
        said,
        " ".join(f"{k}{int(v)}" for k, v in plan.items()),
    ]


def main() -> None:
    """Time, print the table, end in JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(MODELS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = {options.only: MODELS[options.only]} if options.only else MODELS
    console = Console(width=130)
    columns = ("model", "batch", "context", "N", "tail", "us", "GB/s", "TFLOP/s", "ratio", "plan")
    rows = []
    table = Table(*columns)
    workspace = Workspace.of(2**27, torch.device("cuda"))
    with torch.inference_mode():
        for row in (sweep if options.sweep else standard)(models, workspace):
            rows.append(row)
            table.add_row(*show(row))
    console.print(table)
    record = {"rows": rows, "provenance": fingerprint()}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    console.print_json(json.dumps(record), indent=None)


if __name__ == "__main__":
    main()
