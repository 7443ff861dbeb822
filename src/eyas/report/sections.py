"""Which figures a record has: each section looks for the keys it draws, whatever the command.

A command gains a figure by giving its record the keys; a new kind of figure is one function here,
added to `SECTIONS`. The keys, all optional:

- `components`, `cycle_ms`, `device_ms`, `idle_ms`, with `stages` (each with `components`) and
  `floors`, ms by component;
- `ranks`, each with `rank` and `timeline` as `traces/timeline.py` writes it;
- `stages_ms`: ms by stage of each side, as a bench has them;
- `by_context`: rows of `context`, `tok_per_s`;
- `spec` with `acceptance_by_position` and `conditional_acceptance`, `histogram`;
- `rows` of `option`, `decode_ms`, `cycle_ms`, `tok_per_s`, `speedup`, `break_even`;
- `causes` of `name`, `ms`, `evidence`;
- `breakdown`, `needed` and `figures` as `eyas plan --starting-case` has them;
- `cells`, `by_batch`, `lesson` as `eyas explain` has them;
- `against_decode`, `idle`, `collectives`, `unknown`, `kernels_by_time` as `eyas trace` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas.report.comparisons import LEAST_MS, causes, needed, passes, published, what_if
from eyas.report.components import DEVICE, STAGES
from eyas.report.figures import (
    Bar,
    Line,
    Strip,
    bars,
    colour,
    curves,
    legend,
    table,
    timeline,
)
from eyas.report.markup import Html, joined, short, tag

MOST_KERNELS, MOST_NAME = 15, 110
FEW = 0.005
"""Share of a cycle below which a stream has no lane of its own."""
FLOOR = "what the bytes and operations must take on this machine"
SIDES = {"plain": "plain decoding", "spec": "speculation"}
LEAST_SHOWN = 0.005
"""Milliseconds of a stage that has a place in a legend of two decimals."""
Record = dict[str, Any]


def sections(record: Record) -> list[Html]:
    """The sections that a record has keys for, in order."""
    return [
        tag("section", tag("h2", title), content, id=name, class_="figure")
        for name, title, draw in SECTIONS
        if (content := draw(record)) is not None
    ]


def _timeline(record: Record) -> Html | None:
    drawn = [r for r in record.get("ranks") or [] if r.get("timeline")]
    if not drawn:
        return None
    length = max(r["timeline"]["length_ms"] for r in drawn)
    strips, used, stages = [], set(), set()
    for rank in drawn:
        prefix = f"rank {rank['rank']}, " if len(drawn) > 1 else ""
        lanes = rank["timeline"]["streams"]
        busiest = max(lanes, key=lambda s: sum(bar[1] for bar in lanes[s]))
        strips.append(Strip(name=f"{prefix}stages", bars=_stage_bars(lanes[busiest]), kind="stage"))
        for streams, found in _lanes(lanes, busiest, length):
            busy, launches = sum(bar[1] for bar in found), sum(bar[4] for bar in found)
            strips.append(
                Strip(
                    name=f"{prefix}{streams}: {busy:.2f} ms in {launches} launches",
                    bars=[
                        (start, ms, colour(part), f"{stage}, {part}: {1e3 * ms:.1f} us")
                        for start, ms, part, stage, _ in found
                    ],
                )
            )
            used |= {bar[2] for bar in found}
            stages |= {bar[3] for bar in found}
    return joined(
        timeline(strips, length, "ms"),
        legend([s for s in STAGES if s in stages], title="stages:"),
        legend([c for c in DEVICE if c in used], title="streams:"),
    )


def _lanes(
    lanes: dict[str, list[list[Any]]], busiest: str, length: float
) -> list[tuple[str, list[list[Any]]]]:
    """Streams with their bars; those that hardly work share the last lane."""
    least = FEW * length
    own = {s for s, bars in lanes.items() if s == busiest or sum(b[1] for b in bars) >= least}
    rest = [s for s in lanes if s not in own]
    found = [(f"stream {s}", bars) for s, bars in lanes.items() if s in own]
    if rest:
        name = f"stream{'s' if len(rest) > 1 else ''} {', '.join(rest)}"
        found.append((name, sorted((b for s in rest for b in lanes[s]), key=lambda b: b[0])))
    return found


def _stage_bars(lane: list[list[Any]]) -> list[tuple[float, float, str, str]]:
    """Stretches of one stage, from its first kernel to its last, of a stream's bars."""
    found: list[list[Any]] = []
    for start, ms, _, stage, _ in lane:
        if found and found[-1][2] == stage:
            found[-1][1] = start + ms
        else:
            found.append([start, start + ms, stage])
    return [(a, b - a, colour(s), f"{s}: {b - a:.3f} ms") for a, b, s in found]


