"""HTML and SVG elements as text that is escaped once: what is no `Html` yet is escaped."""

from __future__ import annotations

import html
from typing import Any

VOID = {"meta", "rect", "line", "polyline", "circle", "path", "br"}
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


def number(value: float) -> str:
    """A coordinate: short, never in exponents."""
    return f"{value:.3f}".rstrip("0").rstrip(".")
