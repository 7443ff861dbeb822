"""HTML and SVG elements as text that is escaped once: what is no `Html` yet is escaped."""

from __future__ import annotations

import html
import re
from typing import Any

VOID = {"meta", "rect", "line", "polyline", "circle", "path", "br", "wbr"}
"""Elements that are written without content and closed at once."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """`value` as HTML."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def tag(name: str, /, *children: object, **attributes: Any) -> Html:
    """An element; `class_` is class, `a_b` is a-b, an attribute that is None is left out."""
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(given)}"
    inside = "".join(escaped(child) for child in children)
    if name in VOID and not inside:
        return Html(f"{start}/>" if name != "meta" else f"{start}>")
    return Html(f"{start}>{inside}</{name}>")


def joined(*parts: object) -> Html:
    """Parts one behind the other."""
    return Html("".join(escaped(part) for part in parts))


def arrows(text: str) -> str:
    """Text whose arrows are one character, so that none is broken in two."""
    return text.replace("->", "\N{RIGHTWARDS ARROW}")


def breakable(name: str) -> Html:
    """A name that may be broken behind its joints, where it is too long for its place."""
    return Html("<wbr/>".join(escaped(part) for part in re.findall(r"[^_/.]*[_/.]|[^_/.]+", name)))


def number(value: float) -> str:
    """A coordinate: short, never in exponents."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def rate(value: float | None) -> str:
    """Tokens a second, which readers compare with others close by."""
    return "" if value is None else f"{value:,.{0 if value >= 1000 else 1}f}"


def short(value: float | None) -> str:
    """A quantity for readers: three digits that count, thousands apart; none for None."""
    if value is None:
        return ""
    size = abs(value)
    digits = 0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 0.095 else 3
    return f"{value:,.{digits}f}"
