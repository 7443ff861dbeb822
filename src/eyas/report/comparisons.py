"""Figures that hold one thing against another: runs, options, predictions and what was measured."""

from __future__ import annotations

from typing import Any

from eyas.report.components import DEVICE
from eyas.report.figures import Bar, bars, colour, legend, table
from eyas.report.markup import Html, arrows, joined, rate, short, tag

Record = dict[str, Any]
PASSES = ("decode", "draft", "verify", "extend")
LEAST_MS = 0.0005
"""What is less rounds to 0.000 ms."""


def what_if(record: Record) -> Html | None:
    """Rates that other settings or kernels would have."""
    rows = sorted(record.get("rows") or [], key=lambda r: -float(r.get("tok_per_s") or 0.0))
    if not rows:
        return None
    base = next((r for r in rows if str(r["option"]).startswith("as ")), rows[0])
    mark = float(base.get("tok_per_s") or 0.0)
    drawn = []
    for r in rows:
        speed = r.get("tok_per_s")
        more = (
            f", {speed / mark:.2f} x {base['option']}" if speed and mark and r is not base else ""
        )
        drawn.append(
            Bar(
                name=str(r["option"]),
                parts=[(colour("accept" if r is base else "verify"), float(speed or 0.0))],
                text=f"{rate(speed)} tok/s{more}" if speed else "unknown",
                mark=mark,
            )
        )
    keys = {
        "decode_ms": short,
        "cycle_ms": short,
        "tok_per_s": rate,
        "speedup": short,
        "break_even": short,
    }
    cells = [
        [str(r["option"]), str(r.get("costs", "")), *(put(r.get(k)) for k, put in keys.items())]
        for r in rows
    ]
    head = ("option", "costs", "decode, ms", "cycle, ms", "tok/s", "speed-up", "break-even")
    about = f"tokens a second, the best first; a line marks {base['option']}"
    return joined(tag("p", about, class_="unit"), bars(drawn), table(head, cells, words=2))


def causes(record: Record) -> Html | None:
    """What makes two runs differ, with its evidence."""
    found = record.get("causes")
    if not found:
        return None
    rows = [
        Bar(
            name=str(c["name"]),
            parts=[("warn" if c["ms"] > 0 else "good", abs(float(c["ms"])))] if c["ms"] else [],
            text=f"{c['ms']:+.3f} ms" if c["ms"] else "no time of its own",
            note=arrows(str(c["evidence"])),
        )
        for c in found
    ]
    about = f"{record.get('unit', 'ms')}, B less A, the largest first"
    left = [
        f"{name} {record[key]:+.3f} ms"
        for name, key in (("smaller differences", "smaller_ms"), ("unexplained", "unexplained_ms"))
        if abs(record.get(key) or 0.0) >= LEAST_MS
    ]
    rest = tag("p", f"Besides: {', '.join(left)}.") if left else ""
    return joined(tag("p", about, class_="unit"), bars(rows), rest)


def passes(record: Record) -> Html | None:
    """What each pass of a cycle, and a decode step, takes for each component."""
    found = [row for row in record.get("breakdown") or [] if row["component"] in DEVICE]
    if not found:
        return None
    rows = []
    for name in PASSES:
        parts = [(colour(row["component"]), row[name]) for row in found]
        rows.append(Bar(name=name, parts=parts, text=f"{sum(ms for _, ms in parts):.3f} ms"))
    names = [part for part in DEVICE if any(row["component"] == part for row in found)]
    cells = [[row["component"], *(f"{row[name]:.3f}" for name in PASSES)] for row in found]
    return joined(bars(rows), legend(names), table(("ms", *PASSES), cells))


def needed(record: Record) -> Html | None:
    """What would explain that an observed run took longer than was predicted."""
    found = record.get("needed")
    if not found:
        return None
    cells = [
        [
            str(row["what"]),
            short(row["over_ms"]),
            f"{short(row['all_reduce_us'])} ({row['times']:.1f} x)",
            short(row["stall_ms"]),
            f"{short(row['tok_per_s'])} ({short(row['observed_tok_per_s'])})",
        ]
        for row in found
    ]
    head = ("observed", "ms over the prediction", "or us an all-reduce", "or a stall, ms")
    return table((*head, "tok/s then (observed)"), cells)


def published(record: Record) -> Html | None:
    """Predictions beside figures that were measured, by group."""
    groups = record.get("figures")
    if not groups:
        return None
    parts = []
    for name, rows in groups.items():
        cells = [
            [
                str(row["what"]),
                " .. ".join(short(v) for v in dict.fromkeys((row["low"], row["high"]))),
                f"{short(row['predicted'])} {row['unit']}",
                f"{row['error']:+.0%}",
            ]
            for row in rows
        ]
        parts.append(tag("h3", name))
        sources = "; ".join(dict.fromkeys(str(row["source"]) for row in rows))
        parts.append(table(("figure", "measured", "predicted", "error"), cells))
        parts.append(tag("p", sources, class_="unit"))
    return joined(*parts)
