"""Sentences of an explained run."""

from __future__ import annotations

import pytest

from eyas.report.explaining.words import _held
from tests.report.samples import explain_record


def test_a_clock_that_is_held_is_told() -> None:
    """Fault: a slower machine without a word; a sentence where all is well."""
    record = explain_record()
    assert not _held(record)
    assert not _held(record | {"gpu_state": None})
    record["gpu_state"] |= {"clock_mhz": 1530, "power_w": 696.5, "celsius": 54}
    for held, words in ((["the limit of its power"], "the limit of its power"), ([], "nothing")):
        record["gpu_state"]["held_by"] = held
        (sentence,) = _held(record)
        assert "1,530 of 1,980 MHz" in sentence and words in sentence


@pytest.mark.parametrize("clock", [1965, 1980])
def test_a_step_of_the_clock_is_not_told(clock: int) -> None:
    """Fault: a sentence about noise."""
    record = explain_record()
    record["gpu_state"]["clock_mhz"] = clock
    assert not _held(record)
