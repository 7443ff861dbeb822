"""A record's page needs nothing else, has all its figures, and no text upon another.

Layout is checked in a headless Chromium where there is one; what the page's own text tells is
checked always.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.report.components import COMPONENTS, STAGES
from eyas.report.figures import ticks
from eyas.report.html import page
from eyas.report.markup import rate, short
from eyas.report.records import stamped
from eyas.report.starting_case import starting_case
from eyas.report.style import COMPONENT_COLOURS, DARK, LIGHT, STAGE_COLOURS
from tests.report import samples
from tests.report.browsing import CHROMIUM, Sight, seen
from tests.report.page_checks import Page, contrast, faults, overlaps

starting = functools.cache(starting_case)
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
    "start": (lambda _: starting(), {"passes", "needed", "published", "what-if"}),
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
                "files": ["before.json", "after.json"],
                "unit": "ms a cycle",
                "cycle_ms": [6.123456789, 7.423456789],
                "accept_length": [2.5, None],
                "smaller_ms": 0.01,
            },
        ),
        {"causes"},
    ),
}
each = pytest.mark.parametrize("name", sorted(RECORDS))
LOOKS = [(390, False), (1280, False), (390, True), (1280, True)]
END = "</header>"
FAULTS = (
    ("console", False, END, f"{END}<script>console.error('told')</script>"),
    ("console", False, END, f"{END}<script>nothing.at.all()</script>"),
    ("request", False, END, f'{END}<img src="https://a.example/b.png" alt="">'),
    ("request", False, "</style>", "body{background:url(https://a.example/b.png)}</style>"),
    ("request", False, END, f"{END}<script>fetch('https://a.example/b')</script>"),
    ("request", False, END, f'{END}<img src="page-0.html" alt="">'),
    ("request", False, END, f"{END}<script>setTimeout(() => fetch('late'), 300)</script>"),
    ("request", False, END, f'{END}<iframe src="frames.html"></iframe>'),
    ("figure", False, 'id="what-if"', 'id="what-else"'),
    ("figure", False, 'id="what-if"', 'id="what-if" hidden'),
    ("figure", False, "</style>", ".bar,table{display:none}</style>"),
    ("overlap", False, "</style>", ".row{margin:-.6rem 0}</style>"),
    ("overlap", True, "</style>", ".wide td{position:absolute}</style>"),
    ("width", False, "</style>", ".row{width:1400px}</style>"),
    ("width", True, "</style>", ".row{width:500px}</style>"),
    ("cut", True, "</style>", "section{overflow:hidden}.row{width:500px}</style>"),
    ("small", False, "</style>", ".value{font-size:8px}</style>"),
    ("colours", True, "(prefers-color-scheme:dark)", "(prefers-color-scheme:none)"),
    ("colours", True, "</style>", "html{background:#fff}</style>"),
    ("colours", False, "</style>", "body{color:#ccc}</style>"),
)
"""What to find, in the dark on a phone or in the light on a desk, and what to plant where."""


def page_of(name: str, folder: Path) -> tuple[str, set[str]]:
    make, figures = RECORDS[name]
    return page(make(folder)), figures


@each
def test_a_page_stands_alone_and_has_its_figures(tmp_path: Path, name: str) -> None:
    text, figures = page_of(name, tmp_path)
    assert faults(text) == []
    assert set(Page(text).figures) == figures
    assert len(text) < 3e6
    words = re.sub(r"<style>.*?</style>|<pre>.*?</pre>|<[^>]*>", " ", text, flags=re.DOTALL)
    assert not re.search(r"None|nan\b|\{'|\[\d|\de[+-]\d|\d\.\d{5}", words)


def test_the_head_says_what_ran_and_what_came_of_it(tmp_path: Path) -> None:
    """Fault: a page that nobody can tell from another's, or a claim that it leaves out."""
    texts = {name: page_of(name, tmp_path)[0] for name in RECORDS}
    heads = {name: text[: text.index("</header>")] for name, text in texts.items()}
    for word in ("eyas bench: smollm2", "equal token by token in all 4 pairs", "2.23 x", "2.45"):
        assert word in heads["bench"], word
    for word in ("A before.json, B after.json", "A 6.12 ms, B 7.42 ms"):
        assert word in heads["diff"].replace("\N{NO-BREAK SPACE}", " "), word
    assert "Speculation pays" in heads["explain"]
    assert "engine SGLang" in heads["trace"]
    plan = samples.plan_record() | {"engine": {"name": "vllm", "source": "a trace"}}
    plan |= {"profile": {"name": "h200", "machine": "H200 SXM"}}
    assert "engine vllm; predicted for H200 SXM" in page(plan)
    bench = samples.bench_record() | {"tokens_equal": False}
    assert "equal token by token" not in page(bench)


