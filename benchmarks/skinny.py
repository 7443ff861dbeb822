"""Times linear layers of few rows on a GPU: cuBLAS against the kernels of `eyas.kernels`.

Every layer runs in a CUDA graph over as many copies of its weight as the L2 cache cannot hold. A
weight's plans are compared at four rows; the best one is then timed at 1 to 256 rows, and with
parts of its weight asked ahead of its turn. "engine" is what an engine does with so many rows: its
plan for them, or the library. Each plan is checked first: against float32, each row
alone against the row among others, and one run against the next. A figure is the median of repeats.

Weights of 8 bits are compared with the rows' planes at hand (`eyas.kernels.planes`); "both" has the
launch that makes them, "ahead" has both start early.

    python benchmarks/skinny.py --json skinny.json

Lines appear as they are measured, so a run that is cut short still says something.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from triton.runtime.errors import TritonError

from eyas.fingerprint import fingerprint
from eyas.kernels import lang, planes
from eyas.kernels.gated import gated
from eyas.kernels.planes_triton import planes_triton
from eyas.kernels.planes_triton import run as run_8_bit
from eyas.kernels.skinny_plan import config, of_rows, plan_of, takes
from eyas.kernels.skinny_triton import Plan, run

ROWS = (1, 4, 16, 32, 64, 96, 128, 192, 256)
SEARCHED = 4
"""Rows at which plans are compared."""
SPREAD = 200 << 20
"""Bytes of the copies of a weight together."""
WORKERS = 12
"""Processes that compile ahead; Triton's cache on disk hands their work over."""
DTYPE = torch.bfloat16
DEVICE = "cuda"
SCREEN = Console(width=240, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A weight [outputs, inputs], and what its launch does around the product."""

    name: str
    outputs: int
    inputs: int
    way: str = "plain"
    """Words of: plain; gated; int8."""

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 1 if "int8" in self.way else 2

    @property
    def bytes(self) -> int:
        """Of the weight."""
        return self.outputs * self.inputs * self.itemsize


LAYERS = [
    Layer(name="8B qkv", outputs=6144, inputs=4096),
    Layer(name="8B o", outputs=4096, inputs=4096),
    Layer(name="8B gate up", outputs=28672, inputs=4096, way="gated"),
    Layer(name="8B down", outputs=4096, inputs=14336),
    Layer(name="SmolLM2 qkv", outputs=960, inputs=576),
    Layer(name="SmolLM2 o", outputs=576, inputs=576),
    Layer(name="SmolLM2 gate up", outputs=3072, inputs=576, way="gated"),
    Layer(name="SmolLM2 down", outputs=576, inputs=1536),
    Layer(name="SmolLM2 head", outputs=49152, inputs=576),
    Layer(name="V2-Lite q, kv down", outputs=3648, inputs=2048),
    Layer(name="V2-Lite o", outputs=2048, inputs=2048),
    Layer(name="V2-Lite shared gate up", outputs=5632, inputs=2048, way="gated"),
    Layer(name="V2-Lite shared down", outputs=2048, inputs=2816),
    Layer(name="V2-Lite dense gate up", outputs=21888, inputs=2048, way="gated"),
    Layer(name="V2-Lite dense down", outputs=2048, inputs=10944),
    Layer(name="V2-Lite head", outputs=102400, inputs=2048),
    Layer(name="8B drafter qkv", outputs=6144, inputs=8192),
    Layer(name="8B drafter fuse", outputs=4096, inputs=12288),
    Layer(name="8B drafter head", outputs=32000, inputs=4096),
    Layer(name="8B drafter qkv", outputs=6144, inputs=8192, way="int8"),
    Layer(name="8B drafter fuse", outputs=4096, inputs=12288, way="int8"),
    Layer(name="8B drafter o", outputs=4096, inputs=4096, way="int8"),
    Layer(name="8B drafter gate up", outputs=28672, inputs=4096, way="int8 gated"),
    Layer(name="8B drafter down", outputs=4096, inputs=14336, way="int8"),
    Layer(name="8B drafter head", outputs=32000, inputs=4096, way="int8"),
    Layer(name="Qwen3-30B qkv", outputs=5120, inputs=2048),
    Layer(name="Qwen3-30B o", outputs=2048, inputs=4096),
]
OF_8_BITS: list[dict[str, int]] = [
    *({"outputs": 64, "depth": 256, "stages": 4, "splits": n} for n in (1, 2, 3, 4)),
    *({"outputs": 64, "depth": 256, "stages": 6, "splits": n} for n in (1, 2)),
    {"outputs": 64, "depth": 256, "stages": 3},
    *({"outputs": 64, "depth": 512, "stages": 3, "splits": n} for n in (1, 2)),
    *({"outputs": 64, "depth": 128, "stages": 8, "splits": n} for n in (1, 2)),
    *({"outputs": 128, "depth": 128, "stages": 5, "splits": n} for n in (1, 2)),
    *({"outputs": 128, "depth": 256, "stages": 3, "splits": n} for n in (1, 2)),
    {"outputs": 128, "depth": 256, "stages": 4},
    {"outputs": 64, "depth": 64, "stages": 4, "groups": 4},
    {"outputs": 32, "depth": 128, "stages": 4, "groups": 4},
    {"outputs": 32, "depth": 128, "stages": 4, "groups": 4, "splits": 2},
    {"outputs": 16, "depth": 128, "stages": 6, "groups": 4},
]
"""Plans that are compared for weights of 8 bits."""
LARGE = 6 << 20
"""Weights from this size on are for the plans of large ones."""


def plans(layer: Layer) -> list[Plan]:
    """What is compared for a layer."""
    gates = "gated" in layer.way
    if "int8" in layer.way:
        found = [Plan(**cut) for cut in OF_8_BITS]
    elif layer.bytes < LARGE:
        wide = 2 if gates else 1
        found = [
            Plan(outputs=16 * wide, depth=64, groups=4, warps=4, stages=3),
            Plan(outputs=16 * wide, depth=64, groups=4, warps=4, stages=6),
            Plan(outputs=16 * wide, depth=32, groups=8, warps=8, stages=4),
            Plan(outputs=32, depth=64, groups=1, warps=2, stages=8),
            Plan(outputs=32, depth=128, groups=1, warps=2, stages=6),
            Plan(outputs=64, depth=64, groups=1, warps=4, stages=8),
        ]
    else:
        wide = 128 if gates else 64
        found = [
            Plan(outputs=wide, depth=64, stages=6 if gates else 8),
            Plan(outputs=wide, depth=64, stages=6 if gates else 8, splits=2),
            Plan(outputs=wide, depth=64, stages=6 if gates else 8, splits=4),
            Plan(outputs=wide, depth=128, stages=3 if gates else 5),
            Plan(outputs=wide, depth=128, stages=3 if gates else 5, splits=2),
            Plan(outputs=wide, depth=128, stages=3 if gates else 5, splits=4),
            Plan(outputs=wide // 2, depth=64, groups=4, stages=4),
            Plan(outputs=wide // 2, depth=128, groups=1, warps=wide // 32, stages=8),
            Plan(outputs=16 * wide // 64, depth=64, groups=4, stages=6),
            Plan(outputs=16 * wide // 64, depth=64, groups=8, warps=8, stages=5),
        ]
    ours = planes.config if "int8" in layer.way else config
    default = ours(layer.outputs, layer.inputs, gates)
    return [default, *(plan for plan in found if plan != default and _fits(plan, layer))]


def _fits(plan: Plan, layer: Layer) -> bool:
    """Whether no program of a tile is left without inputs."""
    steps = -(-layer.inputs // (plan.groups * plan.depth))
    return (plan.splits - 1) * -(-steps // plan.splits) < steps


def chosen(layer: Layer, rows: int) -> Plan | None:
    """The engine's plan for so many rows; None: the library multiplies."""
    gates = "gated" in layer.way
    if "int8" in layer.way:
        return planes.config(layer.outputs, layer.inputs, gates, rows)
    plan = plan_of(layer.outputs, layer.inputs, gates)
    if plan is None or not takes(rows, layer.outputs, gates):
        return None
    return of_rows(plan, rows)


def asking(plan: Plan) -> list[Plan]:
    """The plan with more or less of the weight brought into the cache before its turn."""
    return [dataclasses.replace(plan, ahead=ahead) for ahead in (0, 1024, 4096)]


class Case:
    """A layer's tensors: copies of the weight, rows for the largest pass."""

    def __init__(self, layer: Layer, copies: int) -> None:
        size, inner = layer.outputs, layer.inputs
        self.layer = layer
        self.gates = "gated" in layer.way
        generator = torch.Generator(DEVICE).manual_seed(size + inner)

        def draw(*shape: int, deviation: float = 1.0) -> torch.Tensor:
            values = torch.empty(shape, dtype=DTYPE, device=DEVICE)
            return values.normal_(0.0, deviation, generator=generator)

        self.x = draw(ROWS[-1], inner)
        self.weights = [draw(size, inner, deviation=inner**-0.5) for _ in range(min(copies, 2))]
        self.scales: torch.Tensor | None = None
        if "int8" in layer.way:
            self.scales = torch.full((size,), inner**-0.5 / 40, device=DEVICE)
            whole = [w.float() / self.scales[:, None] for w in self.weights]
            self.weights = [w.round().clamp(-127, 127).to(torch.int8) for w in whole]
        self.weights += [self.weights[0].clone() for _ in range(copies - len(self.weights))]
        self.counts = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        self.planes, self.units, _ = planes_triton(self.x)

    def own(self, plan: Plan, rows: int, copy: int = 0) -> torch.Tensor:
        """The kernel's output of the first rows; in 8 bits their planes are there."""
        weight, gates, counts = self.weights[copy], self.gates, self.counts
        if self.scales is None:
            return run(self.x[:rows], weight, plan, gated=gates, counts=counts)
        given = (self.planes[: 2 * rows], self.units[:rows], weight, self.scales)
        return run_8_bit(*given, plan, DTYPE, gated=gates, counts=counts)

    def both(self, plan: Plan, rows: int, copy: int = 0) -> torch.Tensor:
        """The same in 8 bits, with the launch that makes the planes."""
        assert self.scales is not None, "for weights of 8 bits"
        given = (*planes_triton(self.x[:rows])[:2], self.weights[copy], self.scales)
        return run_8_bit(*given, plan, DTYPE, gated=self.gates, counts=self.counts)

    def library(self, rows: int, copy: int = 0) -> torch.Tensor:
        """The same by cuBLAS and the launches around it; for int8 cuBLAS in 16 bits."""
        y = F.linear(self.x[:rows], self.weights[copy])
        return gated(y) if self.gates else y

    def exact(self) -> torch.Tensor:
        """All rows with products and sums in float32."""
        y = F.linear(self.x.float(), self.weights[0].float())
        if self.scales is not None:
            y *= self.scales
        if not self.gates:
            return y
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    def faults(self, plan: Plan) -> str:
        """What is wrong with a plan; empty if nothing is."""
        every, wanted = self.own(plan, ROWS[-1]), self.exact()
        off = float((every.float() - wanted).abs().max() / wanted.abs().max())
        if not off < 2e-2:
            return f"off by {off:.3f} of the largest output"
        if not torch.equal(self.own(plan, ROWS[-1]), every):
            return "differs from run to run"
        for rows in (1, 5, 16, 31, 64):
            if not torch.equal(self.own(plan, rows), every[:rows]):
                return f"{rows} rows alone have other bits"
        return "counters are left" if self.counts.any() else ""


def microseconds(launch: Callable[[int], Any], copies: int, repeats: int = 7) -> float:
    """Device time of a launch among others, each with its own copy of the weight."""
    for copy in range(min(copies, 3)):
        launch(copy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            launch(copy)
    graph.replay()
    times = []
    for _ in range(repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]) * 1e3 / copies)
    return statistics.median(times)


