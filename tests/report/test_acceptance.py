"""Accept lengths to shares: small cases by hand."""

from __future__ import annotations

from eyas.report.acceptance import summarise


def test_shares_by_hand() -> None:
    found = summarise([1, 1, 2, 4], depth=3)
    assert found == {
        "cycles": 4,
        "accept_length": 2.0,
        "acceptance_by_position": [0.5, 0.25, 0.25],
        "conditional_acceptance": [0.5, 0.5, 1.0],
        "histogram": [2, 1, 0, 1],
    }


def test_positions_never_reached_have_no_share() -> None:
    found = summarise([1, 1], depth=2)
    assert found["acceptance_by_position"] == [0.0, 0.0]
    assert found["conditional_acceptance"] == [0.0, None]


def test_no_cycle_at_all() -> None:
    found = summarise([], depth=2)
    assert found["accept_length"] is None
    assert found["acceptance_by_position"] == [None, None]
    assert found["histogram"] == [0, 0, 0]