def _components(record: Record) -> Html | None:
    parts = record.get("components")
    cycle = record.get("cycle_ms")
    if not parts or not cycle:
        return None
    floors = record.get("floors") or {}
    stages = record.get("stages") or {}
    rows = []
    for name, ms in sorted(parts.items(), key=lambda item: -item[1]):
        split = [
            (colour(stage), stages[stage]["components"][name])
            for stage in STAGES
            if name in stages.get(stage, {}).get("components", {})
        ]
        text = f"{ms:.3f} ms, {ms / cycle:.1%}"
        if floors.get(name):
            text += f", {ms / floors[name]:.{2 if ms < 10 * floors[name] else 0}f} x floor"
        rows.append(
            Bar(name=name, parts=split or [(colour(name), ms)], text=text, mark=floors.get(name))
        )
    idle = record.get("idle_ms")
    if idle is not None:
        rows.append(Bar(name="idle", parts=[("other", idle)], text=_share(idle, cycle)))
    told = {
        name: f"{one['device_ms']:.2f} ms"
        for name, one in stages.items()
        if one["device_ms"] >= LEAST_SHOWN
    }
    about = f"a cycle of {cycle:.3f} ms" + (f", a line marks the floor: {FLOOR}" if floors else "")
    early = record.get("early_ms") or 0.0
    if early and record.get("totals"):
        about += f"; {early:.3f} ms of these are waiting for the kernel before (early launch)"
    return joined(
        tag("p", about, class_="unit"),
        bars(rows),
        legend([s for s in STAGES if s in told], told),
    )


def _idle(record: Record) -> Html | None:
    idle, cycle = record.get("idle"), record.get("cycle_ms")
    if not idle or not cycle:
        return None
    rows = [
        Bar(name=name, parts=[("other", ms)], text=_share(ms, cycle))
        for name, ms in sorted(idle.items(), key=lambda item: -item[1])
        if ms >= LEAST_MS
    ]
    gaps = [
        [f"{g['from']} to {g['to']}", g["cause"], f"{g['count']:.1f}", f"{g['ms']:.3f}"]
        for g in record.get("gaps") or []
        if g["ms"] >= LEAST_MS
    ]
    head = ("between", "because of", "count", "ms a cycle")
    about = tag("p", "what the device waits for, and between which stages", class_="unit")
    return joined(about, bars(rows), table(head, gaps, words=2) if gaps else "") if rows else None


def _stages(record: Record) -> Html | None:
    sides = record.get("stages_ms")
    if not sides:
        return None
    rows = []
    for side, stages in sides.items():
        parts = [(colour(s), stages[s]) for s in STAGES if s in stages]
        tip = ", ".join(f"{s} {stages[s]:.2f}" for s in STAGES if s in stages)
        text = f"{sum(stages.values()):.2f} ms"
        rows.append(Bar(name=SIDES.get(side, side), parts=parts, text=text, tip=tip))
    names = [s for s in STAGES if any(s in side for side in sides.values())]
    cells = [
        [SIDES.get(side, side), *(f"{stages[s]:.2f}" if s in stages else "" for s in names)]
        for side, stages in sides.items()
    ]
    return joined(bars(rows), legend(names), table(["ms a cycle", *names], cells))


