"""The kernel of linear layers of few rows: weights stream once, and rows are the narrow side.

A program multiplies a tile of weight rows with a tile of token rows; further ones are for other
programs. It may gate what comes out. With `Plan.splits` > 1
several programs share a tile of outputs, each with its own stretch of the inputs; the last of them
to finish adds the float32 parts in the order of the stretches. With `Plan.groups` > 1 the warps of
a program do the same among themselves. Oracles, and what a layer calls, are in
`eyas.kernels.skinny`.

Always holds: weight tiles, splits and the order of every sum follow from the weight's shape alone,
and token rows are the narrow side of the product, whatever their tile. So a row's bits depend
neither on the number of rows nor on its place among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eyas.kernels.lang import prefetch, shared_bytes, tl, triton, turns

ROWS = (16, 32, 64, 128, 256)
"""Token rows of a program's product: the least that holds them all, else the plan's most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a weight is cut among programs, and how its tiles are fetched."""

    outputs: int
    """Weight rows of a program: 16 * warps, or 64 and more where four warps act as one."""
    depth: int
    """Inputs of a tile, of every group."""
    splits: int = 1
    """Programs that share a tile of outputs."""
    groups: int = 1
    """Groups of warps that share a tile of outputs: 1 or all warps."""
    warps: int = 4
    stages: int = 4
    """Tiles on their way from memory, the one in use included."""
    rows: int = 64
    """Token rows of a program at most."""
    ahead: int = 0
    """Bytes of every weight row that a kernel launched early brings into the L2 cache first."""

    def stages_in(self, shared: int, rows: int, width: int) -> int:
        """Stages for which `shared` bytes have room, with `rows` token rows of `width` bytes each.

        A tile that is on its way has a place of its own; the one in use has been one of them.
        """
        tile = self.groups * self.depth * (self.outputs + rows) * width
        return max(2, min(self.stages, shared // tile + 1))


@triton.jit
def lines(tile, size, GATED: tl.constexpr, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weight rows of a tile, past the end the last ones; gated: its gates, then their ups."""
    place = tl.arange(0, OUTPUTS)
    if GATED:
        half: tl.constexpr = OUTPUTS // 2
        return tl.minimum(tile * half + place % half, size - 1) + place // half * size
    return tl.minimum(tile * OUTPUTS + place, size - 1)


