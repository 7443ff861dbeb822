"""When a run is steady, and rates by context and batch."""

from __future__ import annotations

import pytest

from eyas.report.explaining.steady import by_batch, by_context, startup, steady_from
from eyas.report.explaining.workload import Step


def steps(ms: list[float], context: float = 10.0, requests: int = 1) -> list[Step]:
    return [
        Step(ms=m, tokens=2 * requests, requests=requests, context=context + i)
        for i, m in enumerate(ms)
    ]


@pytest.mark.parametrize(
    ("ms", "start"),
    [
        ([10.0] * 20, 0),
        ([90.0, 40.0, *[10.0] * 20], 2),
        ([4.0] * 6 + [10.0] * 30, 6),
        ([10.0] * 8, None),
        ([1.0, 50.0] * 20, None),
    ],
    ids=["steady", "slow start", "fast start", "too short", "restless"],
)
def test_the_first_steady_cycle(ms: list[float], start: int | None) -> None:
    """Fault: 119 tok/s at token 113 before 39 at 1,900, reported as the rate."""
    found = steady_from(ms)
    assert found == start if start != 6 else found in (5, 6), found


def test_a_start_that_misleads_is_said() -> None:
    """Fault: start-up artefacts averaged into the result in silence."""
    run = steps([4.0] * 6 + [10.0] * 30)
    found = startup(run, 6)
    assert found["early_tok_per_s"] == pytest.approx(500.0)
    assert found["steady_tok_per_s"] == pytest.approx(200.0)
    assert "first 6 cycles" in found["words"] and "500.0 tok/s" in found["words"]
    assert startup(run, 0)["words"] == "Steady from the first cycle on."
    assert "No steady state" in startup(run, None)["words"]


def test_rates_by_context_and_batch() -> None:
    """Faults: steps of another range; a rate as the mean of rates."""
    short, long = steps([10.0, 30.0], context=20), steps([40.0] * 3, context=600, requests=2)
    rows = by_context([*short, *long], steps([8.0], context=20))
    assert [(r["from"], r["to"], r["cycles"]) for r in rows] == [(0, 64, 2), (512, 1024, 3)]
    assert rows[0]["tok_per_s"] == pytest.approx(4 / 0.040)
    assert rows[0]["plain_tok_per_s"] == pytest.approx(250.0)
    assert rows[1]["plain_tok_per_s"] is None
    assert rows[1]["accept_length"] == 2.0
    assert [(r["batch"], r["tok_per_s"]) for r in by_batch([*short, *long])] == [
        (1, pytest.approx(100.0)),
        (2, pytest.approx(100.0)),
    ]
