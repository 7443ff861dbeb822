"""A run's units, its time, and its record, which is written after every figure.

A unit starts only where it is expected to end in time; what is left out, and why, stands in the
record, as does what failed: a run that is cut short still says what it found and what is missing.
Knows nothing of engines.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_parts.goals import Row

SCHEMA, VERSION = "eyas.gpu", 1
NO_TIME = "no time left"
LAST_WORDS = 600
"""Of an error, on the screen."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a run."""

    seconds: float
    now: Callable[[], float] = perf_counter
    start: float = 0.0

    @classmethod
    def of(cls, seconds: float, now: Callable[[], float] = perf_counter) -> Clock:
        """A clock that starts now."""
        return cls(seconds, now, now())

    @property
    def spent(self) -> float:
        """Since the start."""
        return self.now() - self.start

    def fits(self, needed: float) -> bool:
        """Whether so many seconds are left."""
        return self.spent + needed <= self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A few figures that are taken together."""

    name: str
    seconds: float
    """What it takes at most, about, if its networks have to be built."""
    take: Callable[[Record], Iterator[Row]]


@dataclass(slots=True)
class Record:
    """What a run has found so far."""

    clock: Clock
    console: Console
    file: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    """Flags and provenance."""
    rows: list[Row] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    """Longer texts, such as a graph's kernels."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of a unit or a figure -> why it was left out."""
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of every unit that ran."""
    waiting: list[str] = field(default_factory=list)
    """Units that are not through."""

    def run(self, units: Sequence[Unit]) -> None:
        """Take all units that time allows, in order."""
        self.waiting = [unit.name for unit in units]
        for unit in units:
            if self.clock.fits(unit.seconds):
                self._take(unit)
            else:
                self.skip(unit.name, f"{NO_TIME}: it may take {unit.seconds:.0f} s")
            self.waiting.remove(unit.name)
            self.write()

    def _take(self, unit: Unit) -> None:
        start = perf_counter()
        self.say(f"{unit.name} ...")
        try:
            for row in unit.take(self):
                self.add(row)
        except Exception as error:  # the other units' figures are worth having
            self.failed[unit.name] = "".join(traceback.format_exception(error))
            self.say(f"failed: {type(error).__name__}: {str(error)[:300]}")
        self.seconds[unit.name] = perf_counter() - start

    def add(self, row: Row) -> None:
        """Keep a figure and show it."""
        self.rows.append(row)
        self.say(f"{row.name}: {number(row.value)} {row.unit}")
        self.write()

    def skip(self, name: str, reason: str) -> None:
        """Leave something out."""
        self.skipped[name] = reason
        self.say(f"left out: {name}: {reason}")

    def value(self, name: str) -> float | None:
        """The latest figure of a name; None if there is none yet."""
        return next((r.value for r in reversed(self.rows) if r.name == name), None)

    def say(self, text: str) -> None:
        """A line of progress."""
        self.console.print(f"{self.clock.spent:6.1f} s  {text}", highlight=False, markup=False)

    def write(self) -> None:
        """Replace the file."""
        if self.file is None:
            return
        text = json.dumps(self.as_dict(), indent=1)
        part = self.file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.file)

    def as_dict(self) -> dict[str, Any]:
        """The record as it is written."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "complete": not (self.waiting or self.skipped or self.failed),
            "rows": [asdict(row) | {"holds": row.holds} for row in self.rows],
            "skipped": self.skipped,
            "failed": self.failed,
            "waiting": self.waiting,
            "seconds": self.seconds,
            "kernels": self.details,
            **self.about,
        }


def number(value: float) -> str:
    """A figure in a few digits."""
    return f"{value:.0f}" if value == round(value) and abs(value) >= 10 else f"{value:.4g}"


def show(record: Record) -> None:
    """What is missing, then what is held against something: figure, goal, floor, best peer."""
    for name, reason in record.skipped.items():
        record.console.print(f"left out: {name}: {reason}", highlight=False, markup=False)
    for name, text in record.failed.items():
        record.console.print(f"failed: {name}: {text[-LAST_WORDS:]}", highlight=False, markup=False)
    table = Table("figure", "value", "goal", "floor", "best peer", "holds")
    marks = {None: "", True: "yes", False: "[red]no[/red]"}
    for row in record.rows:
        cells = [row.goal, row.floor, row.peer]
        if cells == [None] * 3:
            continue
        texts = ["" if c is None else number(c) for c in cells]
        table.add_row(row.name, f"{number(row.value)} {row.unit}", *texts, marks[row.holds])
    record.console.print(table)
