"""Rows of several tensors at once, fetched or stored by one index: what lies in slots.

One launch for up to eight tensors of any types and widths. Nothing is computed: bits are copied.
"""

from __future__ import annotations

import torch

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
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block of columns): row `index + row * step + offset` of every tensor."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    indexed = tl.load(index_ptr + row) + row * step + offset
    source, target = indexed, row
    if STORE:
        source, target = row, indexed
    _copy(s0, t0, source, target, columns, W0)
    _copy(s1, t1, source, target, columns, W1)
    _copy(s2, t2, source, target, columns, W2)
    _copy(s3, t3, source, target, columns, W3)
    _copy(s4, t4, source, target, columns, W4)
    _copy(s5, t5, source, target, columns, W5)
    _copy(s6, t6, source, target, columns, W6)
    _copy(s7, t7, source, target, columns, W7)


def _launch(
    index: torch.Tensor,
    step: int,
    offset: int,
    sources: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
    store: bool,
) -> None:
    """Copy rows between tensors of the same widths."""
    assert len(sources) <= MOST, f"{len(sources)} tensors, a launch takes {MOST}"
    assert all(t.is_contiguous() for t in (*sources, *targets)), "rows lie one behind the other"
    missing = MOST - len(sources)
    widths = [t[0].numel() for t in sources] + [0] * missing
    blocks = triton.cdiv(max(widths), BLOCK)
    index = index.contiguous()
    _slot_rows_kernel[(index.shape[0], blocks)](
        index,
        step,
        offset,
        *sources,
        *[index] * missing,
        *targets,
        *[index] * missing,
        **{f"W{i}": width for i, width in enumerate(widths)},
        STORE=store,
        BLOCK=BLOCK,
        **turns(index),
    )


def take_rows_triton(
    index: torch.Tensor, *tensors: torch.Tensor, step: int = 0, offset: int = 0
) -> list[torch.Tensor]:
    """See `take_rows`."""
    count = index.shape[0]
    taken = [torch.empty(count, *t.shape[1:], dtype=t.dtype, device=t.device) for t in tensors]
    _launch(index, step, offset, tensors, tuple(taken), False)
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


def put_rows_triton(
    index: torch.Tensor, targets: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...]
) -> None:
    """See `put_rows`."""
    _launch(index, 0, 0, tuple(r.contiguous() for r in rows), targets, True)


def put_rows_reference(
    index: torch.Tensor, targets: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...]
) -> None:
    """See `put_rows`."""
    for target, some in zip(targets, rows, strict=True):
        target[index] = some


def put_rows(
    index: torch.Tensor, targets: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...]
) -> None:
    """Store row r of each of `rows` as row `index[r]` of its target, types and widths alike."""
    run = put_rows_triton if runs_kernels(index) else put_rows_reference
    run(index, targets, rows)


def cost(rows: int, row_bytes: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` whose tensors hold `row_bytes` together."""
    return 0, 2 * rows * row_bytes + 8 * rows
