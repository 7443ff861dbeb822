"""Figures of a report: rows of bars, timelines, curves, tables; from plain values.

Marks are SVG without text, stretched to the width there is; every word and number is HTML beside
them, so that a browser lays text out and no two texts overlap at any width. Colours are classes
that `style.py` gives in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eyas.report.components import COMPONENTS, STAGES
from eyas.report.markup import Html, breakable, joined, number, short, tag

WIDTH, HEIGHT = 1000.0, 20.0
"""User units of a bar's drawing."""
CURVE_HEIGHT = 300.0
TICKS = 5
NARROW = 3
"""Columns that a phone has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of a bar figure."""

    name: str
    parts: Sequence[tuple[str, float]]
    """Colour class and value of each part of the bar, from the left."""
    text: str
    """What stands at the bar's end."""
    mark: float | None = None
    """A value to mark across the bar, as its floor."""
    tip: str = ""
    note: str = ""
    """What is said below the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A row of a timeline."""

    name: str
    bars: Sequence[tuple[float, float, str, str]]
    """Start, length, colour class and tip of each."""
    kind: str = "work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = field(default="s0")


def colour(name: str) -> str:
    """The colour class of a component or stage."""
    if name in COMPONENTS:
        return f"c{COMPONENTS.index(name)}"
    return f"s{STAGES.index(name)}" if name in STAGES else "other"


def drawing(*marks: Html, height: float = HEIGHT, class_: str = "bar", label: str = "") -> Html:
    """An SVG that is stretched to its place."""
    box = f"0 0 {number(WIDTH)} {number(height)}"
    about = {"role": "img", "aria_label": label} if label else {"aria_hidden": "true"}
    return tag("svg", *marks, viewBox=box, preserveAspectRatio="none", class_=class_, **about)


def rect(x: float, width: float, class_: str, tip: str = "", height: float = HEIGHT) -> Html:
    """A rectangle of full height, at least a hair wide."""
    inside = [tag("title", tip)] if tip else []
    return tag(
        "rect",
        *inside,
        x=number(x),
        y="0",
        width=number(max(width, 0.2)),
        height=number(height),
        class_=class_,
    )


def bars(rows: Sequence[Bar], most: float | None = None) -> Html:
    """Rows of bars on one scale, up to `most` or the largest value."""
    values = [sum(v for _, v in row.parts) for row in rows]
    values += [row.mark for row in rows if row.mark is not None]
    scale = WIDTH / max(most or 0.0, *values, 1e-12)
    lines = []
    for row in rows:
        at, marks = 0.0, []
        for class_, value in row.parts:
            marks.append(rect(at * scale, value * scale, class_, row.tip))
            at += value
        if row.mark is not None:
            marks.append(rect(min(row.mark * scale, WIDTH - 3.0), 3.0, "mark"))
        cells = [
            tag("span", breakable(row.name), class_="name"),
            drawing(*marks),
            tag("span", row.text, class_="value"),
            *([tag("span", row.note, class_="note")] if row.note else []),
        ]
        lines.append(tag("div", *cells, class_="row"))
    return tag("div", *lines, class_="bars")


def timeline(strips: Sequence[Strip], length: float, unit: str) -> Html:
    """Strips on one axis from 0 to `length`."""
    scale = WIDTH / max(length, 1e-12)
    lines = [
        tag(
            "div",
            tag("span", strip.name, class_="name"),
            drawing(
                *(rect(x * scale, w * scale, c, tip) for x, w, c, tip in strip.bars),
                class_=f"bar {strip.kind}",
                label=strip.name,
            ),
            class_="strip",
        )
        for strip in strips
    ]
    return tag("div", *lines, axis([0.0, length], unit), class_="timeline")


def axis(span: Sequence[float], unit: str) -> Html:
    """Numbers at even places from `span[0]` to `span[1]`; small screens show every second."""
    first, last = span
    step = (last - first) / (TICKS - 1)
    values = [first + i * step for i in range(TICKS)]
    texts = [f"{value:,.0f}" if last >= 100 else short(value) for value in values]
    texts[-1] += f" {unit}"
    places = [f"left:{number(100 * i / (TICKS - 1))}%" for i in range(TICKS)]
    spans = (tag("span", text, style=place) for text, place in zip(texts, places, strict=True))
    return tag("div", *spans, class_="axis")


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most` or above it, three to six of them."""
    rough = max(most, 1e-12) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1.0, 2.0, 2.5, 5.0, 10.0) if k * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def curves(lines: Sequence[Line], x_name: str, y_name: str) -> Html:
    """Curves over a common axis, their points marked; y goes from 0 to a round number."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, wide = min(xs), max(max(xs) - min(xs), 1e-12)
    scale = ticks(max(ys))
    marks = []
    for value in scale:
        at = number((1 - value / scale[-1]) * CURVE_HEIGHT)
        marks.append(tag("line", x1="0", y1=at, x2=number(WIDTH), y2=at, class_="grid"))
    for line in lines:
        places = [
            f"{number((x - left) / wide * WIDTH)},{number((1 - y / scale[-1]) * CURVE_HEIGHT)}"
            for x, y in sorted(line.points)
        ]
        marks.append(tag("polyline", points=" ".join(places), class_=f"curve {line.colour}"))
        dots = " ".join(f"M{place}h0.01" for place in places)
        marks.append(tag("path", d=dots, class_=f"curve dots {line.colour}"))
    numbers = [f"{value:,.10g}" for value in reversed(scale)]
    return joined(
        tag("p", y_name, class_="unit"),
        tag(
            "div",
            tag("div", *(tag("span", text) for text in numbers), class_="scale"),
            drawing(*marks, height=CURVE_HEIGHT, class_="plot", label=f"{y_name} by {x_name}"),
            axis([left, max(xs)], x_name),
            class_="plotted",
        ),
    )


def legend(names: Sequence[str], values: Mapping[str, str] | None = None, title: str = "") -> Html:
    """Colours with their names behind a `title`, and a value behind each that has one."""
    values = values or {}
    items = [tag("li", title, class_="quiet")] if title else []
    items += [
        tag(
            "li",
            drawing(rect(0.0, WIDTH, colour(name)), class_="swatch"),
            tag("span", f"{name} {values.get(name, '')}".strip()),
        )
        for name in names
    ]
    return tag("ul", *items, class_="legend")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, code: bool = False
) -> Html:
    """A table whose columns behind the first `words` are numbers, and whose first may be code.

    Where it has many, a small screen shows each row as a name with the other columns below it.
    """

    def cell(kind: str, i: int, text: str) -> Html:
        label = head[i] if kind == "td" and i else None
        return tag(kind, text, class_="number" if i >= words else None, data_label=label)

    return tag(
        "div",
        tag(
            "table",
            tag("thead", tag("tr", *(cell("th", i, text) for i, text in enumerate(head)))),
            tag(
                "tbody",
                *(tag("tr", *(cell("td", i, t) for i, t in enumerate(row))) for row in rows),
            ),
        ),
        class_=" ".join(("scroll", *["code"] * code, *["wide"] * (len(head) > NARROW))),
    )