def _rates(record: Record) -> Html | None:
    if "plain" not in record or "spec" not in record:
        return None
    rows = []
    for side, name in SIDES.items():
        rate = record[side]["tok_per_s"] or 0.0
        text = f"{rate:.1f} tok/s, step {record[side]['step_ms'] or 0.0:.2f} ms"
        rows.append(Bar(name=name, parts=[(colour("verify"), rate)], text=text))
    cells = [
        [name, *(_plain(record[side].get(key), digits) for side in SIDES)]
        for name, key, digits in (
            ("tok/s, decoding", "tok_per_s", 1),
            ("tok/s, end to end", "end_to_end_tok_per_s", 1),
            ("first token, ms", "first_token_ms", 1),
            ("step or cycle, ms", "step_ms", 2),
            ("tokens a cycle", "accept_length", 2),
        )
    ]
    return joined(bars(rows), table(("", *SIDES.values()), cells))


def _acceptance(record: Record) -> Html | None:
    spec = record.get("spec") or record.get("acceptance") or {}
    shares = spec.get("acceptance_by_position")
    if not shares:
        return None
    given = spec.get("conditional_acceptance") or [None] * len(shares)
    rows = [
        Bar(
            name=f"draft {k + 1}",
            parts=[(colour("accept"), share or 0.0)],
            text=f"{_percent(share)}; of those reached {_percent(given[k])}",
            mark=given[k],
        )
        for k, share in enumerate(shares)
    ]
    counts = record.get("histogram") or spec.get("histogram") or []
    cycles = max(sum(counts), 1)
    lengths = [
        Bar(
            name=f"{k + 1} {'token' if k == 0 else 'tokens'}",
            parts=[(colour("extend"), float(n))],
            text=f"{n:,} cycles, {n / cycles:.0%}",
        )
        for k, n in enumerate(counts)
    ]
    about = "share of cycles that accept it; a line marks its share where all before were accepted"
    counted = (tag("h3", "Tokens a cycle"), bars(lengths)) if lengths else ()
    return joined(tag("p", about, class_="unit"), bars(rows, most=1.0), *counted)


def _by_context(record: Record) -> Html | None:
    rows = [r for r in record.get("by_context") or [] if r.get("tok_per_s")]
    if not rows:
        return None
    points = [(float(r["context"]), float(r["tok_per_s"])) for r in rows]
    cells = [[f"{x:,.0f} tokens", short(y)] for x, y in points]
    curve = [Line(name="tok/s", points=points, colour=colour("verify"))]
    return joined(
        curves(curve, "tokens", "tok/s by context length") if len(points) > 1 else "",
        table(("context", "tok/s"), cells),
    )


def _cells(record: Record) -> Html | None:
    """What each stage does for each component, and what that must take."""
    rows = record.get("cells")
    if not rows:
        return None
    cells = [
        [
            f"{row['stage']}: {row['component']}",
            f"{row['ms']:.3f}",
            _plain(row["launches"], 0),
            short(None if row["gb"] is None else 1e3 * row["gb"]),
            short(row["gflop"]),
            _plain(row["floor_ms"], 3),
            short(row["over_floor"]),
        ]
        for row in sorted(rows, key=lambda row: -row["ms"])
    ]
    head = ("a cycle's", "ms", "launches", "MB", "GFLOP", "floor, ms", "times floor")
    return joined(tag("p", f"floor: {FLOOR}", class_="unit"), table(head, cells))


def _by_batch(record: Record) -> Html | None:
    rows = record.get("by_batch") or []
    if len(rows) < 2:
        return None
    drawn = [
        Bar(
            name=f"{row['batch']} together",
            parts=[(colour("verify"), float(row["tok_per_s"]))],
            text=f"{short(row['tok_per_s'])} tok/s; {row['accept_length']:.2f} tokens "
            f"in {short(row['cycle_ms'])} ms",
        )
        for row in rows
    ]
    return bars(drawn)


