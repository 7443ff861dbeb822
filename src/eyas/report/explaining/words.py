"""What a record of `eyas explain` says, in a few sentences."""

from __future__ import annotations

from typing import Any

from eyas.report.components import HOST
from eyas.report.explaining.changes import AS_MEASURED
from eyas.report.traces.collectives import latest

NOTABLE = 0.03
"""Share of a cycle from which on a part is worth a sentence."""
BOUNDS = ("a bound, no option", "")


def verdict(record: dict[str, Any]) -> str:
    """What is odd, then: does speculation pay, what dominates, what would change it most."""
    sentences = [f"Ranks differ: {note}." for note in record["mismatches"]]
    sentences += [*_reads(record), _pays(record), _dominates(record)]
    sentences += _idle(record) + _ranks(record) + _held(record) + _change(record)
    rest = record["unexplained_fraction"]
    if abs(rest) > NOTABLE:
        sentences.append(f"{rest:+.1%} of the cycle is unexplained.")
    return " ".join(sentences)


def _pays(record: dict[str, Any]) -> str:
    length, even, decode = record["accept_length"], record["break_even"], record["decode"]
    if decode is None or even is None or length is None:
        return f"A decode step takes {record['cycle_ms']:.2f} ms; nothing is drafted."
    pays = "pays" if length > even else "does not pay"
    return (
        f"Speculation {pays}: a cycle of {record['cycle_ms']:.2f} ms commits {length:.2f} tokens, "
        f"a plain step takes {decode['cycle_ms']:.2f} ms, so {even:.2f} break even "
        f"({length / even:.2f} x)."
    )


def _dominates(record: dict[str, Any]) -> str:
    rows = sorted(record["cells"], key=lambda row: -row["ms"])
    first = rows[0]
    words = (
        f"{first['stage']}: {first['component']} dominates with {first['ms']:.2f} ms, "
        f"{first['ms'] / record['cycle_ms']:.0%} of the cycle"
    )
    if first["over_floor"]:
        words += f", {first['over_floor']:.1f} x its floor"
    return f"{words[0].upper()}{words[1:]}."


def _idle(record: dict[str, Any]) -> list[str]:
    """Gaps between stages, and idle time at large."""
    cycle = record["cycle_ms"]
    found = []
    for gap in record["gaps"]:
        if gap["ms"] >= NOTABLE * cycle and HOST not in (gap["from"], gap["to"]):
            start, stage = gap["from"], gap["to"]
            where = f"in {stage}" if start == stage else f"between {start} and {stage}"
            found.append(f"Idle: {gap['ms']:.2f} ms {where} ({gap['cause']}).")
    if record["idle_ms"] >= NOTABLE * cycle:
        found.append(
            f"All idle time is {record['idle_ms']:.2f} ms, {record['idle_ms'] / cycle:.0%}."
        )
    return found


def _ranks(record: dict[str, Any]) -> list[str]:
    shared = record["collectives"]
    if not shared:
        return []
    wait = max(shared["waiting_ms"].values())
    rank = latest(shared)
    return [
        f"Collectives: {shared['transfer_ms']:.2f} ms transfer, up to {wait:.2f} ms waiting for "
        f"the slowest rank; rank {rank} comes last in {shared['last'][rank]:.0%}."
    ]


def _held(record: dict[str, Any]) -> list[str]:
    state = record["gpu_state"]
    if state is None or state["clock_mhz"] >= (1 - NOTABLE) * state["most_mhz"]:
        return []
    why = " and ".join(state["held_by"]) or "nothing that the driver tells"
    return [
        f"The GPU's clock is {state['clock_mhz']:,} of {state['most_mhz']:,} MHz, held by {why} "
        f"({state['power_w']:.0f} W, {state['celsius']} degrees C)."
    ]


def _reads(record: dict[str, Any]) -> list[str]:
    found = [
        f"{one['count']:.2g} x {name} in {one['stage']}" for name, one in record["reads"].items()
    ]
    return [f"The host reads the device inside the cycle: {', '.join(found)}."] if found else []


def _change(record: dict[str, Any]) -> list[str]:
    rows = [
        row
        for row in record["rows"] or []
        if row["option"] != AS_MEASURED and row["costs"] not in BOUNDS and row["gain"] > 1
    ]
    if not rows:
        return []
    best = rows[0]
    return [
        f"Most would change by {best['option']}: {best['tok_per_s']:.1f} tok/s, "
        f"{best['gain']:.2f} x ({best['costs']})."
    ]
