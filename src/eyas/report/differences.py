"""What two records of runs say differently, apart from times: the facts that may explain them.

Each fact names the parts of a cycle whose time it can explain, by stage and component. Knows no
times and no order; `compare.py` gives facts their milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.report.components import ALL_REDUCE, ATTENTION, COPIES, DRAFT, EXTEND, IDLE, KV_WRITE
from eyas.report.traces.collectives import latest

ACCEPT_LENGTH = "accept length"
WAITING = "waiting for the slowest rank"
"""Parts of a cell that are no component."""

Record = Mapping[str, Any]
Claims = Callable[[str, str], bool]
"""Whether a fact can explain the time of (stage, part)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A difference between two runs."""

    name: str
    evidence: str
    claims: Claims
    longer: float | None = None
    """How much longer than before it can let a part take, as a share; None: however much."""


SHARE = 0.02
"""Change of a share, or of a length relative to it, from which on it is a difference."""
LAUNCHES = 5.0
"""Launches outside graphs, a cycle, that are a difference."""
QUIET = re.compile(r"\.where\.|(^|\.)mismatches\.")
"""Keys that differ between any two runs, or repeat others."""


def _drafter(stage: str, part: str) -> bool:
    return part == ACCEPT_LENGTH or stage in (DRAFT, EXTEND)


def _all_reduce(_: str, part: str) -> bool:
    return part == ALL_REDUCE


def _attention(_: str, part: str) -> bool:
    return part in (ATTENTION, KV_WRITE)


def _idle(_: str, part: str) -> bool:
    return part == IDLE


def _device(_: str, part: str) -> bool:
    return part not in (IDLE, ACCEPT_LENGTH, WAITING)


def _cycle(_: str, part: str) -> bool:
    return part != ACCEPT_LENGTH


def _nothing(_: str, __: str) -> bool:
    return False


EXPLAINS: tuple[tuple[str, Claims], ...] = (
    (r"(^|\.)gpus\.\d+\.id$", _nothing),
    (r"nccl|p2p|peer|nvlink|topology|all_?reduce|gloo|infiniband|\bib\b", _all_reduce),
    (r"clock|throttl|power", _device),
    (r"^model$|dtype|quant|(^|\.)tp$|gpus?\b|\bcpu|device kind|threads", _cycle),
    (r"attention", _attention),
    (r"draft|speculati|num_steps|topk|algorithm", _drafter),
    (r"graph|alloc|overlap", _idle),
)
"""Which parts a flag or a setting can explain, by its name; others explain nothing by themselves.

