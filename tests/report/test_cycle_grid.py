"""The table of a cycle in 80 columns: nothing cut, nothing that must be there left out."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from eyas.report.components import DEVICE, STAGES
from eyas.report.cycle_grid import cycle_grid

INSIDE = (*(s for s in STAGES if s not in ("prefill", "decode")), "other")


def side(cycle: float, stages: tuple[str, ...] = INSIDE, **changes: Any) -> dict[str, Any]:
    """A cycle in which every stage has every component in equal shares."""
    part = 0.9 * cycle / len(stages) / len(DEVICE)
    one = {
        "device_ms": len(DEVICE) * part,
        "idle_ms": 0.1 * cycle / len(stages),
        "components": dict.fromkeys(DEVICE, part),
    }
    record = {
        "cycle_ms": cycle,
        "device_ms": 0.9 * cycle,
        "idle_ms": 0.1 * cycle,
        "overlap_ms": 0.0,
        "unexplained_ms": -0.038 * cycle,
        "components": dict.fromkeys(DEVICE, part * len(stages)),
        "stages": dict.fromkeys(stages, one),
    }
    return record | changes


def lines(run: dict[str, Any]) -> list[str]:
    """The table's lines below its title."""
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(cycle_grid(run, "Cycle, ms"))
    found = console.export_text().splitlines()
    return found[found.index(next(line for line in found if "Cycle" in line)) + 1 :]


@pytest.mark.parametrize("cycle", [0.86, 9.99, 41.28, 412.8, 4128.0])
def test_it_fits_with_every_stage_that_a_cycle_has(cycle: float) -> None:
    """Fault: names and numbers cut to an ellipsis, on a terminal of usual width."""
    found = lines(side(cycle, INSIDE[:-1], overlap_ms=0.3 * cycle))
    assert not [line for line in found if "…" in line or len(line.rstrip()) > 80]
    head = found[0].split()
    assert head == ["draft", "verify", "accept", "commit", "extend", "coll.", "host", "sum", "%"]
    for part in DEVICE:
        [row] = [line for line in found if line.startswith(part)]
        assert len(row.removeprefix(part).split()) == len(head)
        assert max(map(len, row.removeprefix(part).split())) <= 5
    last = next(line for line in found if line.startswith("cycle")).split()
    assert float(last[1]) == pytest.approx(cycle, rel=1e-3)
    assert last[2] == "100"
    assert any(line.startswith("unexplained") and line.endswith("-3.8") for line in found)
    assert any(line.startswith("overlapped") and line.endswith("-30.0") for line in found)


def test_a_stage_with_nothing_but_zeros_has_no_column() -> None:
    """Faults: a column of zeros; a stage that idles, and so has a number, left out."""
    run = side(5.0, ("verify", "commit", "host"))
    run["stages"]["commit"] = {"device_ms": 0.0004, "idle_ms": 0.0, "components": {}}
    run["stages"]["host"] = {"device_ms": 0.0, "idle_ms": 0.2, "components": {}}
    found = lines(run)
    assert found[0].split() == ["verify", "host", "sum", "%"]
    assert not [line for line in found if line.startswith("overlapped")]
    del run["unexplained_ms"]
    assert not [line for line in lines(run) if line.startswith("unexplained")]
