"""Which units a part has, for which shapes, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gpu_parts import cycles, host, real
from gpu_parts.attention_part import verify_attention
from gpu_parts.builds import SPECS, Builds
from gpu_parts.deterministic import SETTINGS, deterministic
from gpu_parts.goals import Row
from gpu_parts.modes import modes
from gpu_parts.ranks import ranks, same_texts
from gpu_parts.record import Record, Unit
from gpu_parts.start import start

Take = Callable[[Builds, Record], Iterator[Row]]
MAIN = ("llama-3.1-8b", "smollm2-135m", "deepseek-v2-lite")
EXTRA = ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3-4-layers", "kimi-k2-4-layers")
"""Shapes that are timed where they are asked for."""
DENSE = MAIN[0]
WIDE = (1, 8, 32)
"""Batch sizes whose peers are known, of `DENSE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line chose."""

    shapes: tuple[str, ...] = MAIN
    runs: tuple[str, ...] = tuple(SPECS)
    batches: tuple[int, ...] = ()
    """Of cycles; none: those with peers."""
    num_tokens: int = 384
    """Of an answer with real weights."""

    tp: int = 2
    """Ranks of the part about several."""

    @property
    def first(self) -> str:
        """The shape that parts about an engine, and not about a network, are taken with."""
        return self.shapes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Units of a shape, or of none."""

    help: str
    of_shape: Callable[[str, Options], Iterator[tuple[str, float, Take]]] | None = None
    alone: Callable[[Options], Iterator[tuple[str, float, Take]]] | None = None


def _cycles(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    yield f"{shape} build", 60, partial(cycles.build, shape)
    for run in options.runs:
        peers = WIDE if shape == DENSE and run in ("decode", "K=3", "K=7") else (1,)
        sizes = options.batches or peers
        seconds = 30 if max(sizes) < 8 else 45
        yield f"{shape} {run}", seconds, partial(cycles.cycles, shape, run, sizes)
        if run == "decode":
            yield f"{shape} verify", 25, partial(cycles.verify, shape)


def _batches(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    if shape == options.first:
        for run in ("decode", "K=3"):
            take = partial(cycles.batches, shape, run, cycles.SIZES)
            yield f"{shape} {run}, all batches", 60, take


def _waits(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    for run in ("decode", "K=3"):
        yield f"{shape} {run}, waits", 25, partial(host.waits, shape, run)


def _host(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    if shape == options.first:
        for run in ("decode", "K=3"):
            for size in (1, 32):
                name = f"{shape} {run} B={size}, host"
                yield name, 25, partial(host.host, shape, run, size)


def _capture(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    if shape == options.first:
        yield f"{shape} default graphs", 60, partial(cycles.default_graphs, shape)


def _start(options: Options) -> Iterator[tuple[str, float, Take]]:
    yield f"{options.first} start", 100, partial(start, options.first)


def _attention(options: Options) -> Iterator[tuple[str, float, Take]]:
    yield "verify attention", 90, verify_attention


def _real(options: Options) -> Iterator[tuple[str, float, Take]]:
    for model in ("small-deepseek", "smollm2"):
        yield f"{model} real", 60, partial(real.real, model, options.num_tokens)


def _modes(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    yield f"{shape} attention modes", 45, partial(modes, shape)


def _deterministic(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    for setting in SETTINGS:
        name = f"{shape} deterministic {setting}"
        yield name, 45, partial(deterministic, shape, setting)


def _tp(shape: str, options: Options) -> Iterator[tuple[str, float, Take]]:
    yield f"{shape} tp={options.tp}", 120, partial(ranks, shape, options.tp)


def _tp_texts(options: Options) -> Iterator[tuple[str, float, Take]]:
    take = partial(same_texts, options.tp, options.num_tokens)
    yield f"small-deepseek tp={options.tp}", 60, take


PARTS = {
    "cycles": Part(help="decode, verify, chains and trees of every shape", of_shape=_cycles),
    "waits": Part(help="hidden waits, copies and launches of a steady step", of_shape=_waits),
    "host": Part(help="where the host's time of a step goes", of_shape=_host),
    "batches": Part(help="decode and K=3 at 1 to 128 requests, and one more", of_shape=_batches),
    "capture": Part(help="time and memory of the default graphs", of_shape=_capture),
    "start": Part(help="a process from its start to a first token", alone=_start),
    "attention": Part(help="verify attention at contexts of 1k to 128k", alone=_attention),
    "real": Part(help="real weights: tokens/s, accept length, 8-bit drafter", alone=_real),
    "modes": Part(help="verify that attends as decode, or as prefill", of_shape=_modes),
    "deterministic": Part(help="the price of independent rows", of_shape=_deterministic),
    "tp": Part(help="ranks on several GPUs", of_shape=_tp, alone=_tp_texts),
}


def units(parts: list[str], options: Options, builds: Builds) -> list[Unit]:
    """Shape by shape, so that what is built is shared; then what needs none of their networks."""
    found = []
    for shape in options.shapes:
        for name in parts:
            if by_shape := PARTS[name].of_shape:
                found += list(by_shape(shape, options))
    for name in parts:
        if alone := PARTS[name].alone:
            found += list(alone(options))
    return [Unit(name=n, seconds=s, take=partial(take, builds)) for n, s, take in found]
