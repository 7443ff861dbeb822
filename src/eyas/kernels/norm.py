"""RMSNorm of rows, with the residual add before it and with two halves side by side.

Llama's arithmetic: statistics in float32, cast to the rows' dtype, then times the weight. What is
added may come as terms (`eyas.kernels.terms`), which the same launch sums. One program a row, whose
sum runs over the same lanes whatever the number of rows: a row's bits are those it has alone. The
functions without a suffix take one launch where `runs_kernels` says so, and the torch reference
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns, warps_of
from eyas.kernels.terms import Delta, Terms, row_sum, sum_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm of rows, and what is added to them first."""

    weight: torch.Tensor
    """[E]"""
    eps: float
    delta: Delta | None = None
    """[..., E], or terms of it."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of `x (+ delta)`, `x (+ delta)`), [..., E] each."""
        if self.delta is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, self.delta, self.weight, self.eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm_reference(
    x: torch.Tensor, delta: Delta, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    total = x + (sum_reference(delta) if isinstance(delta, Terms) else delta)
    return rms_norm_reference(total, weight, eps), total


def rms_norm_pair_reference(
    left: torch.Tensor,
    right: torch.Tensor,
    left_weight: torch.Tensor,
    right_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `rms_norm_pair`."""
    halves = (
        rms_norm_reference(left, left_weight, eps),
        rms_norm_reference(right, right_weight, eps),
    )
    return torch.cat(halves, dim=-1)


@triton.jit
def norm_weight(w_ptr, columns, size):  # type: ignore[no-untyped-def]
    """A norm's weights, zeros behind; no launch writes them, so they are read ahead of the turn."""
    return tl.load(w_ptr + columns, columns < size, 0.0)


@triton.jit
def normed_row(x, weight, size, eps, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of float32 numbers, normed and weighted."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    delta_ptr,
    w_ptr,
    out_ptr,
    total_ptr,
    chance_ptr,
    more_ptr,
    x_stride,
    delta_stride,
    more_stride,
    size,
    eps,
    ADD: tl.constexpr,
    TOP_K: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): the row, plus `delta` if ADD, normed; TOP_K terms of it if there are some."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = norm_weight(w_ptr, columns, size)
    take_turn(EARLY)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if ADD:
        if TOP_K > 0:
            delta = row_sum(
                delta_ptr, chance_ptr, more_ptr, row, columns, inside, size, more_stride,
                TOP_K, MORE,
            )  # fmt: skip
        else:
            delta = tl.load(delta_ptr + row * delta_stride + columns, inside, 0.0)
        total = (x + delta.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * size + columns, total, inside)
        x = total.to(tl.float32)
    y = normed_row(x, weight, size, eps, dtype)
    tl.store(out_ptr + row * size + columns, y, inside)


@triton.jit
def _norm_pair_kernel(  # type: ignore[no-untyped-def]
    left_ptr,
    right_ptr,
    left_w_ptr,
    right_w_ptr,
    out_ptr,
    left_stride,
    right_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, half): that half of the row, normed."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x_ptr, w_ptr = left_ptr + row * left_stride, left_w_ptr
    if half == 1:
        x_ptr, w_ptr = right_ptr + row * right_stride, right_w_ptr
    weight = norm_weight(w_ptr, columns, size)
    take_turn(EARLY)
    x = tl.load(x_ptr + columns, inside, 0.0).to(tl.float32)
    y = normed_row(x, weight, size, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * 2 + half) * size + columns, y, inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`."""
    rows, size = x.reshape(-1, x.shape[-1]), x.shape[-1]
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = block_of(size)
    _norm_kernel[(rows.shape[0],)](
        rows,
        rows,
        weight,
        out,
        out,
        weight,
        rows,
        rows.stride(0),
        0,
        0,
        size,
        eps,
        ADD=False,
        TOP_K=0,
        MORE=False,
        BLOCK=block,
        num_warps=warps_of(block),
        **turns(rows),
    )
    return out.view(x.shape)


def add_rms_norm_triton(
    x: torch.Tensor, delta: Delta, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`."""
    size, top_k, chances, more = x.shape[-1], 0, weight, cast(torch.Tensor | None, None)
    if isinstance(delta, Terms):
        delta, chances, more = delta
        top_k = chances.shape[1]
    rows, added = x.reshape(-1, size), delta.reshape(-1, size)
    out, total = (torch.empty(rows.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    block = block_of(size)
    _norm_kernel[(rows.shape[0],)](
        rows,
        added,
        weight,
        out,
        total,
        chances,
        added if more is None else more,
        rows.stride(0),
        added.stride(0),
        0 if more is None else more.stride(0),
        size,
        eps,
        ADD=True,
        TOP_K=top_k,
        MORE=more is not None,
        BLOCK=block,
        num_warps=warps_of(block),
        **turns(rows),
    )
    return out.view(x.shape), total.view(x.shape)


def rms_norm_pair_triton(
    left: torch.Tensor,
    right: torch.Tensor,
    left_weight: torch.Tensor,
    right_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `rms_norm_pair`."""
    size = left.shape[-1]
    a, b = left.reshape(-1, size), right.reshape(-1, size)
    out = torch.empty(*left.shape[:-1], 2 * size, dtype=left.dtype, device=left.device)
    block = block_of(size)
    _norm_pair_kernel[(a.shape[0], 2)](
        a,
        b,
        left_weight,
        right_weight,
        out,
        a.stride(0),
        b.stride(0),
        size,
        eps,
        BLOCK=block,
        num_warps=warps_of(block),
        **turns(a),
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x[..., E]` normed, times `weight[E]`; same shape and dtype."""
    run = rms_norm_triton if runs_kernels(x) else rms_norm_reference
    return run(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: Delta, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of `x + delta`, `x + delta` in their dtype), [..., E] each; terms are summed first."""
    run = add_rms_norm_triton if runs_kernels(x) else add_rms_norm_reference
    return run(x, delta, weight, eps)


def rms_norm_pair(
    left: torch.Tensor,
    right: torch.Tensor,
    left_weight: torch.Tensor,
    right_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`left[..., E]` and `right[..., E]`, each normed by its weight, side by side: [..., 2 * E]."""
    run = rms_norm_pair_triton if runs_kernels(left) else rms_norm_pair_reference
    return run(left, right, left_weight, right_weight, eps)


def cost(rows: int, size: int, itemsize: int, inputs: int, outputs: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` of `size` numbers: so many rows read and written for each.

    Each of K terms is a row that is read, and so is what is added to their sum.
    """
    return rows * size * (3 + inputs), (rows * (inputs + outputs) + 1) * size * itemsize
