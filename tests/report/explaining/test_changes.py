"""What-if rows of a measured cycle follow from its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.hardware import load_profile
from eyas.report.explaining.changes import AS_MEASURED, Base, changes, predicted
from eyas.report.explaining.floors import setting_of
from tests.helpers import chain, tiny_drafter, tiny_target
from tests.report.explaining.running import tiny_llm

BASE = Base(cycle_ms=10.0, decode_ms=8.0, accept_length=2.0, batch=2)
RECORD: dict[str, Any] = {
    "idle_ms": 1.0,
    "stages": {"draft": {"device_ms": 2.0}, "extend": {"device_ms": 0.5}},
    "components": {"dense linear": 6.0, "attention": 0.5},
    "floors": {"dense linear": 4.0, "attention": 0.6},
    "collectives": {"waiting_ms": {"0": 3.0, "1": 0.0}},
    "ranks": [{"rank": 0}, {"rank": 1}],
}


def rows(**changed: Any) -> dict[str, Any]:
    found = changes(BASE, RECORD | changed, [0.6, 0.3, 0.1], 3)
    assert [r["gain"] for r in found] == sorted((r["gain"] for r in found), reverse=True)
    return {row["option"]: row for row in found}


def test_rows_are_arithmetic_on_measured_parts() -> None:
    """Faults: a gain that forgets the accept length; a floor above what was measured."""
    found = rows()
    assert found[AS_MEASURED]["gain"] == 1.0
    assert found[AS_MEASURED]["tok_per_s"] == pytest.approx(2 * 2.0 / 10.0 * 1e3)
    assert found["no speculation"]["tok_per_s"] == pytest.approx(2 / 8.0 * 1e3)
    assert found["no speculation"]["speedup"] == 1.0
    assert found["a chain of 1 draft"]["cycle_ms"] == pytest.approx(8.0)
    assert found["a chain of 1 draft"]["accept_length"] == pytest.approx(1.6)
    assert found["a chain of 2 drafts"]["accept_length"] == pytest.approx(1.9)
    assert found["no idle time"]["cycle_ms"] == 9.0
    assert found["no waiting for late ranks"]["cycle_ms"] == 7.0
    assert found["dense linear at its floor"]["cycle_ms"] == 8.0
    assert "attention at its floor" not in found
    assert found["no speculation"]["break_even"] == 1.0


def test_trees_and_single_ranks_have_fewer_rows() -> None:
    """Fault: chains proposed where a tree was measured, of its acceptance."""
    found = changes(BASE, RECORD | {"collectives": None}, [0.6], 0)
    names = {row["option"] for row in found}
    assert not any("chain" in name or "rank" in name for name in names)


def test_predictions_are_shares_of_what_was_measured() -> None:
    """Faults: a GPU's what-if for a CPU; milliseconds of a model taken for measured ones."""
    llm = tiny_llm(tiny_target(), tiny_drafter(), chain(3))
    setting, machine = setting_of(llm, 1, 100.0, None), load_profile("h200")
    assert predicted(BASE, llm, setting, machine, [0.5, 0.5, None]) == []
    llm.engine.runner.device = torch.device("cuda")
    found = predicted(BASE, llm, setting, machine, [0.5, 0.5, None])
    assert found
    for row in found:
        assert row["costs"].endswith("predicted")
        assert row["gain"] > 1
        assert row["decode_ms"] == BASE.decode_ms