def _lesson(record: Record) -> Html | None:
    found = record.get("lesson")
    if not found:
        return None
    rows = []
    for name, one in found["stages"].items():
        for clock, key in (("a host clock", "host_ms"), ("the truth", "true_ms")):
            part = [(colour(name) if key == "true_ms" else "other", one[key])]
            rows.append(Bar(name=f"{name}, {clock}", parts=part, text=f"{one[key]:.3f} ms"))
    return joined(tag("p", found["words"]), bars(rows))


def _against(record: Record) -> Html | None:
    beside = record.get("against_decode")
    if not beside:
        return None
    rows = [
        Bar(
            name=part["name"],
            parts=[(colour(part["name"]) if part["ms"] > 0 else "other", abs(part["ms"]))],
            text=f"{part['ms']:+.3f} ms",
        )
        for part in beside["extra"]
    ]
    about = (
        f"verify {beside['verify_ms']:.3f} ms, decode {beside['decode_ms']:.3f} ms; cycle over "
        f"decode step {beside['break_even']:.2f}, by device time {beside['break_even_device']:.2f}"
    )
    return joined(tag("p", about, class_="unit"), bars(rows))


def _ranks(record: Record) -> Html | None:
    shared = record.get("collectives")
    if not shared:
        return None
    rows = []
    for rank, waiting in shared["waiting_ms"].items():
        text = f"{shared['transfer_ms']:.3f} + {waiting:.3f} ms"
        parts = [(colour("all-reduce"), shared["transfer_ms"]), ("other", waiting)]
        last = f", last in {shared['last'][rank]:.0%}"
        rows.append(Bar(name=f"rank {rank}", parts=parts, text=text + last))
    about = "transfer, and waiting for the last rank in grey, ms a cycle"
    return joined(tag("p", about, class_="unit"), bars(rows))


def _kernels(record: Record) -> Html | None:
    found = record.get("kernels_by_time")
    if not found:
        return None
    cells = [
        [_kernel(k["name"]), k["component"], f"{k['count']:.0f}", f"{k['ms']:.3f}"]
        for k in found[:MOST_KERNELS]
    ]
    return table(("kernel", "component", "launches", "ms a cycle"), cells, words=2, code=True)


def _unknown(record: Record) -> Html | None:
    found = record.get("unknown")
    if not found:
        return None
    cells = [[_kernel(k["name"]), f"{k['count']:.0f}", f"{k['ms']:.3f}"] for k in found]
    return table(("kernel", "launches", "ms of the whole trace"), cells, code=True)


def _kernel(name: str) -> str:
    """A kernel's name without its result type, cut where it is endless."""
    name = name.removeprefix("void ")
    return name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}…"


def _share(ms: float, cycle: float) -> str:
    return f"{ms:.3f} ms, {ms / cycle:.1%}"


def _plain(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


SECTIONS: tuple[tuple[str, str, Callable[[Record], Html | None]], ...] = (
    ("causes", "What differs", causes),
    ("rates", "Plain decoding and speculation", _rates),
    ("timeline", "One cycle by stream", _timeline),
    ("components", "Milliseconds a cycle by component", _components),
    ("stages", "Stages of a cycle", _stages),
    ("verify", "Where verify takes more than decode", _against),
    ("idle", "Idle time by cause", _idle),
    ("ranks", "Collectives by rank", _ranks),
    ("acceptance", "Acceptance by position", _acceptance),
    ("passes", "Passes by component", passes),
    ("needed", "What the observations need", needed),
    ("published", "Predictions beside measured figures", published),
    ("what-if", "What if", what_if),
    ("context", "Tokens a second by context", _by_context),
    ("batch", "Tokens a second by requests together", _by_batch),
    ("cells", "Stages by component against their floors", _cells),
    ("lesson", "What a host clock would have said", _lesson),
    ("kernels", "Kernels by time", _kernels),
    ("unknown", "Kernels that no rule knows", _unknown),
)
"""Name, title and drawing of each, in order."""
