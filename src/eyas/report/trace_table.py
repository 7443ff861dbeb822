"""A trace record as tables on a terminal; reads the record alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.report.cycle_grid import cycle_grid, light_table
from eyas.report.traces.words import ranked

MOST_ROWS = 8
"""Gaps and unknown kernels that are shown; the record has more."""
EARLY = 0.005
"""Share of device time from which on waiting for the kernel before is told."""


def show(console: Console, record: dict[str, Any]) -> None:
    """Print a record of `eyas trace`."""
    console.print(render(record))


def render(record: dict[str, Any]) -> RenderableType:
    """The record's runs, each with its tables and its verdict."""
    parts: list[RenderableType] = []
    for run in (*record["beside"], record):
        parts += _run(run)
    return Group(*parts)


def headline(run: dict[str, Any]) -> str:
    """One line that says what was traced."""
    told = [run["engine"], run["gpu"], run["kind"] if run["kind"] != "unknown" else None]
    for name, key in (("layers", "layers"), ("requests", "batch"), ("nodes", "nodes")):
        if run[key]:
            told.append(f"{run[key]:g} {name}")
    if len(run["ranks"]) > 1:
        told.append(f"{len(run['ranks'])} ranks")
    return ", ".join([", ".join(run["files"]), *filter(None, told)])


def _run(run: dict[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(headline(run), style="bold")]
    parts += [Text(note, style="yellow") for note in run["notes"]]
    if run["cycle_ms"] is None:
        parts.append(_totals(run))
    else:
        cycles = run["cycles"]
        parts.append(
            Text(
                f"{cycles['steady']} steady cycles of {cycles['found']}, found by "
                f"{cycles['found_by']}: {cycles['min_ms']:.2f} to {cycles['max_ms']:.2f} ms, "
                f"median {cycles['median_ms']:.2f}",
                style="dim",
            )
        )
        parts += [cycle_grid(run, "Milliseconds a cycle", idle="idle before"), _counts(run)]
        parts += [_gaps(run)] if run["gaps"] else []
    if run["unknown"]:
        parts.append(_unknown(run))
    if run["collectives"]:
        parts.append(_ranks(run))
    if run.get("against_decode"):
        parts.append(_against(run["against_decode"]))
    return [*parts, Text(run["verdict"], style="bold green"), Text()]


def _counts(run: dict[str, Any]) -> Text:
    syncs = [f"{n} {v['count']:.2g} x ({v['ms']:.3f} ms)" for n, v in run["syncs"].items()]
    lines = [
        f"kernels {run['kernels']:.0f}, graph launches {run['graph_launches']:.2g}, launches and "
        f"copies outside graphs {run['launches']:.0f}, device time in graphs "
        f"{run['graph_fraction']:.0%}",
        f"waits of the host: {', '.join(syncs) or 'none'}; copies to the host "
        f"{run['copies_to_host']:.2g}",
        "idle: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in ranked(run["idle"]) if ms > 0),
        f"device time whose component is known {run['classified_fraction']:.2%}, "
        f"{run['by_place_fraction']:.1%} by its place alone; of the trace's "
        f"{run['totals']['device_ms']:.3f} ms",
    ]
    if run["early_ms"] >= EARLY * run["device_ms"]:
        lines.append(
            f"of which waiting for the kernel before (early launch): {run['early_ms']:.3f} ms of "
            f"the cycle's {run['device_ms']:.3f} ms of device time"
        )
    return Text("\n".join(lines))


def _totals(run: dict[str, Any]) -> Table:
    table = light_table("Device time of the whole trace", "", "ms")
    for name, ms in ranked(run["totals"]["components"]):
        table.add_row(name, _ms(ms))
    table.add_row("sum", _ms(run["totals"]["device_ms"]), style="bold")
    return table


def _gaps(run: dict[str, Any]) -> Table:
    table = light_table("Idle stretches", "between", "because of", "count", "ms a cycle")
    for gap in run["gaps"][:MOST_ROWS]:
        where = f"{gap['from']} and {gap['to']}"
        table.add_row(where, gap["cause"], f"{gap['count']:.1f}", _ms(gap["ms"]))
    return table


def _unknown(run: dict[str, Any]) -> Table:
    table = light_table("Kernels that no rule knows, of the whole trace", "name", "count", "ms")
    for kernel in run["unknown"][:MOST_ROWS]:
        table.add_row(kernel["name"][:80], f"{kernel['count']:.0f}", _ms(kernel["ms"]))
    rest = run["unknown"][MOST_ROWS:]
    if rest:
        count, ms = sum(k["count"] for k in rest), sum(k["ms"] for k in rest)
        table.add_row(f"{len(rest)} more", f"{count:.0f}", _ms(ms))
    return table


def _ranks(run: dict[str, Any]) -> Table:
    shared = run["collectives"]
    columns = ("rank", "cycle", "device", "idle", "transfer", "waiting", "comes last")
    table = light_table("Ranks, ms a cycle", *columns)
    for rank in run["ranks"]:
        name = str(rank["rank"])
        values = [rank["cycle_ms"], rank["device_ms"], rank["idle_ms"], shared["transfer_ms"]]
        waits, last = shared["waiting_ms"][name], shared["last"][name]
        table.add_row(name, *map(_ms, values), _ms(waits), f"{last:.0%}")
    return table


def _against(beside: dict[str, Any]) -> Table:
    table = light_table("Verify over decode, device ms", "", "more")
    for part in beside["extra"]:
        table.add_row(part["name"], f"{part['ms']:+.3f}")
    over = beside["verify_ms"] - beside["decode_ms"]
    table.add_row("sum", f"{over:+.3f} ({beside['verify_over_decode']:.2f} x)", style="bold")
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
