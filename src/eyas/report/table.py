"""A bench record as tables on a terminal; reads the record alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

STAGES = ("draft", "verify", "accept", "commit", "extend", "collect", "host")
APART = 1.25
"""How much more than a step its stages may take, timed one by one, and still tell of it."""


def show(console: Console, record: dict[str, Any]) -> None:
    """Print a record of `bench`."""
    console.print(render(record))


def render(record: dict[str, Any]) -> RenderableType:
    """The record's tables and closing lines."""
    made_up = record.get("simulated")
    parts: list[RenderableType] = [
        *([Text(f"SIMULATED: {made_up}", style="bold red")] if made_up else []),
        _warmup(record["warmup"]),
        _rates(record),
        _stages(record["stages_ms"]),
        *_apart(record),
        _acceptance(record),
        *_closing(record),
    ]
    return Group(*parts)


def algorithm(record: dict[str, Any]) -> str:
    """The name of the speculating side."""
    name: str = record.get("flags", {}).get("speculation", {}).get("algorithm", "speculation")
    return {"EAGLE3": "EAGLE-3", "NGRAM": "n-gram"}.get(name, name)


def _warmup(warmup: dict[str, Any]) -> Text:
    sides = []
    for name, side in warmup.items():
        steady = "stable" if side["stable"] else "NOT stable (a busy machine?)"
        sides.append(f"{name} {steady} after {side['runs']} runs")
    return Text("warm-up: " + ", ".join(sides), style="dim")


def _rates(record: dict[str, Any]) -> Table:
    plain, spec = record["plain"], record["spec"]
    table = Table("", "plain", algorithm(record), "ratio", title="Plain decoding and speculation")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: Sequence[tuple[str, Any, Any, Any]] = (
        ("decode tok/s", plain["tok_per_s"], spec["tok_per_s"], record["speedup"]),
        (
            "end-to-end tok/s",
            plain["end_to_end_tok_per_s"],
            spec["end_to_end_tok_per_s"],
            record["speedup_end_to_end"],
        ),
        ("first token, ms", plain["first_token_ms"], spec["first_token_ms"], None),
        ("step or cycle, ms", plain["step_ms"], spec["step_ms"], record["break_even"]),
    )
    for name, left, right, ratio in rows:
        table.add_row(name, _number(left, 1), _number(right, 1), _number(ratio, 2))
    length = _number(spec["accept_length"], 2)
    table.add_row("tokens a cycle", "1.00", length, length, style="bold")
    return table


def _stages(stages: dict[str, dict[str, float]]) -> Table:
    names = [name for name in STAGES if any(name in side for side in stages.values())]
    table = Table("", *names, "sum", title="Stages of a cycle, ms (medians, synchronised)")
    for column in table.columns[1:]:
        column.justify = "right"
    for side, values in stages.items():
        cells = [_number(values.get(name), 2) for name in names]
        table.add_row(side, *cells, _number(sum(values.values()), 2))
    return table


def _apart(record: dict[str, Any]) -> list[Text]:
    """What stages do not tell, where they take longer than the step they are of."""
    lines = []
    for side, values in record["stages_ms"].items():
        total, step = sum(values.values()), record[side]["step_ms"]
        if step and total > APART * step:
            lines.append(
                f"{side}: stages add up to {total:.1f} ms, but a step takes {step:.1f}. Timed one "
                "by one they were held up (a busy machine, or graphs that they can't have): take "
                "neither them nor verify over decode from here"
            )
    return [Text(line, style="yellow") for line in lines]


def _acceptance(record: dict[str, Any]) -> Table:
    spec, counts = record["spec"], record["histogram"]
    table = Table(
        "position", "accepted", "if those before were", "cycles of this length", title="Acceptance"
    )
    most = max([*counts, 1])
    for k, count in enumerate(counts):
        share, given = "", ""
        if k < len(spec["acceptance_by_position"]):
            share = _percent(spec["acceptance_by_position"][k])
            given = _percent(spec["conditional_acceptance"][k])
        bar = "█" * round(24 * count / most)
        table.add_row(str(k + 1), share, given, f"{count:>6} {bar}")
    return table


def _closing(record: dict[str, Any]) -> list[Text]:
    lines = [
        f"verify of {record['num_nodes']} nodes over decode of 1: "
        f"{_number(record['verify_over_decode'], 2)}",
        f"break-even accept length (cycle over plain step): {_number(record['break_even'], 2)}, "
        f"reached {_number(record['spec']['accept_length'], 2)}",
        f"speed-up, median of {record['num_pairs']} pairs: {_number(record['speedup'], 2)}",
    ]
    texts = [Text(line) for line in lines]
    if "drafts_without_noise" in record:
        other = record["drafts_without_noise"]
        texts.append(
            Text(
                f"accept length with shared noise {_number(record['spec']['accept_length'], 2)}, "
                f"of drafts without noise {_number(other['accept_length'], 2)}"
            )
        )
    texts += _row_check(record.get("row_check", {}))
    if record["tokens_equal"]:
        texts.append(Text("texts: equal token by token in every pair", style="bold green"))
    else:
        count = len(record["differing_pairs"])
        texts.append(Text(f"texts: {count} pairs DIFFER, which is a defect", style="bold red"))
    return texts


def _row_check(check: dict[str, Any]) -> list[Text]:
    """What was found at start of rows that depend on each other."""
    if not check.get("counts"):
        return []
    found, counts = check["dependent"], check["counts"]
    text = Text(
        f"rows of {check['products']} kinds of products, {counts[0]} to {counts[-1]} rows a pass: "
        + ("independent of each other" if not found else "")
    )
    for one in found:
        text.append(f"{one['name']} depends on others from {one['rows']} rows on; ", style="yellow")
    return [text.append(f" (tried in {check['seconds']:.2f} s)", style="dim")]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
