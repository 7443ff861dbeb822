"""The starting case: its page holds what the planner says now, and that is near what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.hardware import load_profile
from eyas.report.starting_case import errors, starting_case
from eyas.report.starting_page import page

PAGE = Path(__file__).parents[2] / "docs" / "starting-case.md"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return starting_case()


def test_the_page_is_what_the_command_writes(record: dict[str, Any]) -> None:
    """Fault: a constant or a count changed, and the page not written again."""
    assert PAGE.read_text(encoding="utf-8") == page(record)


def test_one_profile_gives_decode(record: dict[str, Any]) -> None:
    """Fault: a term missing from a pass of 61 layers over 8 ranks: decode took 12 ms."""
    assert record["decode_ms"] == pytest.approx(12.0, rel=0.05)
    assert record["all_reduces"] == 122
    assert record["verify_ms"] < 15
    assert record["decode_ms"] < record["decode_ms_with_triton"] < 14.5


def test_what_the_slow_verifies_need(record: dict[str, Any]) -> None:
    """Fault: the rest of 29 and 19 ms spread over another number of all-reduces.

    Decode bounds an all-reduce at 98 us even if it did nothing else; three rows would need more.
    """
    slow, quick = record["needed"]
    assert 98 < slow["all_reduce_us"] < 160
    assert 50 < quick["all_reduce_us"] < 80
    for need in (slow, quick):
        extra = need["all_reduce_us"] - record["all_reduce_us"][3]
        assert extra * 122 / 1e3 == pytest.approx(need["over_ms"])
        assert record["verify_ms"] + need["over_ms"] == pytest.approx(need["verify_ms"])
        assert need["tok_per_s"] == pytest.approx(need["observed_tok_per_s"], rel=0.1)
        assert need["accept_length_needed"] == pytest.approx(2.0, rel=0.1)


def test_full_graphs_come_out(record: dict[str, Any]) -> None:
    """Fault: vLLM's published cycle of 19 .. 21 ms and 107 .. 117 tok/s missed by over 15 %."""
    rows = record["figures"]["vLLM, three drafts, the whole verify in a graph"]
    assert len(rows) == 6
    for row in rows:
        assert abs(row["error"]) < 0.15, row["what"]


def test_public_figures_are_near(record: dict[str, Any]) -> None:
    """Fault: a group of figures that the planner no longer meets."""
    limits = {
        "Plain decoding": 0.10,
        "Several requests, no speculation": 0.20,
        "Engines on one H200": 0.50,
    }
    found = errors(record)
    for title, (median, worst) in found.items():
        assert median < 0.12, title
        assert worst < limits.get(title, 1.5), title


def test_nothing_is_fitted_to_a_row(record: dict[str, Any]) -> None:
    """Fault: a constant of the box whose source is one of the figures it is held against."""
    profile = load_profile("rtx-pro-6000-tuned")
    for name, source in profile.sources.items():
        assert "tok/s" not in source and "kimi-k26.md" not in source, name
    for row in record["constants"]:
        assert len(row["source"]) > 10, row["name"]
    for rows in record["figures"].values():
        for row in rows:
            assert row["source"], row["what"]


def test_the_cliff_contradicts_decode(record: dict[str, Any]) -> None:
    """Fault: the page's sentence on the cliff no longer true."""
    boxes = {box["profile"]: box for box in record["profiles"]}
    assert boxes["rtx-pro-6000-cliff"]["decode_ms"] > 16
    short, long = record["contexts"]
    assert long["cycle_ms"] - short["cycle_ms"] < 0.5
