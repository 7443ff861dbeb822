"""Calls of fixed rows: all alike, whatever there is to multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.kernels.calls import in_calls

ROWS = 8
COUNTS = (1, 2, 3, 7, 8, 9, 16, 19)


class Calls(TorchDispatchMode):
    """Notes every product of two matrices: shape, strides, alignment of its rows; its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear"):
            rows = args[1] if name == "addmm" else args[0]
            call = (*rows.shape, *rows.stride(), rows.data_ptr() % 16)
            made = func(*args, **(kwargs or {}))
            self.seen.append((*call, made.shape[-1]))
            return made
        return func(*args, **(kwargs or {}))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, rows: int = 0
) -> torch.Tensor:
    """The product of a layer whose rows are fixed."""
    return in_calls(x, rows, lambda part: F.linear(part, weight, bias))


def drawn(bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """19 rows that lie apart, a weight, and a bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(19, 80, generator=generator)[:, :64]
    weight = torch.randn(96, 64, generator=generator)
    return x, weight, torch.randn(96, generator=generator) if bias else None


@pytest.mark.parametrize("bias", [False, True])
def test_every_call_is_alike(bias: bool) -> None:
    """Fault: a call of other rows, or of rows that lie otherwise, that takes another kernel."""
    x, weight, offset = drawn(bias)
    seen = set()
    for count in COUNTS:
        with Calls() as calls:
            found = product(x[:count], weight, offset, ROWS)
        assert len(calls.seen) == -(-count // ROWS)
        seen |= set(calls.seen)
        torch.testing.assert_close(found, F.linear(x[:count], weight, offset))
    assert seen == {(ROWS, 64, 64, 1, 0, 96)}


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_keeps_its_bits(bias: bool) -> None:
    """Fault: rows at the wrong place, or that depend on how many there are."""
    x, weight, offset = drawn(bias)
    alone = torch.cat([product(row[None], weight, offset, ROWS) for row in x])
    for count in COUNTS:
        for start in (0, 19 - count):
            rows = slice(start, start + count)
            assert torch.equal(product(x[rows], weight, offset, ROWS), alone[rows])


def test_leading_dimensions_and_free_rows() -> None:
    """Fault: a shape lost, or fixed rows where none were asked for."""
    x, weight, _ = drawn(False)
    wide = x[:18].reshape(2, 9, 64)
    assert product(wide, weight, rows=ROWS).shape == (2, 9, 96)
    with Calls() as calls:
        assert torch.equal(product(x, weight), F.linear(x, weight))
    assert [call[0] for call in calls.seen] == [19, 19]
