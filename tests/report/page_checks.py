"""What is wrong with a page, as far as its text alone can tell: no browser needed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import combinations

VOID = {"meta", "br"}
WIDE = 0.6
"""Width of a character over the size of its font, about the widest that sans-serif fonts have."""
LINE = 1.2


class Page(HTMLParser):
    """Collects faults, ids and SVG texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.figures: list[str] = []
        self.texts: list[tuple[float, float, float, float, str]] = []
        self._open: list[str] = []
        self._box: list[float] = []
        self._text: dict[str, str] | None = None
        self.feed(text)
        self.faults += [f"{name} is not closed" for name in self._open]
        self.faults += [f"id {i} twice" for i in {i for i in self.ids if self.ids.count(i) > 1}]
        self.faults += overlaps(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.faults.append(f"<{tag}> may load something")
        for key, value in given.items():
            if key in ("href", "src", "srcset", "action", "xlink:href") or key.startswith("on"):
                self.faults.append(f"{key}={value}")
            if re.search(r"nan|inf(?!er)|\d[eE][-+]?\d", value) and key in ("x", "width", "points"):
                self.faults.append(f"{tag} {key}={value} is no coordinate")
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "section":
            self.figures.append(given.get("id", ""))
        if tag == "svg":
            self._box = [float(v) for v in given["viewbox"].split()]
        if tag == "rect":
            self._inside(given)
        if tag == "text":
            self._text = given
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")
        self._text = None if tag == "text" else self._text

    def handle_data(self, data: str) -> None:
        if self._text is not None and data.strip():
            size = float(self._text.get("font-size", 16))
            wide = WIDE * size * len(data.strip())
            anchor = self._text.get("text-anchor", "start")
            left = float(self._text["x"]) - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            base = float(self._text["y"])
            self.texts.append((left, base - size, left + wide, base + LINE * size - size, data))

    def _inside(self, given: dict[str, str]) -> None:
        left, right = float(given["x"]), float(given["x"]) + float(given["width"])
        if left < -0.5 or right > self._box[2] + 1.5:
            self.faults.append(f"rect from {left} to {right} leaves its drawing")


def overlaps(texts: list[tuple[float, float, float, float, str]]) -> list[str]:
    """Pairs of text boxes (left, top, right, bottom, text) that share some area."""
    return [
        f"{a[4]!r} overlaps {b[4]!r}"
        for a, b in combinations(texts, 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


def faults(text: str) -> list[str]:
    """Everything wrong with a page; empty if nothing is."""
    found = Page(text).faults
    for pattern in (r"https?:", r"url\(", r"@import", r"@font-face", r"\bfile:", r"//[a-z]+\."):
        # a trace's kernels may have any name; what the page itself says stands outside of words
        style = re.findall(r"<style>.*?</style>|<[^>]*>", text, flags=re.DOTALL)
        found += [f"{pattern} in {part[:60]}" for part in style if re.search(pattern, part)]
    if not re.match(r'<!doctype html>\n<html lang="en">', text):
        found.append("no doctype or language")
    if 'name="viewport"' not in text:
        found.append("no viewport: phones would shrink it")
    return found


def contrast(one: str, other: str) -> float:
    """Contrast of two colours `#rrggbb`, 1..21 (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