def short(plan: Plan) -> str:
    """A plan on a line."""
    text = f"out {plan.outputs} depth {plan.depth} splits {plan.splits} groups {plan.groups}"
    text += f" warps {plan.warps} stages {plan.stages}"
    return text + f" ahead {plan.ahead}"


def measure(layer: Layer) -> Iterator[dict[str, Any]]:
    """Figures of one layer."""
    copies = max(2, min(160, -(-SPREAD // layer.bytes)))
    case = Case(layer, copies)

    def row(what: str, plan: Plan | None, rows: int, us: float) -> dict[str, Any]:
        figures = {"rows": rows, "us": round(us, 2), "tb_s": round(layer.bytes / us / 1e6, 3)}
        options = None if plan is None else dataclasses.asdict(plan)
        return {"layer": dataclasses.asdict(layer), "what": what, **figures, "plan": options}

    if "int8" not in layer.way:
        for rows in ROWS:
            us = microseconds(partial(case.library, rows), copies)
            yield row("library", None, rows, us)
    found: list[tuple[float, Plan]] = []

    def attempt(what: str, plan: Plan, rows: int) -> Iterator[dict[str, Any]]:
        try:
            fault = case.faults(plan)
            us = microseconds(partial(case.own, plan, rows), copies)
        except (RuntimeError, TritonError) as error:
            fault, us = f"{type(error).__name__}: {str(error)[:100]}", 0.0
        if fault:
            yield {"layer": dataclasses.asdict(layer), "what": f"{short(plan)}: {fault}"}
            return
        found.append((us, plan))
        yield row(what, plan, rows, us)

    for plan in plans(layer):
        yield from attempt("plan", plan, SEARCHED)
    if not found:
        return
    best = min(found, key=lambda one: one[0])[1]
    for rows in ROWS:
        yield row("best", best, rows, microseconds(partial(case.own, best, rows), copies))
        if "int8" in layer.way and rows > planes.MOST_ROWS_8_BIT:
            continue  # those passes take 16 bits
        cut = chosen(layer, rows)
        launch = partial(case.library, rows) if cut is None else partial(case.own, cut, rows)
        yield row("engine", cut, rows, microseconds(launch, copies))
    if "int8" in layer.way:
        yield from in_8_bits(case, best, row, copies)
        return
    for plan in asking(best):
        yield from attempt("ahead", plan, SEARCHED)


def in_8_bits(
    case: Case, best: Plan, row: Callable[..., dict[str, Any]], copies: int
) -> Iterator[dict[str, Any]]:
    """The best plan with the launch that makes the planes; then both early, asking ahead."""
    before = lang.EARLY
    lang.EARLY = False
    for rows in ROWS:
        yield row("both", best, rows, microseconds(partial(case.both, best, rows), copies))
    lang.EARLY = True
    for plan in asking(best):
        yield row("ahead", plan, SEARCHED, microseconds(partial(case.both, plan, SEARCHED), copies))
    lang.EARLY = before


def variants(layers: list[Layer]) -> list[tuple[Layer, Plan]]:
    """One layer for every kernel that is compiled."""
    seen: dict[Any, tuple[Layer, Plan]] = {}
    for layer in layers:
        for plan in plans(layer):
            even = layer.inputs % (plan.depth * plan.groups) == 0
            seen.setdefault((plan, layer.way, even), (layer, plan))
    return list(seen.values())


def compile_share(layers: list[Layer], number: int) -> None:
    """Launch every `WORKERS`-th variant once, on a weight of few outputs."""
    for layer, plan in variants(layers)[number::WORKERS]:
        small = dataclasses.replace(layer, outputs=256)
        try:
            for rows in (4, 8, 16, 32, 64):
                Case(small, 1).own(plan, rows)
        except (RuntimeError, TritonError):
            continue


def compile_ahead(arguments: list[str]) -> None:
    """Compile in processes of their own; a minute at most."""
    start = perf_counter()
    command = [sys.executable, __file__, *arguments, "--compile"]
    workers = [subprocess.Popen([*command, str(n)]) for n in range(WORKERS)]
    for worker in workers:
        try:
            worker.wait(max(1.0, 60 - (perf_counter() - start)))
        except subprocess.TimeoutExpired:
            worker.kill()
    SCREEN.print(f"compiled in {perf_counter() - start:.1f} s")


def show(figure: dict[str, Any]) -> None:
    """One line."""
    layer = figure["layer"]
    name = f"{layer['name']} {layer['outputs']}x{layer['inputs']} {layer['way']}"
    if "us" not in figure:
        SCREEN.print(f"{name:45s} {figure['what']}")
        return
    plan = "" if figure["plan"] is None else short(Plan(**figure["plan"]))
    line = f"{name:45s} {figure['what']:8s} T={figure['rows']:<3d}"
    SCREEN.print(f"{line} {figure['us']:8.2f} us {figure['tb_s']:6.3f} TB/s  {plan}")


def summary(figures: list[dict[str, Any]]) -> None:
    """Library and best plan at all rows, with its best `ahead` at four; a line a layer."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for figure in figures:
        if "us" in figure:
            layer = figure["layer"]
            name = f"{layer['name']} {layer['outputs']}x{layer['inputs']} {layer['way']}"
            cells.setdefault(name, {}).setdefault(figure["what"], []).append(figure)
    for name, kinds in cells.items():
        library = " ".join(f"{one['us']:7.2f}" for one in kinds.get("library", []))
        own = " ".join(f"{one['us']:7.2f}" for one in kinds.get("best", []))
        linked = min((one["us"] for one in kinds.get("ahead", [])), default=float("nan"))
        own += "".join(f" ({one['us']:.2f} with planes)" for one in kinds.get("both", [])[1:2])
        best = short(Plan(**kinds["best"][0]["plan"])) if "best" in kinds else "none"
        SCREEN.print(f"{name:42s} {library:72s} | {own:72s} | {linked:7.2f}  {best}")


def main() -> None:
    """Compile, check, time; print lines, a summary, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="", help="only layers whose name and way contain this")
    parser.add_argument("--seconds", type=float, default=85.0, help="start no layer after this")
    parser.add_argument("--json", default="")
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    start = perf_counter()
    layers = [one for one in LAYERS if args.layers in f"{one.name} {one.way}"]
    with torch.inference_mode():
        if args.compile >= 0:
            compile_share(layers, args.compile)
            return
        compile_ahead(["--layers", args.layers])
        figures: list[dict[str, Any]] = []
        for layer in layers:
            if perf_counter() - start > args.seconds:
                SCREEN.print(f"no time for {layer.name}")
                continue
            for figure in measure(layer):
                figures.append(figure)
                show(figure)
    SCREEN.print(f"\nus: library | own at {', '.join(map(str, ROWS))} rows | asking ahead at 4")
    summary(figures)
    if args.json:
        record = {"rows": figures, "flags": vars(args), "provenance": fingerprint()}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
