"""Reads of the host are seen in a cycle, wherever they hide, and results are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eyas.report.explaining.counting import Counts, counting

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "__bool__": lambda x: bool(x.any()),
    "__int__": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_counted_once(name: str) -> None:
    """Fault: a way to wait for the device that nobody counts, or counts twice."""
    counts, x = Counts(), torch.arange(3)
    with counting(counts), torch.inference_mode():
        counts.mark("draft")
        READS[name](x)
        counts.mark("collect")
        READS[name](x)
    assert dict(counts.reads) == {("draft", name): 1}


def test_operators_are_counted_by_stage_and_range() -> None:
    """Fault: operators of an inner range counted for the outer one."""
    counts, x = Counts(), torch.ones(2, 2)
    with counting(counts):
        counts.mark("verify")
        x + x
        counts.enter("attention")
        x @ x
        counts.leave()
        counts.mark("accept")
        x * x
    assert dict(counts.operators) == {
        ("verify", "metadata"): 1,
        ("verify", "attention"): 1,
        ("accept", "sampling/acceptance"): 1,
    }
