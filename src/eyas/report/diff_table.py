"""A diff record as a table on a terminal; reads the record alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text


def show(console: Console, record: dict[str, Any]) -> None:
    """Print a record of `eyas diff`: causes that explain time, then what differs besides."""
    table = Table("cause", record["unit"], "evidence", title="What differs", title_justify="left")
    table.columns[1].justify = "right"
    for cause in record["causes"]:
        ms = f"{cause['ms']:+.3f}" if cause["ms"] else ""
        table.add_row(cause["name"], ms, cause["evidence"])
    table.add_section()
    for name, key in (("smaller differences", "smaller_ms"), ("unexplained", "unexplained_ms")):
        if record[key] is not None:
            table.add_row(name, f"{record[key]:+.3f}", "")
    if record["difference_ms"] is not None:
        table.add_row("difference", f"{record['difference_ms']:+.3f}", "", style="bold")
    console.print(Group(table, Text(record["verdict"], style="bold green")))
