"""A record's page needs nothing else, has all its figures, and no text upon another.

Layout is checked in a headless Chromium where there is one; what the page's own text tells is
checked always.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.report.components import COMPONENTS, STAGES
from eyas.report.html import page
from eyas.report.records import stamped
from eyas.report.style import COMPONENT_COLOURS, DARK, LIGHT, STAGE_COLOURS
from tests.report import samples
from tests.report.browsing import CHROMIUM, looked_at
from tests.report.page_checks import Page, contrast, faults, overlaps

RECORDS: dict[str, tuple[Callable[[Path], dict[str, Any]], set[str]]] = {
    "bench": (lambda _: samples.bench_record(), {"rates", "stages", "acceptance"}),
    "trace": (
        samples.trace_record,
        {
            *("timeline", "components", "verify", "idle", "kernels", "unknown"),
            *(f"beside-0-{name}" for name in ("timeline", "components", "idle", "kernels")),
        },
    ),
    "ranks": (samples.ranks_record, {"timeline", "components", "idle", "ranks", "kernels"}),
    "explain": (
        lambda _: samples.explain_record(),
        {
            *("timeline", "components", "idle", "cells", "acceptance", "context", "batch"),
            *("lesson", "what-if", "beside-0-components"),
        },
    ),
    "plan": (lambda _: samples.plan_record(), {"what-if"}),
    "diff": (
        lambda _: stamped(
            "diff",
            {
                "causes": [
                    {"name": "verify: all-reduce", "ms": 1.5, "evidence": "0.7 ms, was 2.2 ms"},
                    {"name": "faster", "ms": -0.2, "evidence": "less"},
                    {"name": "rank 1: NCCL_P2P_DISABLE", "ms": 0.0, "evidence": "1, was unset"},
                ],
                "verdict": "1.30 ms more, 1.50 of it in all-reduce.",
            },
        ),
        {"causes"},
    ),
}
each = pytest.mark.parametrize("name", sorted(RECORDS))


def page_of(name: str, folder: Path) -> tuple[str, set[str]]:
    make, figures = RECORDS[name]
    return page(make(folder)), figures


@each
def test_a_page_stands_alone_and_has_its_figures(tmp_path: Path, name: str) -> None:
    text, figures = page_of(name, tmp_path)
    assert faults(text) == []
    assert set(Page(text).figures) == figures
    assert len(text) < 3e6


def test_names_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    """Kernel and file names hold angle brackets, and a record may hold anything."""
    record = samples.trace_record(tmp_path)
    record["notes"] = ['<script src="https://a.b/c.js">alert(1)</script>']
    record["engine"] = '"><img src=x>'
    text = page(record)
    assert faults(text) == []
    assert "mystery_kernel&lt;with&lt;a, long&gt;, name&gt;" in text


def test_a_page_of_odd_values(tmp_path: Path) -> None:
    """A run without speculation, without cycles, without anything."""
    for kind in ("bench", "trace", "explain", "plan", "diff"):
        assert faults(page(stamped(kind, {}))) == []
    record = samples.trace_record(tmp_path)
    nothing: dict[str, Any] = {
        "cycle_ms": None,
        "components": {},
        "stages": {},
        "ranks": [],
        "idle": {},
    }
    assert faults(page(record | nothing)) == []
    bench = samples.bench_record()
    bench["spec"] |= {"tok_per_s": None, "acceptance_by_position": [None, None]}
    bench |= {"tokens_equal": False, "simulated": "weights", "histogram": [0, 0, 0]}
    text = page(bench)
    assert faults(text) == []
    assert "DIFFER" in text
    assert "SIMULATED" in text


def test_parts_are_drawn_to_scale(tmp_path: Path) -> None:
    record = samples.explain_record()
    rows = re.findall(r'<div class="row">.*?</div>', page(record), flags=re.DOTALL)
    dense = next(row for row in rows if "dense linear" in row)
    widths = [float(x) for x in re.findall(r'width="([\d.]+)"', dense)]
    assert widths[1] / widths[0] == pytest.approx(3.8 / 0.3, rel=1e-3)
    assert 'class="mark"' in dense
    assert "1.20 x floor" in dense


def test_options_are_compared_with_what_was_asked() -> None:
    """Rows are sorted by gain: the first one is not the base."""
    text = page(samples.plan_record())
    assert "a line marks as asked" in text
    assert "131.0 tok/s, 2.18 x as asked" in text


def test_the_checks_find_what_they_look_for() -> None:
    """A checker that finds nothing proves nothing."""
    start = '<!doctype html>\n<html lang="en"><meta name="viewport">'
    assert faults(f"{start}</html>") == []
    for bad in (
        "<script>1</script>",
        '<img src="https://a.b/c.png">',
        "<style>@import 'a.css'</style>",
        '<p style="background:url(a.png)"></p>',
        '<p onclick="a()"></p>',
        '<i id="a"></i><b id="a"></b>',
        "<div>",
        '<svg viewBox="0 0 10 10"><rect x="5" width="9"/></svg>',
        '<svg viewBox="0 0 9 9"><rect x="nan" width="1"/></svg>',
        '<svg viewBox="0 0 9 9"><text x="0" y="9">long</text><text x="9" y="9">b</text></svg>',
    ):
        assert faults(f"{start}{bad}</html>"), bad
    assert overlaps([(0, 0, 2, 1, "a"), (1, 0, 3, 1, "b"), (3, 0, 4, 1, "c")]) == [
        "'a' overlaps 'b'"
    ]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_seen(scheme: dict[str, str]) -> None:
    """Words at 4.5 to 1, marks at 3 to 1, on whatever they stand."""
    for ground in ("page", "card"):
        for name in ("text", "quiet", "good", "warn"):
            assert contrast(scheme[name], scheme[ground]) >= 4.5, (name, ground)
        for colour in (*COMPONENT_COLOURS, *STAGE_COLOURS, scheme["mark"], scheme["other"]):
            assert contrast(colour, scheme[ground]) >= 3.0, (colour, ground)
    assert len(COMPONENT_COLOURS) == len(COMPONENTS)
    assert len(STAGE_COLOURS) == len(STAGES)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("width", "dark"), [(390, False), (1280, False), (390, True), (1280, True)]
)
@each
def test_a_browser_shows_it(tmp_path: Path, name: str, width: int, dark: bool) -> None:
    """No console error, no request, every figure there, no text upon another, nothing too wide."""
    text, figures = page_of(name, tmp_path)
    flags = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()
    found, errors = looked_at(tmp_path, text, width, *flags)
    if dark and not found["dark"]:
        pytest.skip("this Chromium does not take a dark scheme from the command line")
    assert errors == ""
    assert found["requests"] == []
    assert set(found["figures"]) == figures
    assert found["wide"] <= width
    assert overlaps([tuple(box) for box in found["texts"]]) == []
    ground = (DARK if found["dark"] else LIGHT)["page"]
    channels = ", ".join(str(int(ground[i : i + 2], 16)) for i in (1, 3, 5))
    assert found["ground"] == f"rgb({channels})"
