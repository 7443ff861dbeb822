"""`eyas trace`: where the time of a cycle goes, from profiler traces of any engine.

Reads torch-profiler traces, one or several ranks, of one run or of several; a plain decoding run
beside a speculative one is compared with it. Profiling slows the host, so gaps are upper bounds;
kernel times hold. A trace does not say how many tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.report.components import ACCEPT, DECODE, DRAFT, UNKNOWN, VERIFY
from eyas.report.records import stamped
from eyas.report.traces.account import account, by_component, kernels_by_time, unknown_kernels
from eyas.report.traces.collectives import collectives
from eyas.report.traces.cycles import Cycles, find_cycles
from eyas.report.traces.places import components
from eyas.report.traces.reading import read_trace
from eyas.report.traces.stages import Staging, staging
from eyas.report.traces.timeline import timeline
from eyas.report.traces.trace import Ints, Trace
from eyas.report.traces.words import verdict

ENGINES = (("sglang", "SGLang"), ("vllm", "vLLM"), ("eyas", "eyas"))
"""How an engine's host thread or kernels begin, and its name."""
RANK_KEYS = ("cycle_ms", "device_ms", "idle_ms", "components", "idle", "streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rank's trace with every kernel named."""

    trace: Trace
    code: Ints
    by_place: npt.NDArray[np.bool_]
    staging: Staging
    cycles: Cycles | None


def read(trace: Trace) -> Reading:
    """Name every kernel of a trace and find its cycles."""
    code, by_place = components(trace)
    stages = staging(trace, code)
    cycles = find_cycles(trace, code, stages)
    return Reading(trace=trace, code=code, by_place=by_place, staging=stages, cycles=cycles)


def analyse(files: Sequence[Path], accept_length: float | None = None) -> dict[str, Any]:
    """The record of `eyas trace`; raises `RecordError` for a file that is no trace of a GPU.

    `accept_length` is the tokens a cycle commits, where it is known from elsewhere.
    """
    traces = [trace for file in files for trace in read_trace(file)]
    found = [_run([read(trace) for trace in run]) for run in runs_of(traces)]
    speculative = [run for run in found if run["kind"] == "speculative"]
    main = (speculative or found)[0]
    plain = [run for run in found if run["kind"] == "decode" and run is not main]
    known = accept_length if main["kind"] == "speculative" else None
    main["accept_length"] = known
    if speculative and plain:
        main["against_decode"] = against_decode(main, plain[0], known)
    main["beside"] = [run for run in found if run is not main]
    for run in found:
        run["verdict"] = verdict(run)
    return stamped("trace", main)


def runs_of(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Traces by run: ranks of one world whose times overlap, or devices of one file, are one."""
    runs: list[list[Trace]] = []
    for trace in traces:
        for run in runs:
            same_file = run[0].path == trace.path
            one_world = run[0].world_size == trace.world_size > 1
            new = all(other.rank != trace.rank for other in run)
            if new and (same_file or one_world):
                run.append(trace)
                break
        else:
            runs.append([trace])
    return [sorted(run, key=lambda t: t.rank) for run in runs]


def against_decode(
    main: dict[str, Any], plain: dict[str, Any], accept_length: float | None
) -> dict[str, Any]:
    """Where verify takes more than decode, and what a cycle must commit to pay.

    `extra` lists components by the milliseconds that verify, with acceptance, takes more.
    `break_even` is the cycle over the decode step; `break_even_device` the same of device time.
    """
    verify: dict[str, float] = {}
    for name in (VERIFY, ACCEPT):
        for part, ms in main["stages"].get(name, {}).get("components", {}).items():
            verify[part] = verify.get(part, 0.0) + ms
    decode = plain["stages"].get(DECODE, {}).get("components", plain["components"])
    extra = {n: verify.get(n, 0.0) - decode.get(n, 0.0) for n in {**verify, **decode}}
    verify_ms, decode_ms = sum(verify.values()), sum(decode.values())
    break_even = main["cycle_ms"] / plain["cycle_ms"]
    return {
        "verify_ms": verify_ms,
        "decode_ms": decode_ms,
        "verify_over_decode": verify_ms / decode_ms if decode_ms else None,
        "extra": [
            {"name": name, "ms": extra[name]} for name in sorted(extra, key=lambda n: -extra[n])
        ],
        "break_even": break_even,
        "break_even_device": main["device_ms"] / plain["device_ms"],
        "speedup": accept_length / break_even if accept_length else None,
    }


def _run(readings: Sequence[Reading]) -> dict[str, Any]:
    """The record of one run of one or several ranks; averages are rank 0's, or the first one's."""
    first = readings[0]
    values = _rank(first)
    others = [values, *(_rank(one) for one in readings[1:])]
    shared = collectives(
        [r.trace for r in readings], [r.code for r in readings], [r.cycles for r in readings]
    )
    trace = first.trace
    values["ranks"] = [
        {"rank": r.trace.rank, "file": r.trace.path.name, "timeline": v["timeline"]}
        | {key: v[key] for key in RANK_KEYS}
        for r, v in zip(readings, others, strict=True)
    ]
    del values["timeline"]
    return {
        "files": [r.trace.path.name for r in readings],
        "engine": _engine(trace),
        "gpu": trace.gpu,
        "kind": _kind(values["stages"]),
        **values,
        "collectives": shared,
        "layers": first.staging.layers or None,
        "batch": first.staging.batch,
        "nodes": first.staging.nodes,
        "accept_length": None,
        "notes": [note for r in readings for note in r.trace.notes],
    }


def _rank(reading: Reading) -> dict[str, Any]:
    trace, code = reading.trace, reading.code
    whole = np.ones(len(code), dtype=np.bool_)
    total = float(trace.work.dur.sum()) / 1e3
    parts = by_component(trace.work.dur, code, 1e3)
    values: dict[str, Any] = dict.fromkeys(("cycle_ms", "device_ms", "idle_ms"))
    values |= {"components": {}, "stages": {}, "idle": {}, "streams": {}, "timeline": None}
    unexplained = None
    if reading.cycles is not None and reading.cycles.steady.any():
        values |= account(trace, code, reading.staging.stage, reading.cycles)
        values["timeline"] = timeline(trace, code, reading.staging.stage, reading.cycles)
        unknown = values["components"].get(UNKNOWN, 0.0) + values["idle"]["untold"]
        unexplained = unknown / values["cycle_ms"]
    return values | {
        "classified_fraction": 1 - parts.get(UNKNOWN, 0.0) / total if total else None,
        "by_place_fraction": float(trace.work.dur[reading.by_place].sum()) / 1e3 / total
        if total
        else None,
        "unexplained_fraction": unexplained,
        "unknown": unknown_kernels(kernels_by_time(trace, code, whole, 1e3)),
        "totals": {
            "device_ms": total,
            "kernels": len(code),
            "span_ms": float(trace.work.end.max() - trace.work.start.min()) / 1e3,
            "components": parts,
        },
    }


def _kind(stages: dict[str, Any]) -> str:
    if VERIFY in stages or DRAFT in stages:
        return "speculative"
    return "decode" if DECODE in stages else "unknown"


def _engine(trace: Trace) -> str | None:
    for start, name in ENGINES:
        if trace.process.lower().startswith(start):
            return name
    for start, name in ENGINES:
        if any(f"{start}::" in kind.name for kind in trace.kinds):
            return name
    return None