A commit, a library's version or another GPU of a kind may change anything, so it is said and not
blamed.
"""


def facts(a: Record, b: Record) -> list[Fact]:
    """Differences between runs `a` and `b`, those that explain more precisely first."""
    return [
        *_waiting(a, b),
        *_settings(a, b),
        *_clock(a, b),
        *_graphs(a, b),
        *_syncs(a, b),
        *_host_gaps(a, b),
        *_context(a, b),
    ]


def _settings(a: Record, b: Record) -> Iterator[Fact]:
    """Flags, and fingerprints of the machine and of every rank."""
    for key in ("flags", "provenance"):
        before, after = (dict(_flat(r.get(key) or {})) for r in (a, b))
        for name in sorted(before.keys() | after.keys()):
            old, new = before.get(name, "unset"), after.get(name, "unset")
            if old != new and not QUIET.search(name):
                claims = next((c for p, c in EXPLAINS if re.search(p, name.lower())), _nothing)
                yield Fact(name=_readable(name), evidence=f"{old} -> {new}", claims=claims)


def _clock(a: Record, b: Record) -> Iterator[Fact]:
    """Of the GPU at work, and what held it."""
    before, after = a.get("gpu_state"), b.get("gpu_state")
    if not before or not after:
        return
    old, new = before["clock_mhz"], after["clock_mhz"]
    if abs(new - old) <= SHARE * old:
        return
    held = " and ".join((after if new < old else before)["held_by"])
    evidence = f"{old:,} -> {new:,} MHz" + (f", held by {held}" if held else "")
    yield Fact(name="GPU clock at work", evidence=evidence, claims=_device, longer=old / new - 1)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested dicts and lists with dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}.{i}")
    else:
        yield prefix, str(value)


def _readable(name: str) -> str:
    """`ranks.fingerprints.1.speed.nccl` as `rank 1: nccl`."""
    rank = re.match(r"ranks\.fingerprints\.(\d+)\.\w+\.(.+)", name)
    return f"rank {rank.group(1)}: {rank.group(2)}" if rank else name


def _graphs(a: Record, b: Record) -> Iterator[Fact]:
    before, after = a.get("graph_fraction"), b.get("graph_fraction")
    old, new = a.get("launches"), b.get("launches")
    if before is None or after is None or old is None or new is None:
        return
    if abs(before - after) <= SHARE and abs(new - old) < max(LAUNCHES, old / 10):
        return
    evidence = f"device time in graphs {before:.0%} -> {after:.0%}"
    evidence += f", launches outside {old:.0f} -> {new:.0f}"
    reasons = (b if after < before else a).get("graph_reasons")
    if reasons:
        evidence += f" ({', '.join(map(str, reasons))})"
    yield Fact(name="graph coverage", evidence=evidence, claims=_idle)


def _syncs(a: Record, b: Record) -> Iterator[Fact]:
    """Waits of the host and copies to it."""
    counts = []
    for record in (a, b):
        waits = record.get("syncs") or {}
        counts.append({name: float(one["count"]) for name, one in waits.items()})
        if record.get("copies_to_host") is not None:
            counts[-1]["copies to the host"] = float(record["copies_to_host"])
    before, after = counts
    changed = [
        f"{name} {before.get(name, 0.0):.2g} -> {after.get(name, 0.0):.2g}"
        for name in sorted(before.keys() | after.keys())
        if abs(before.get(name, 0.0) - after.get(name, 0.0)) >= 0.5
    ]
    if changed:
        yield Fact(
            name="waits of the host",
            evidence=", ".join(changed) + " a cycle",
            claims=lambda _, part: part in (IDLE, COPIES),
        )


def _host_gaps(a: Record, b: Record) -> Iterator[Fact]:
    """Stretches in which the device waited for the host, by the stages around them."""
    sums: list[dict[tuple[str, str], float]] = [{}, {}]
    for found, record in zip(sums, (a, b), strict=True):
        for gap in record.get("gaps") or []:
            if gap["cause"] == "host":
                found[gap["from"], gap["to"]] = float(gap["ms"])
    before, after = sums
    keys = before.keys() | after.keys()
    for key in sorted(keys, key=lambda k: -abs(after.get(k, 0.0) - before.get(k, 0.0))):
        old, new = before.get(key, 0.0), after.get(key, 0.0)
        if abs(new - old) > SHARE * float(a.get("cycle_ms") or 1.0):
            start, stage = key
            where = f"in {stage}" if start == stage else f"between {start} and {stage}"
            yield Fact(
                name=f"host {where}",
                evidence=f"the device waits {old:.3f} -> {new:.3f} ms for its launches",
                claims=_idle_before(stage),
            )


def _idle_before(stage: str) -> Claims:
    return lambda own, part: part == IDLE and own == stage


def _waiting(a: Record, b: Record) -> Iterator[Fact]:
    before, after = a.get("collectives"), b.get("collectives")
    if not before or not after:
        return
    old, new = (max(one["waiting_ms"].values()) for one in (before, after))
    if abs(new - old) <= SHARE * float(a.get("cycle_ms") or 1.0):
        return
    rank = latest(after)
    share = after["last"][rank]
    yield Fact(
        name=f"rank {rank} comes last",
        evidence=f"in {share:.0%} of collectives, others wait up to {old:.3f} -> {new:.3f} ms",
        claims=lambda _, part: part == WAITING,
    )


def _context(a: Record, b: Record) -> Iterator[Fact]:
    before, after = (_flat_numbers(r.get("context")) for r in (a, b))
    changed = [
        f"{name} {before[name]:g} -> {after[name]:g}"
        for name in sorted(before.keys() & after.keys())
        if abs(after[name] - before[name]) > SHARE * abs(before[name])
    ]
    if changed:
        yield Fact(name="context", evidence=", ".join(changed), claims=_attention)


def _flat_numbers(value: Any) -> dict[str, float]:
    if isinstance(value, int | float):
        return {"tokens": float(value)}
    found = value.items() if isinstance(value, Mapping) else ()
    return {str(k): float(v) for k, v in found if isinstance(v, int | float)}