@triton.jit
def ask(  # type: ignore[no-untyped-def]
    w_ptr, line, start, end, inner, most
):
    """Bring the first bytes, `most` at most, of every weight row's stretch into the L2 cache."""
    width: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    size = tl.minimum((end - start) * width, most)
    where = (w_ptr + line * inner + start).to(tl.int64)
    prefetch(where, size)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    total,
    bias_ptr,
    out_ptr,
    num_rows,
    size,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Bias and gate the sums [OUTPUTS, ROWS] of a tile, and write them."""
    tile, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = lines(tile, size, GATED, OUTPUTS)
    dtype = out_ptr.dtype.element_ty
    if BIASED:
        total += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    value = total.to(dtype)
    width: tl.constexpr = OUTPUTS // (2 if GATED else 1)
    if GATED:
        pairs = value.to(tl.float32).reshape(2, width, ROWS).permute(1, 2, 0)
        gate, up = tl.split(pairs)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        value = (silu * up).to(dtype)
    column = tile * width + tl.arange(0, width)
    there = (column < size)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :] * size + column[:, None], value, there)


@triton.jit
def _hand_in(  # type: ignore[no-untyped-def]
    total,
    part_ptr,
    count_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    size,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Finish; of several stretches, leave the sums, and the tile's last program adds them."""
    last = SPLITS == 1
    if SPLITS > 1:
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        shared = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts = part_ptr + shared * (SPLITS * OUTPUTS * ROWS) + place
        tl.store(parts + tl.program_id(2) * (OUTPUTS * ROWS), total)
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + shared, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for number in tl.static_range(SPLITS):
                total += tl.load(parts + number * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(count_ptr + shared, 0)
        _finish(
            total,
            bias_ptr,
            out_ptr,
            num_rows,
            size,
            GATED,
            BIASED,
            ROWS,
            OUTPUTS,
        )


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    num_rows,
    size,
    inner,
    x_stride,
    ahead,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token rows, tile of outputs, stretch of inputs).

    Weights are read before its turn; whoever follows may come at once, since it waits for all this.
    """
    tile, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = lines(tile, size, GATED, OUTPUTS).to(tl.int64)
    step: tl.constexpr = GROUPS * DEPTH
    stretch = tl.cdiv(tl.cdiv(inner, step), SPLITS) * step
    start = tl.program_id(2) * stretch
    end = tl.minimum(start + stretch, inner)
    if EARLY:
        if ahead > 0:
            ask(w_ptr, line, start, end, inner, ahead)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    depth = tl.arange(0, DEPTH)
    if GROUPS == 1:
        line, row, depth = line[:, None], row[:, None], depth[None, :]
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        depth = (tl.arange(0, GROUPS) * DEPTH)[:, None, None] + depth[None, None, :]
        line, row = line[None, :, None], row[None, :, None]
        total = tl.zeros([GROUPS, OUTPUTS, ROWS], tl.float32)
    weights = w_ptr + line * inner + depth
    used = (row < num_rows) & (depth >= 0)
    for k in range(start, end, step):
        if EVEN:
            there = used
            w = tl.load(weights + k, eviction_policy="evict_first")
        else:
            there = used & (depth < inner - k)
            within = (line >= 0) & (depth < inner - k)
            w = tl.load(weights + k, within, 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + row * x_stride + depth + k, there, 0.0)
        if GROUPS == 1:
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        else:
            x = tl.permute(x, (0, 2, 1))
            total = tl.dot(w, x, total, input_precision="ieee")
    if GROUPS > 1:
        total = tl.sum(total, 0)
    _hand_in(
        total,
        part_ptr,
        count_ptr,
        bias_ptr,
        out_ptr,
        num_rows,
        size,
        GATED,
        BIASED,
        SPLITS,
        ROWS,
        OUTPUTS,
    )


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output [T, N], gated [T, N / 2].

    x [T, K] of contiguous numbers a row, weight [N, K] in its dtype. `counts` int32[`counted`] are
    zeros, and are so again afterwards; they are needed where `plan` splits.
    """
    (num_rows, inner), size = x.shape, weight.shape[0] // (2 if gated else 1)
    assert x.stride(1) == 1 and weight.is_contiguous(), "numbers of a row lie side by side"
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    rows = next(n for n in ROWS if n >= min(num_rows, plan.rows))
    grid = (-(-num_rows // rows), -(-weight.shape[0] // plan.outputs), plan.splits)
    needed = math.prod(grid) * plan.outputs * rows if plan.splits > 1 else 0
    parts = torch.empty(needed, dtype=torch.float32, device=x.device)
    _skinny_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        parts,
        x if counts is None else counts,
        num_rows,
        size,
        inner,
        x.stride(0),
        plan.ahead,
        GATED=gated,
        BIASED=bias is not None,
        EVEN=inner % (plan.groups * plan.depth) == 0,
        SPLITS=plan.splits,
        GROUPS=plan.groups,
        ROWS=rows,
        OUTPUTS=plan.outputs,
        DEPTH=plan.depth,
        num_warps=plan.warps,
        num_stages=plan.stages_in(shared_bytes(x.device), rows, x.element_size()),
        **turns(x),
    )
    return out


def counted(plan: Plan, num_rows: int, outputs: int) -> int:
    """Counters that `run` needs for a weight of `outputs` rows, at most `num_rows` token rows."""
    return -(-num_rows // plan.rows) * -(-outputs // plan.outputs) if plan.splits > 1 else 0
