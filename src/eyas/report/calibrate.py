"""This machine's profile, measured part by part: what `eyas calibrate` writes and `plan` reads.

Parts are those of `parts.py`, what surrounds them those of `around.py`, collectives those of
`collectives.py`. Nothing of a real model's pass is timed, so that predictions stay predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eyas.fingerprint import cpu
from eyas.hardware import Collective, Curve, Family, HardwareProfile, Times
from eyas.models.registry import resolve_device, resolve_dtype
from eyas.report import parts
from eyas.report.around import around
from eyas.report.collectives import Rounds, collectives
from eyas.report.options import CalibrateConfig
from eyas.report.parts import CPU_SIZES, GPU_SIZES, Machine, Sizes
from eyas.report.records import value_text
from eyas.report.timing import Timer

Values = dict[str, float | Curve | Family[Curve] | Times]
TINY_KERNELS = 300
SERIAL = (256, 1024)
"""Positions of two walks without splits."""
CUSHION = 8
"""Times the last cache, that are read before anything is timed: some 0.1 ms."""
CPU_CACHE = 2**25
"""Bytes that a CPU's last cache is taken for."""


def calibrate(
    config: CalibrateConfig, progress: bool = False, sizes: Sizes | None = None
) -> HardwareProfile:
    """Measure; raises `ConfigError` for a device that is not there, or too few for the ranks.

    `sizes` are those that suit the device unless others are given.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    tables, skew = collectives(config.tp, Rounds(device=device.type, dtype=dtype))
    machine = _machine(config, device, dtype, sizes)
    values: Values = {"skew_us": skew}
    steps = _steps(machine)
    with Progress(disable=not progress, transient=True) as bar:
        for name, step in bar.track(list(steps.items()), description="measuring"):
            bar.console.print(f"  {name}", style="dim") if progress else None
            values |= step()
    name = _name(machine)
    blank: Values = dict.fromkeys(("decode_us", "cycle_us", "step_us", "host_us"), 0.0)
    profile = _profile(config, name, values | blank, tables)
    found = dataclasses.asdict(around(profile, device, config.dtype, machine.timer))
    return _profile(config, name, values | found, tables)


def _machine(
    config: CalibrateConfig, device: torch.device, dtype: torch.dtype, sizes: Sizes | None
) -> Machine:
    cache, usual, cushion = CPU_CACHE, CPU_SIZES, None
    if device.type == "cuda":
        cache, usual = torch.cuda.get_device_properties(device).L2_cache_size, GPU_SIZES
        cushion = torch.zeros(CUSHION * cache // 4, dtype=torch.float32, device=device)
    return Machine(
        device=device,
        dtype=dtype,
        timer=Timer(device=device, seconds=config.seconds, cushion=cushion),
        cache_bytes=cache,
        sizes=sizes or usual,
    )


def _steps(machine: Machine) -> dict[str, Callable[[], Values]]:
    """Words -> what is measured then."""
    return {
        "memory": lambda: _memory(machine),
        "linear layers": lambda: _linear(machine),
        "experts": lambda: _experts(machine),
        "attention": lambda: _attention(machine),
        "small kernels and launches": lambda: _launches(machine),
        "sampling": lambda: {"sampling_us": parts.sampling(machine)},
    }


def _memory(machine: Machine) -> Values:
    read, copy = parts.bandwidths(machine)
    cached = parts.cache_bandwidth(machine) if machine.is_gpu else read
    memory = float(cpu()["memory"] or 0)
    if machine.is_gpu:
        memory = torch.cuda.get_device_properties(machine.device).total_memory
    return {
        "memory_gb": memory / 1e9,
        "read_gb_s": read,
        "copy_gb_s": copy,
        "cache_mb": machine.cache_bytes / 1e6,
        "cache_gb_s": max(cached, read),
    }


def _linear(machine: Machine) -> Values:
    one, factors, small, flops = parts.linear_layers(machine)
    return {
        "linear_us": one,
        "rows_factor": factors,
        "small_rows_factor": small,
        "matmul_tflops": flops,
    }


def _experts(machine: Machine) -> Values:
    one, factors = parts.routed_experts(machine)
    return {"experts_us": one, "pairs_factor": factors}


def _attention(machine: Machine) -> Values:
    kinds = {"attention": parts.HEADS, "narrow": parts.NARROW, "latent": parts.LATENT}
    values: Values = {"serial_ns": _serial_ns(machine)}
    for name, kind in kinds.items():
        values[f"{name}_us"], values[f"{name}_tflops"] = parts.attention(machine, kind)
    return values


def _serial_ns(machine: Machine) -> float:
    """A position of a walk without splits; on a CPU, of attention as it is."""
    short, long = (parts.attention_us(machine, parts.HEADS, 1, n, split=False) for n in SERIAL)
    return max(0.0, (long - short) / (SERIAL[1] - SERIAL[0]) * 1e3)


def _launches(machine: Machine) -> Values:
    one = torch.zeros(1, device=machine.device)
    timer = machine.timer
    add = lambda: one.add_(1)  # noqa: E731 - a call to be timed
    node = timer.us([add])
    eager = timer.wall_us(add, TINY_KERNELS)
    values: Values = {
        "small_us": parts.small_kernels(machine),
        "node_us": node,
        "eager_us": eager if machine.is_gpu else 0.0,
        "graph_us": 0.0,
        "copy_us": 0.0,
    }
    if machine.is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.add_(1)
        values["graph_us"] = max(0.0, timer.replay_us(graph, 200) - node)
        values["copy_us"] = timer.wall_us(one.cpu, 1)
    return values


def _profile(
    config: CalibrateConfig, name: str, values: Values, tables: tuple[Collective, ...]
) -> HardwareProfile:
    today = datetime.now(UTC).date().isoformat()
    source = f"measured by eyas calibrate on {today}, torch {torch.__version__}"
    fields: Any = values
    return HardwareProfile(
        name=config.name or name,
        machine=name,
        date=today,
        num_devices=config.tp,
        collectives=tables,
        sources=dict.fromkeys(values, source),
        **fields,
    )


def _name(machine: Machine) -> str:
    if machine.is_gpu:
        return torch.cuda.get_device_name(machine.device)
    found = cpu()
    return f"{found['model']}, {found['cores']} cores, {torch.get_num_threads()} threads"


def show(console: Console, profile: HardwareProfile) -> None:
    """Every constant; families by their ends."""
    table = Table("constant", "value", title=profile.machine)
    for name, entry in profile.to_json()["constants"].items():
        table.add_row(name, value_text(entry["value"], ".3g", ends=True))
    for one in profile.collectives:
        name = f"all-reduce, {one.kind}, {one.ranks} ranks"
        table.add_row(name, value_text(one.us.points, ".3g"))
    console.print(table)
