"""`eyas diff A B`: what differs between two runs, ranked by the milliseconds it explains.

The difference of the two cycles is the sum of its cells: device time by stage and component, idle
time by stage, waiting for the slowest rank. Where both runs tell their accept length the unit is
milliseconds a token, and the accept length is a cell too: with cycle c and accept length l,
c'/l' - c/l = (c' - c)/l' + c (1/l' - 1/l). A fact that differs (`differences.py`) takes the cells
that it can explain, as far as it can; what of a cell no fact takes is a cause of its own. What the
cells leave is unexplained, and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eyas.report.components import ALL_REDUCE, IDLE
from eyas.report.differences import ACCEPT_LENGTH, WAITING, Fact, facts
from eyas.report.records import kind_of, stamped

SMALL = 0.005
"""Cells below this share of the cycle are summed up as smaller differences."""
SAME = 0.02
"""Cycles that differ by less are said to be alike."""
MOST_UNEXPLAINED = 0.5
"""From this share of the difference on, the verdict is that it is unexplained."""
KINDS = ("bench", "explain", "trace")

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A part of the difference."""

    stage: str
    part: str
    before: float
    after: float
    """ms a cycle, or tokens a cycle for the accept length"""
    ms: float
    """What it adds to the difference, in the difference's unit."""

    @property
    def name(self) -> str:
        """Stage and part in words."""
        if self.part == IDLE and self.stage:
            return f"idle before {self.stage}"
        return ": ".join(filter(None, (self.stage, self.part)))


def compare(a: Record, b: Record) -> dict[str, Any]:
    """The record of `eyas diff`: how run `b` differs from run `a`, both of the same kind.

    `causes` are in order of what they explain: those that add to the difference first.
    """
    before, after = _cycle(a), _cycle(b)
    lengths = _accept_length(a), _accept_length(b)
    per_token = all(lengths) and before is not None and after is not None
    cells = _cells(a, b, lengths[1] or 1.0 if per_token else 1.0)
    total = None
    if before is not None and after is not None:
        total = after - before
        if per_token:
            old, new = (float(length or 1.0) for length in lengths)
            total = after / new - before / old
            ms = before * (1 / new - 1 / old)
            cells.append(Cell(stage="", part=ACCEPT_LENGTH, before=old, after=new, ms=ms))
    size = (before or 1.0) / (lengths[0] or 1.0 if per_token else 1.0)
    causes, rest = _causes(a, b, cells, size)
    causes.sort(key=lambda c: -c["ms"] if (total or 0.0) >= 0 else c["ms"])
    unexplained = None if total is None else total - sum(cell.ms for cell in cells)
    record: dict[str, Any] = {
        "kind": kind_of(a),
        "unit": "ms a token" if per_token else "ms a cycle",
        "cycle_ms": [before, after],
        "accept_length": list(lengths),
        "difference_ms": total,
        "unexplained_ms": unexplained,
        "smaller_ms": rest,
        "causes": causes,
    }
    return stamped("diff", record | {"verdict": verdict(record, size)})


def verdict(record: Mapping[str, Any], size: float) -> str:
    """The difference in a sentence or two; `size` is the first run's time in the same unit."""
    total, causes = record["difference_ms"], record["causes"]
    if total is None:
        return "The records tell no cycle time; what differs besides is listed."
    unit = record["unit"]
    told = f"B takes {size + total:.3f} {unit}, A {size:.3f} ({total:+.3f}, {total / size:+.0%})"
    if abs(total) <= SAME * size:
        return f"{told}: alike within {SAME:.0%}."
    unexplained = abs(record["unexplained_ms"])
    share = f"{unexplained:.3f} of {abs(total):.3f} ms"
    if unexplained > MOST_UNEXPLAINED * abs(total) or not causes:
        return f"{told}: unexplained, {share}."
    first = causes[0]
    words = f"{told}: {first['ms']:+.3f} by {first['name']} ({first['evidence']})."
    return words + (f" Unexplained are {share}." if unexplained > SAME * size else "")


def _cells(a: Record, b: Record, tokens: float) -> list[Cell]:
    """Cells of the cycle; every ms is divided by `tokens`."""
    values = [_parts(a), _parts(b)]
    if a.get("collectives") and b.get("collectives"):
        for one, record in zip(values, (a, b), strict=True):
            _part_waiting(one, record)
    keys = dict.fromkeys([*values[0], *values[1]])
    return [
        Cell(stage=s, part=p, before=old, after=new, ms=(new - old) / tokens)
        for s, p in keys
        for old, new in [(values[0].get((s, p), 0.0), values[1].get((s, p), 0.0))]
    ]


