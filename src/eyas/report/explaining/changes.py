"""What would change a measured cycle most: single changes, computed from its own parts.

Rows have the keys of `eyas plan`. Nothing is assumed but what a row's `costs` says: fewer drafts
keep the acceptance of the positions that remain, a part at its floor takes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.report.components import DRAFT, EXTEND

AS_MEASURED = "as measured"
NOTABLE = 0.005
"""Changes that win less of a cycle are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A measured cycle beside a plain step."""

    cycle_ms: float
    decode_ms: float
    accept_length: float
    batch: int

    def row(self, option: str, costs: str, cycle_ms: float, length: float) -> dict[str, Any]:
        """What a change leads to."""
        rate = self.batch * length / cycle_ms * 1e3
        return {
            "option": option,
            "costs": costs,
            "decode_ms": self.decode_ms,
            "cycle_ms": cycle_ms,
            "accept_length": length,
            "tok_per_s": rate,
            "speedup": length * self.decode_ms / cycle_ms,
            "break_even": cycle_ms / self.decode_ms,
            "gain": rate * self.cycle_ms / (self.batch * self.accept_length * 1e3),
        }


def changes(
    base: Base, record: Mapping[str, Any], shares: list[float], chain_of: int
) -> list[dict[str, Any]]:
    """Rows by gain; `shares`: acceptance by position; `chain_of`: drafts of a chain, else 0."""
    rows = [base.row(AS_MEASURED, "", base.cycle_ms, base.accept_length)]
    rows.append(base.row("no speculation", "a flag", base.decode_ms, 1.0))
    stages = record["stages"]
    if chain_of > 1 and stages.get(DRAFT):
        rows += _fewer_drafts(base, stages, shares, chain_of)
    rows += [row for row in _parts(base, record) if row["gain"] >= 1 + NOTABLE]
    return sorted(rows, key=lambda row: -row["gain"])


def _fewer_drafts(
    base: Base, stages: Mapping[str, Any], shares: list[float], chain_of: int
) -> Iterator[dict[str, Any]]:
    """Shorter chains: each draft pass less, the rest of the cycle as it is."""
    level = stages[DRAFT]["device_ms"] / (chain_of - 1)
    for drafts in range(1, chain_of):
        length = 1 + sum(shares[:drafts])
        plural = "s" if drafts > 1 else ""
        cycle = base.cycle_ms - (chain_of - drafts) * level
        yield base.row(
            f"a chain of {drafts} draft{plural}", "a flag; verify taken as it is", cycle, length
        )


def _parts(base: Base, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A part gone, or at its floor."""
    length, cycle = base.accept_length, base.cycle_ms
    if record["idle_ms"] > 0:
        yield base.row("no idle time", "work on the host", cycle - record["idle_ms"], length)
    for stage, words in ((DRAFT, "drafting for nothing"), (EXTEND, "extending for nothing")):
        if stage in record["stages"]:
            ms = record["stages"][stage]["device_ms"]
            yield base.row(words, "a bound, no option", cycle - ms, length)
    for part, floor in record["floors"].items():
        over = record["components"].get(part, 0.0) - floor
        if over > 0:
            yield base.row(f"{part} at its floor", "better kernels", cycle - over, length)
    shared = record.get("collectives")
    if shared and record["ranks"]:
        waiting = shared["waiting_ms"].get(str(record["ranks"][0]["rank"]), 0.0)
        yield base.row("no waiting for late ranks", "find the rank", cycle - waiting, length)
