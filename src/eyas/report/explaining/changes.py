"""What would change a measured cycle most: single changes, computed from its own parts.

Rows have the keys of `eyas plan`. Nothing is assumed but what a row's `costs` says: fewer drafts
keep the acceptance of the positions that remain, a part at its floor takes that. Where the
machine's profile is known, changes that `eyas plan` predicts stand beside, by their shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.engine.engine import LLM
from eyas.errors import ConfigError
from eyas.estimate import Scenario
from eyas.hardware import HardwareProfile
from eyas.report.components import DRAFT, EXTEND
from eyas.report.explaining.floors import Machine, drafter_config
from eyas.report.whatif import plan
from eyas.setting import Setting

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


def predicted(
    base: Base, llm: LLM, setting: Setting, machine: Machine, given: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Rows of `eyas plan` for the run's own scenario; none where the profile is of another kind.

    A row's cycle is the measured one times what is predicted for the change over what is predicted
    for the run as it is. `given`: acceptance by position where those before were accepted.
    """
    on_gpu = llm.engine.runner.device.type == "cuda"
    if not isinstance(machine, HardwareProfile) or bool(machine.eager_us) != on_gpu:
        return []
    known = tuple(rate for rate in given if rate is not None)
    scenario = Scenario(
        target=llm.target_config,
        drafter=drafter_config(llm),
        speculation=llm.engine.speculation,
        setting=setting,
        profile=machine,
        rates=known or (0.0,),
    )
    try:
        found = plan(scenario)["rows"]
    except ConfigError:  # more ranks than the profile's machine has
        return []
    [as_asked] = [row for row in found if row["option"] == "as asked"]
    rows = []
    for row in found:
        if row["option"] in ("as asked", "no speculation") or row["gain"] < 1 + NOTABLE:
            continue
        cycle = base.cycle_ms * row["cycle_ms"] / as_asked["cycle_ms"]
        length = base.accept_length * row["accept_length"] / as_asked["accept_length"]
        costs = f"{row['costs']}; predicted" if row["costs"] else "predicted"
        rows.append(base.row(row["option"], costs, cycle, length))
    return rows
