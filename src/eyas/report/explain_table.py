"""An explain record as tables on a terminal; reads the record alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.report.cycle_grid import cycle_grid, light_table

MOST_ROWS = 8
"""Changes and gaps that are shown; the record has more."""


def show(console: Console, record: dict[str, Any]) -> None:
    """Print a record of `eyas explain`."""
    console.print(render(record))


def render(record: dict[str, Any]) -> RenderableType:
    """Tables of the cycle, of a plain step, of what they were run on, and the verdict."""
    parts: list[RenderableType] = []
    if record["simulated"]:
        parts.append(Text(f"SIMULATED: {record['simulated']}", style="bold red"))
    parts += [Text(note, style="yellow") for note in record["notes"]]
    parts += _cycle(record, "Cycle" if record["decode"] else "Decode step")
    if record["decode"]:
        parts += _cycle(record["decode"], "Plain decode step")
    if record["collectives"]:
        parts.append(_ranks(record))
    parts += [_acceptance(record)] if record["decode"] else []
    parts.append(_by(record["by_context"], "context", "By context length"))
    if len(record["by_batch"]) > 1:
        parts.append(_by(record["by_batch"], "batch", "By requests together"))
    if record["lesson"]:
        parts.append(_lesson(record["lesson"]))
    if record["rows"]:
        parts.append(_rows(record["rows"]))
    return Group(*parts, Text(record["verdict"], style="bold green"))


def _cycle(side: dict[str, Any], title: str) -> list[RenderableType]:
    watching = side["watching"]
    watched = (
        f"{watching['unwatched_cycles']} cycles unwatched, {watching['watched_cycles']} watched "
        f"({watching['how']}), which costs {watching['overhead']:+.1%}"
    )
    if "dearest" in watching:
        watched += f", and {watching['dearest_overhead']:+.1%} where {watching['dearest']} begins"
    if "profiled_ms" in watching:
        watched += f"; under the profiler a cycle takes {watching['profiled_ms']:.3f} ms"
    about = f"{side['startup']['words']} {watched}."
    return [cycle_grid(side, f"{title}, ms"), _cells(side), _counts(side), Text(about, style="dim")]


def _cells(side: dict[str, Any]) -> Table:
    """The cells that take time, with what they move and must take."""
    columns = ("stage", "component", "ms", "launches", "MB", "GFLOP", "floor", "times")
    table = light_table("Cells against their floors", *columns, words=2)
    for row in sorted(side["cells"], key=lambda row: -row["ms"]):
        if row["ms"] < 0.005 * side["cycle_ms"]:
            continue
        moved = None if row["gb"] is None else row["gb"] * 1e3
        table.add_row(
            row["stage"],
            row["component"],
            _ms(row["ms"]),
            _number(row["launches"], 0),
            _number(moved, 1),
            _number(row["gflop"], 2),
            _ms(row["floor_ms"]),
            _number(row["over_floor"], 1 if (row["over_floor"] or 0) < 100 else 0),
        )
    return table


def _counts(side: dict[str, Any]) -> Text:
    lines = []
    if side["graph_fraction"] is not None:
        lines.append(
            f"kernels {side['kernels']:.0f}, graph launches {side['graph_launches']:.2g}, launches "
            f"and copies outside graphs {side['launches']:.0f}, device time in graphs "
            f"{side['graph_fraction']:.0%}"
        )
        syncs = [f"{n} {v['count']:.2g} x ({v['ms']:.3f} ms)" for n, v in side["syncs"].items()]
        lines.append(
            f"waits of the host: {', '.join(syncs) or 'none'}; copies to the host "
            f"{side['copies_to_host']:.2g}"
        )
    if side.get("early_ms"):
        lines.append(
            f"kernels are launched early: {side['early_ms']:.3f} ms in which they wait for those "
            "before them are nobody's time"
        )
    if side["graph_reasons"]:
        lines.append(f"without a graph: {', '.join(side['graph_reasons'])}")
    reads = [f"{n} {v['count']:.2g} x in {v['stage']}" for n, v in side["reads"].items()]
    lines.append(f"reads of device values inside the cycle: {', '.join(reads) or 'none'}")
    for gap in side["gaps"][:MOST_ROWS]:
        lines.append(
            f"idle {gap['ms']:.3f} ms between {gap['from']} and {gap['to']} ({gap['cause']})"
        )
    if side["experts"]:
        found = side["experts"]
        lines.append(
            f"distinct experts a layer: {found['mean']:.1f} of {found['experts']}, "
            f"{found['top_k']} a token"
        )
    return Text("\n".join(lines))


def _ranks(record: dict[str, Any]) -> Table:
    shared = record["collectives"]
    columns = ("rank", "cycle", "transfer", "waiting", "comes last")
    table = light_table("Ranks, ms a cycle", *columns)
    for rank in record["ranks"]:
        name = str(rank["rank"])
        waits, last = shared["waiting_ms"].get(name), shared["last"].get(name, 0.0)
        table.add_row(
            name, _ms(rank["cycle_ms"]), _ms(shared["transfer_ms"]), _ms(waits), f"{last:.0%}"
        )
    return table


def _acceptance(record: dict[str, Any]) -> Table:
    found = record["acceptance"]
    columns = ("position", "accepted", "if those before", "cycles of it")
    table = light_table("Acceptance", *columns)
    most = max([*found["histogram"], 1])
    for k, count in enumerate(found["histogram"]):
        share, given = "", ""
        if k < len(found["acceptance_by_position"]):
            share = _percent(found["acceptance_by_position"][k])
            given = _percent(found["conditional_acceptance"][k])
        table.add_row(str(k + 1), share, given, f"{count:>6} {'█' * round(24 * count / most)}")
    return table


def _by(rows: list[dict[str, Any]], key: str, title: str) -> Table:
    table = light_table(title, key, "tok/s", "plain tok/s", "cycle, ms", "accept length", "cycles")
    for row in rows:
        table.add_row(
            f"{row[key]:.0f}",
            _number(row["tok_per_s"], 1),
            _number(row.get("plain_tok_per_s"), 1),
            _ms(row["cycle_ms"]),
            _number(row["accept_length"], 2),
            str(row["cycles"]),
        )
    return table


def _lesson(found: dict[str, Any]) -> RenderableType:
    table = light_table("Lesson: a host clock around each stage", "", "it says", "the truth")
    for name, one in found["stages"].items():
        table.add_row(name, _ms(one["host_ms"]), _ms(one["true_ms"]))
    return Group(table, Text(found["words"]))


def _rows(rows: list[dict[str, Any]]) -> Table:
    columns = ("change", "what it costs", "cycle, ms", "tok/s", "speed-up", "gain")
    table = light_table("What would change it", *columns, words=2)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row["option"],
            row["costs"],
            _ms(row["cycle_ms"]),
            _number(row["tok_per_s"], 1),
            _number(row["speedup"], 2),
            _number(row["gain"], 2),
        )
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
