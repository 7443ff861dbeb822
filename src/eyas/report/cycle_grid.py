"""A cycle's components by stages as a table that fits into 80 columns; reads a record alone.

Numbers have at most five characters before their sign: as many digits as the whole cycle leaves.
A stage that would show nothing but zeros has no column.
"""

from __future__ import annotations

from typing import Any

from rich.box import Box
from rich.table import Table

from eyas.report.components import COLLECT, DEVICE, STAGES
from eyas.report.traces.account import OTHER

HEADS = {COLLECT: "coll."}
"""Stages whose name is too long for a head."""
LIGHT = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
"""Lines under the head and between sections alone."""


def light_table(title: str, *columns: str, words: int = 1, gap: int = 2) -> Table:
    """A table without vertical lines, `gap` characters between columns; the first are `words`."""
    table = Table(
        *columns,
        title=f"\n{title}",
        title_justify="left",
        box=LIGHT,
        padding=(0, gap - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in table.columns[words:]:
        column.justify, column.no_wrap = "right", True
    return table


def cycle_grid(run: dict[str, Any], title: str, idle: str = "idle") -> Table:
    """Components, device and idle time by stage, their sums, and shares of the cycle."""
    cycle = run["cycle_ms"]
    digits = sum(cycle < most for most in (10, 100, 1000))
    stages = {name: run["stages"][name] for name in (*STAGES, OTHER) if _shows(run, name, digits)}
    heads = [HEADS.get(name, name) for name in stages]
    table = light_table(title, "", *heads, "sum", "%", gap=1)

    def add(name: str, cells: list[float | None], ms: float, **style: Any) -> None:
        shown = [*(_ms(x, digits) for x in cells), _ms(ms, digits), _share(ms / cycle)]
        table.add_row(name, *shown, **style)

    for part in DEVICE:
        if part in run["components"]:
            own = [one["components"].get(part) for one in stages.values()]
            add(part, own, run["components"][part])
    table.add_section()
    for name, key in (("device", "device_ms"), (idle, "idle_ms")):
        add(name, [one[key] for one in stages.values()], run[key])
    none: list[float | None] = [None] * len(stages)
    if abs(run["overlap_ms"]) >= 0.5 * 10**-digits:
        add("overlapped", none, -run["overlap_ms"])
    if "unexplained_ms" in run:
        add("unexplained", none, run["unexplained_ms"])
    add("cycle", none, cycle, style="bold")
    return table


def _shows(run: dict[str, Any], stage: str, digits: int) -> bool:
    """Whether a stage has a number that is not zero in the table."""
    one = run["stages"].get(stage)
    return one is not None and max(one["device_ms"], one["idle_ms"]) >= 0.5 * 10**-digits


def _ms(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}" if abs(value) < 0.9995 else f"{100 * value:.0f}"
