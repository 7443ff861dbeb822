"""Rows of several tensors at once, fetched by one index: what lies in slots; columns put in place.

One launch for up to eight tensors of any types and widths. Nothing is computed: bits are copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.lang import runs_kernels, take_turn, tl, triton, turns

MOST = 8
"""Tensors a launch takes."""
BLOCK = 1024
"""Numbers of a row that a program copies."""


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    source_ptr, target_ptr, source, target, columns, WIDTH: tl.constexpr
):
    """Some columns of a row, if there is such a tensor."""
    if WIDTH > 0:
        inside = columns < WIDTH
        value = tl.load(source_ptr + source * WIDTH + columns, inside)
        tl.store(target_ptr + target * WIDTH + columns, value, inside)


@triton.jit
def _slot_rows_kernel(  # type: ignore[no-untyped-def]
    index_ptr,
    index_stride,
    step,
    offset,
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    s6,
    s7,
    t0,
    t1,
    t2,
    t3,
    t4,
    t5,
    t6,
    t7,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    W4: tl.constexpr,
    W5: tl.constexpr,
    W6: tl.constexpr,
    W7: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block of columns): row `index + row * step + offset` of every tensor."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index_ptr + row * index_stride) + row * step + offset
    _copy(s0, t0, source, row, columns, W0)
    _copy(s1, t1, source, row, columns, W1)
    _copy(s2, t2, source, row, columns, W2)
    _copy(s3, t3, source, row, columns, W3)
    _copy(s4, t4, source, row, columns, W4)
    _copy(s5, t5, source, row, columns, W5)
    _copy(s6, t6, source, row, columns, W6)
    _copy(s7, t7, source, row, columns, W7)


def take_rows_triton(
    index: torch.Tensor, *tensors: torch.Tensor, step: int = 0, offset: int = 0
) -> list[torch.Tensor]:
    """See `take_rows`."""
    assert len(tensors) <= MOST, f"{len(tensors)} tensors, a launch takes {MOST}"
    assert all(t.is_contiguous() for t in tensors), "rows lie one behind the other"
    count, missing = index.shape[0], MOST - len(tensors)
    taken = [torch.empty(count, *t.shape[1:], dtype=t.dtype, device=t.device) for t in tensors]
    widths = [t[0].numel() for t in tensors] + [0] * missing
    _slot_rows_kernel[(count, triton.cdiv(max(widths), BLOCK))](
        index,
        index.stride(0),
        step,
        offset,
        *tensors,
        *[index] * missing,
        *taken,
        *[index] * missing,
        **{f"W{i}": width for i, width in enumerate(widths)},
        BLOCK=BLOCK,
        **turns(index),
    )
    return taken


def take_rows_reference(
    index: torch.Tensor, *tensors: torch.Tensor, step: int = 0, offset: int = 0
) -> list[torch.Tensor]:
    """See `take_rows`."""
    if step or offset:
        end = offset + step * index.shape[0]
        index = index + torch.arange(offset, end, step, device=index.device)
    return [t.index_select(0, index) for t in tensors]


def take_rows(
    index: torch.Tensor, *tensors: torch.Tensor, step: int = 0, offset: int = 0
) -> list[torch.Tensor]:
    """Row `index[r] + r * step + offset` of every tensor [S, ...], for each r of int64[R]."""
    run = take_rows_triton if runs_kernels(index) else take_rows_reference
    return run(index, *tensors, step=step, offset=offset)


def embedded(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of a table [V, E] for int64 tokens of any shape: [.., E]."""
    if not runs_kernels(tokens):
        return F.embedding(tokens, table)
    (rows,) = take_rows_triton(tokens.flatten(), table)
    return rows.view(*tokens.shape, -1)


@triton.jit
def _state_columns_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, x_stride, out_stride, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, block of columns)."""
    take_turn(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * x_stride + column, column < width)
    tl.store(out_ptr + row * out_stride + column, value, column < width)


def put_columns_triton(x: torch.Tensor, out: torch.Tensor) -> None:
    """See `put_columns`."""
    assert x.stride(1) == out.stride(1) == 1, "a row's numbers lie side by side"
    rows, width = x.shape
    _state_columns_kernel[(rows, triton.cdiv(width, BLOCK))](
        x, out, x.stride(0), out.stride(0), width, BLOCK=BLOCK, **turns(x)
    )


def put_columns(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write rows x [T, E] into the columns `out` [T, E] of a wider buffer of their type."""
    if runs_kernels(x):
        put_columns_triton(x, out)
    else:
        out.copy_(x)


def cost(rows: int, row_bytes: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` whose tensors hold `row_bytes` together."""
    return 0, 2 * rows * row_bytes + 8 * rows