def test_numbers_are_for_readers() -> None:
    """Fault: exponents, or digits that say nothing, on an axis or in a table."""
    found = [short(v) for v in (0.0, 0.0312, 0.31, 2.0, 45.67, 291.4, 12893.12, -0.05)]
    assert found == ["0", "0.031", "0.31", "2.00", "45.7", "291", "12,893", "-0.050"]
    assert short(None) == ""
    assert [rate(v) for v in (119.04, 12893.1)] == ["119.0", "12,893"]
    assert ticks(11800.0) == [0.0, 5000.0, 10000.0, 15000.0]
    assert ticks(72.3) == [0.0, 20.0, 40.0, 60.0, 80.0]
    for most in (1e-9, 0.3, 1.0, 6.0, 99.0, 100.0, 251.0):
        assert 3 <= len(ticks(most)) <= 6, most
        assert ticks(most)[-1] >= most * 0.999


def test_streams_that_hardly_work_share_a_lane(tmp_path: Path) -> None:
    """Fault: a page of empty lanes; or work of theirs that is no longer shown."""
    record = samples.ranks_record(tmp_path)
    rank = record["ranks"][0]["timeline"]
    bars = [[0.0, 0.001, "copies", "draft", 2], [0.5, 0.001, "copies", "verify", 1]]
    rank["streams"] |= {"80": bars[:1], "81": bars[1:]}
    assert "streams 80, 81: 0.00 ms in 3 launches" in page(record)


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


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[str]]:
    """What the browser finds wrong with every page, and with those that have a planted fault."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    folder = tmp_path_factory.mktemp("browser")
    sights: dict[Any, Sight] = {}
    planted: dict[Any, Sight] = {}
    for name in RECORDS:
        text, figures = page_of(name, folder)
        for width, dark in LOOKS:
            look = Sight(text=text, figures=figures, width=width, dark=dark)
            sights[name, width, dark] = look
    text, figures = page_of("plan", folder)
    for i, (_, dark, old, new) in enumerate(FAULTS):
        assert text.count(old) == 1, old
        bad, width = text.replace(old, new), 390 if dark else 1280
        planted[i] = Sight(text=bad, figures=figures, width=width, dark=dark)
    found = seen(folder, list(sights.values()))
    found += seen(tmp_path_factory.mktemp("planted"), list(planted.values()))
    return dict(zip([*sights, *planted], found, strict=True))


@pytest.mark.parametrize(("width", "dark"), LOOKS)
@each
def test_a_browser_shows_it(wrong: dict[Any, list[str]], name: str, width: int, dark: bool) -> None:
    """No console error, no request, every figure there, no text upon another, nothing too wide.

    Nor text that is cut or tiny; and dark is dark.
    """
    assert wrong[name, width, dark] == []


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_browser_sees_each_fault(wrong: dict[Any, list[str]], number: int) -> None:
    """Fault: a looker that finds nothing, whatever the page."""
    kinds = {line.split(":")[0] for line in wrong[number]}
    assert FAULTS[number][0] in kinds, (FAULTS[number], wrong[number])
