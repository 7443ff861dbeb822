"""A plan as tables on a terminal; reads the record alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table


def show(console: Console, record: dict[str, Any]) -> None:
    """What the terms of the sum are, what would change them, and what was assumed."""
    profile = record["profile"]
    asked = next(row for row in record["rows"] if not row["group"])
    console.print(_breakdown(record))
    console.print(_options(record, console.width))
    console.print(
        f"as asked on {profile['machine']}: decode {asked['decode_ms']:.2f} ms, "
        f"cycle {asked['cycle_ms']:.2f} ms of which {asked['idle_ms']:.2f} idle, "
        f"{asked['tok_per_s']:.1f} tok/s at {asked['accept_length']:.2f} tokens a cycle; "
        f"break-even {asked['break_even']:.2f}"
    )
    console.print(record["verdict"], style="bold")
    if not record["fits"]:
        size = f"{record['resident_gb']:.0f} GB of weights and pages a rank"
        console.print(f"does not fit: {size}", style="bold red")
    for sentence in record["assumptions"]:
        console.print(f"- {sentence}", style="dim")


def _breakdown(record: dict[str, Any]) -> Table:
    stages = [name for name in record["breakdown"][0] if name != "component"]
    table = Table("ms", *stages, title="Terms of the sum")
    for column in table.columns[1:]:
        column.justify = "right"
    sums = False
    for row in record["breakdown"]:
        if row["component"].startswith("device") and not sums:
            table.add_section()
            sums = True
        cells = [_cell(row["component"], row[stage]) for stage in stages]
        table.add_row(row["component"], *cells)
    return table


def _cell(name: str, value: float) -> str:
    return f"{value:.0f}" if name == "launches" else f"{value:.2f}"


def _options(record: dict[str, Any], width: int) -> Table:
    """Narrow terminals get the columns that a decision needs."""
    columns = WIDE if width >= WIDE_COLUMNS else NARROW
    table = Table("option", *(head for head, _ in columns), title="What if")
    for column in table.columns[1 : 1 + sum(head != "costs" for head, _ in columns)]:
        column.justify = "right"
        column.no_wrap = True
    for row in record["rows"]:
        cells = [show_cell(row) for _, show_cell in columns]
        table.add_row(row["option"], *cells, style="bold" if not row["group"] else None)
    return table


def _field(name: str, digits: int = 2) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[name]:.{digits}f}"


def _gain(row: dict[str, Any]) -> str:
    return f"{100 * (row['gain'] - 1):+.1f} %"


WIDE_COLUMNS = 120
NARROW = (
    ("cycle", _field("cycle_ms")),
    ("tok/s", _field("tok_per_s", 1)),
    ("speed-up", _field("speedup")),
    ("gain", _gain),
)
WIDE = (
    ("decode", _field("decode_ms")),
    ("verify", _field("verify_ms")),
    ("cycle", _field("cycle_ms")),
    ("tokens", _field("accept_length")),
    ("tok/s", _field("tok_per_s", 1)),
    ("speed-up", _field("speedup")),
    ("even at", _field("break_even")),
    ("gain", _gain),
    ("costs", lambda row: str(row["costs"])),
)
"""Heads of columns, and a row's cells."""