def _parts(record: Record) -> dict[tuple[str, str], float]:
    """ms of each (stage, part) of a cycle."""
    if "stages_ms" in record:
        return {(stage, ""): float(ms) for stage, ms in record["stages_ms"]["spec"].items()}
    found: dict[tuple[str, str], float] = {}
    stages = record.get("stages") or {}
    for stage, one in stages.items():
        for part, ms in one["components"].items():
            found[stage, part] = float(ms)
        if one.get("idle_ms") is not None:
            found[stage, IDLE] = float(one["idle_ms"])
    if not stages:
        found = {("", part): float(ms) for part, ms in (record.get("components") or {}).items()}
        if record.get("idle_ms") is not None:
            found["", IDLE] = float(record["idle_ms"])
    if record.get("overlap_ms"):
        found["", "overlap of streams"] = -float(record["overlap_ms"])
    return found


def _part_waiting(parts: dict[tuple[str, str], float], record: Record) -> None:
    """Take what the first rank waits in collectives out of its all-reduce cells."""
    first = str(record["ranks"][0]["rank"])
    waiting = float(record["collectives"]["waiting_ms"][first])
    keys = [key for key in parts if key[1] == ALL_REDUCE]
    whole = sum(parts[key] for key in keys)
    if whole <= 0:
        return
    for key in keys:
        parts[key] *= max(0.0, 1 - waiting / whole)
    parts["", WAITING] = min(waiting, whole)


def _causes(
    a: Record, b: Record, cells: list[Cell], size: float
) -> tuple[list[dict[str, Any]], float]:
    """Causes, and the ms of cells too small to be one."""
    left = list(cells)
    causes = []
    for fact in facts(a, b):
        own = [cell for cell in left if fact.claims(cell.stage, cell.part)]
        rest = [replace(cell, ms=cell.ms - _explained(cell, fact)) for cell in own]
        ms = sum(cell.ms for cell in own) - sum(cell.ms for cell in rest)
        left = [cell for cell in left if cell not in own] + [cell for cell in rest if cell.ms]
        causes.append({"name": fact.name, "ms": ms, "evidence": fact.evidence})
    small = [cell for cell in left if abs(cell.ms) < SMALL * size]
    for cell in left:
        if cell not in small:
            causes.append({"name": cell.name, "ms": cell.ms, "evidence": _evidence(a, b, cell)})
    return causes, sum(cell.ms for cell in small)


def _explained(cell: Cell, fact: Fact) -> float:
    """How much of a cell's ms a fact that claims it can explain."""
    change = cell.after - cell.before
    if fact.longer is None or change == 0:
        return cell.ms
    share = fact.longer * cell.before / change
    return cell.ms * min(max(share, 0.0), 1.0)


def _evidence(a: Record, b: Record, cell: Cell) -> str:
    if cell.part == ACCEPT_LENGTH:
        told = f"{cell.before:.2f} -> {cell.after:.2f} tokens a cycle"
        shares = [(_acceptance(r) or [None])[0] for r in (a, b)]
        if None not in shares:
            told += f", first draft accepted {shares[0]:.0%} -> {shares[1]:.0%}"
        return told
    told = f"{cell.before:.3f} -> {cell.after:.3f} ms"
    names = [
        next(
            (k["name"] for k in r.get("kernels_by_time") or [] if k["component"] == cell.part), None
        )
        for r in (a, b)
    ]
    if None not in names and names[0] != names[1]:
        told += f"; most of it in {str(names[1])[:60]}, was {str(names[0])[:60]}"
    return told


def _cycle(record: Record) -> float | None:
    value = record["spec"]["step_ms"] if "spec" in record else record.get("cycle_ms")
    return None if value is None else float(value)


def _accept_length(record: Record) -> float | None:
    value = record["spec"]["accept_length"] if "spec" in record else record.get("accept_length")
    return None if value is None else float(value)


def _acceptance(record: Record) -> list[float | None] | None:
    found = record.get("spec") or record.get("acceptance") or {}
    shares: list[float | None] | None = found.get("acceptance_by_position")
    return shares
