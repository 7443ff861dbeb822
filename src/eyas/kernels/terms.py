"""What is added to rows, where it is a weighted sum that nobody has taken yet.

Whoever norms the rows next may take it in the same launch (`eyas.kernels.norm`); elsewhere it is
a launch of its own. Always holds: terms are added in their order, in float32, and the sum is
rounded before `more` is added, and then again; wherever that is done, the bits are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.lang import runs_kernels, take_turn, tl, triton, turns

SUM_BLOCK = 1024
"""Columns summed per program."""


class Terms(NamedTuple):
    """`sum_k weights[t, k] * pairs[t * K + k]`, and `more[t]` added to the rounded sum."""

    pairs: torch.Tensor
    """[T * K, H], contiguous."""
    weights: torch.Tensor
    """float32[T, K], contiguous."""
    more: torch.Tensor | None = None
    """[T, H], numbers of a row side by side."""


Delta = torch.Tensor | Terms
"""What is added to rows: [.., H], or the terms of it."""


def summed(delta: Delta) -> torch.Tensor:
    """`delta` as rows [T, H] in its dtype."""
    if isinstance(delta, torch.Tensor):
        return delta
    return (sum_triton if runs_kernels(delta.pairs) else sum_reference)(delta)


def sum_reference(terms: Terms) -> torch.Tensor:
    """See `summed`."""
    pairs, weights, more = terms
    rows = pairs.view(*weights.shape, -1)
    total = rows[:, 0] * weights[:, :1]
    for k in range(1, weights.shape[1]):
        total += rows[:, k] * weights[:, k : k + 1]
    rounded = total.to(pairs.dtype)
    return rounded if more is None else rounded + more


@triton.jit
def row_sum(  # type: ignore[no-untyped-def]
    pairs_ptr, weights_ptr, more_ptr, row, columns, inside, size, more_stride,
    TOP_K: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Numbers `columns` of a row's sum, in the dtype of the pairs."""
    dtype = pairs_ptr.dtype.element_ty
    total = tl.zeros(columns.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        term = tl.load(pairs_ptr + pair * size + columns, inside, 0.0).to(tl.float32)
        total += term * tl.load(weights_ptr + pair)
    if MORE:
        more = tl.load(more_ptr + row * more_stride + columns, inside, 0.0)
        total = total.to(dtype).to(tl.float32) + more.to(tl.float32)
    return total.to(dtype)


@triton.jit
def _expert_sum_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr,
    weights_ptr,
    more_ptr,
    out_ptr,
    more_stride,
    size,
    TOP_K: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, tile of columns): the row's sum."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = row_sum(
        pairs_ptr, weights_ptr, more_ptr, row, columns, inside, size, more_stride, TOP_K, MORE
    )
    tl.store(out_ptr + row * size + columns, total, inside)


def sum_triton(terms: Terms) -> torch.Tensor:
    """See `summed`."""
    pairs, weights, more = terms
    (rows, top_k), hidden = weights.shape, pairs.shape[1]
    out = pairs.new_empty(rows, hidden)
    _expert_sum_kernel[(rows, -(-hidden // SUM_BLOCK))](
        pairs,
        weights,
        pairs if more is None else more,
        out,
        0 if more is None else more.stride(0),
        hidden,
        TOP_K=top_k,
        MORE=more is not None,
        BLOCK=SUM_BLOCK,
        **turns(pairs),
    )
    return out
