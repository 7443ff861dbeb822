"""The kernels of 8-bit layers of few rows: integers times integers, no weight is converted.

Token rows come as 16-bit integers cut in two bytes (`eyas.kernels.planes`): line 2 * t of the
planes holds the high bytes of row t, line 2 * t + 1 the low ones. A program multiplies a tile of
weight rows with the lines of a tile of token rows on the tensor cores, and puts each row's two
sums together at the end. As in `eyas.kernels.skinny_triton`, `Plan.splits` programs may share a
tile of outputs, and `Plan.groups` of warps the inputs of a program.

Always holds: sums are int32 and exact, whatever their order, up to `MOST_INPUTS` inputs. So a
row's bits depend neither on the plan nor on the other rows.
"""

from __future__ import annotations

import math

import torch

from eyas.kernels.lang import (
    block_of,
    shared_bytes,
    take_turn,
    tl,
    triton,
    turns,
    warps_of,
)
from eyas.kernels.norm import Norm, norm_weight, normed_row
from eyas.kernels.skinny_triton import Plan, ask, lines
from eyas.kernels.terms import summed

ROWS = (4, 8, 16, 32)
"""Token rows of a program's product: the least that holds them all, else the most."""
LARGEST = 127 * 256
"""The largest 16-bit integer whose high byte, rounded, is no more than 127."""
MOST_INPUTS = (2**31 - 1) // (127 * 128)
"""Inputs whose products' sum an int32 holds."""


@triton.jit
def _quantize_planes_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    delta_ptr,
    norm_ptr,
    total_ptr,
    planes_ptr,
    unit_ptr,
    x_stride,
    delta_stride,
    inner,
    eps,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): its planes; if NORM, of the row, plus `delta` if ADD, normed."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    weight = norm_weight(norm_ptr, k, inner) if NORM else k
    take_turn(EARLY)
    x = tl.load(x_ptr + row * x_stride + k, k < inner, 0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if ADD:
        delta = tl.load(delta_ptr + row * delta_stride + k, k < inner, 0.0).to(tl.float32)
        total = (x + delta).to(dtype)
        tl.store(total_ptr + row * inner + k, total, k < inner)
        x = total.to(tl.float32)
    if NORM:
        x = normed_row(x, weight, inner, eps, dtype).to(tl.float32)
    most = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
    scale = tl.div_rn(1.0, tl.maximum(most, 1e-30)) * LARGEST
    whole = tl.floor(x * scale + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    tl.store(planes_ptr + 2 * row * inner + k, high.to(tl.int8), k < inner)
    tl.store(planes_ptr + (2 * row + 1) * inner + k, (whole - high * 256).to(tl.int8), k < inner)
    tl.store(unit_ptr + row, most * (1.0 / LARGEST))


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    total,
    unit_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    size,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Join the sums [OUTPUTS, 2 * ROWS] of a tile, scale, bias and gate them, and write them."""
    tile, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = lines(tile, size, GATED, OUTPUTS)
    high, low = tl.split(total.reshape(OUTPUTS, ROWS, 2))
    unit = tl.load(unit_ptr + row, row < num_rows, 0.0)
    value = (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * unit[None, :]
    value *= tl.load(scale_ptr + line)[:, None]
    if BIASED:
        value += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    dtype = out_ptr.dtype.element_ty
    value = value.to(dtype)
    width: tl.constexpr = OUTPUTS // (2 if GATED else 1)
    if GATED:
        pairs = value.to(tl.float32).reshape(2, width, ROWS).permute(1, 2, 0)
        gate, up = tl.split(pairs)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        value = (silu * up).to(dtype)
    column = tile * width + tl.arange(0, width)
    there = (column < size)[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptr + row[None, :].to(tl.int64) * size + column[:, None], value, there)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    total, part_ptr, count_ptr, SPLITS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Leave the sums [OUTPUTS, WIDE] of a stretch; (those of all, whether this was the last)."""
    place = tl.arange(0, OUTPUTS)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    shared = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    parts = part_ptr + shared.to(tl.int64) * (SPLITS * OUTPUTS * WIDE) + place
    tl.store(parts + tl.program_id(2) * (OUTPUTS * WIDE), total)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + shared, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = tl.zeros([OUTPUTS, WIDE], tl.int32)
        for number in tl.static_range(SPLITS):
            total += tl.load(parts + number * (OUTPUTS * WIDE), cache_modifier=".cg")
        tl.store(count_ptr + shared, 0)
    return total, last


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _planes_linear_kernel(  # type: ignore[no-untyped-def]
    planes_ptr,
    unit_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    num_rows,
    size,
    inner,
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
    wide: tl.constexpr = 2 * ROWS
    tile, plane = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
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
        line, plane, depth = line[:, None], plane[:, None], depth[None, :]
        total = tl.zeros([OUTPUTS, wide], tl.int32)
    else:
        depth = (tl.arange(0, GROUPS) * DEPTH)[:, None, None] + depth[None, None, :]
        line, plane = line[None, :, None], plane[None, :, None]
        total = tl.zeros([GROUPS, OUTPUTS, wide], tl.int32)
    weights = w_ptr + line * inner + depth
    used = (plane < 2 * num_rows) & (depth >= 0)
    for k in range(start, end, step):
        if EVEN:
            there = used
            w = tl.load(weights + k, eviction_policy="evict_first")
        else:
            there = used & (depth < inner - k)
            within = (line >= 0) & (depth < inner - k)
            w = tl.load(weights + k, within, 0, eviction_policy="evict_first")
        x = tl.load(planes_ptr + plane * inner + depth + k, there, 0)
        if GROUPS == 1:
            total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
        else:
            total = tl.dot(w, tl.permute(x, (0, 2, 1)), total, out_dtype=tl.int32)
    if GROUPS > 1:
        total = tl.sum(total, 0)
    last = SPLITS == 1
    if SPLITS > 1:
        total, last = _gather(total, part_ptr, count_ptr, SPLITS, wide, OUTPUTS)
    if last:
        _finish(
            total,
            unit_ptr,
            scale_ptr,
            bias_ptr,
            out_ptr,
            num_rows,
            size,
            GATED,
            BIASED,
            ROWS,
            OUTPUTS,
        )


def planes_triton(
    x: torch.Tensor, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(planes, units) of x [T, K], normed if there is a norm, and x (+ its delta) [T, K].

    Planes and units are those of `eyas.kernels.planes.planes_reference`.
    """
    num_rows, inner = x.shape
    delta = None if norm is None or norm.delta is None else summed(norm.delta).view(x.shape)
    assert x.stride(1) == 1, "numbers of a row lie side by side"
    total = x if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    planes = torch.empty(2 * num_rows, inner, dtype=torch.int8, device=x.device)
    units = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = block_of(inner)
    _quantize_planes_kernel[(num_rows,)](
        x,
        x if delta is None else delta,
        x if norm is None else norm.weight,
        total,
        planes,
        units,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        inner,
        0.0 if norm is None else norm.eps,
        NORM=norm is not None,
        ADD=delta is not None,
        LARGEST=LARGEST,
        BLOCK=block,
        num_warps=warps_of(block),
        **turns(x),
    )
    return planes, units, total


def run(
    planes: torch.Tensor,
    units: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    plan: Plan,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output [T, N] in `dtype`, gated [T, N / 2].

    int8 planes [2 T, K], float32 units [T], int8 weight [N, K], float32 scales [N]. `counts`
    int32[`counted`] are zeros, and are so again afterwards; they are needed where `plan` splits.
    Passes of more than a tile of token rows are not split.
    """
    num_rows, inner = units.shape[0], weight.shape[1]
    size = weight.shape[0] // (2 if gated else 1)
    assert inner <= MOST_INPUTS, "the sums of more inputs overflow"
    out = torch.empty(num_rows, size, dtype=dtype, device=planes.device)
    rows = next((n for n in ROWS if n >= num_rows), ROWS[-1])
    splits = plan.splits if num_rows <= rows else 1
    grid = (-(-num_rows // rows), -(-weight.shape[0] // plan.outputs), splits)
    needed = math.prod(grid) * plan.outputs * 2 * rows if splits > 1 else 0
    parts = torch.empty(needed, dtype=torch.int32, device=planes.device)
    _planes_linear_kernel[grid](
        planes,
        units,
        weight,
        scales,
        units if bias is None else bias,
        out,
        parts,
        planes if counts is None else counts,
        num_rows,
        size,
        inner,
        plan.ahead,
        GATED=gated,
        BIASED=bias is not None,
        EVEN=inner % (plan.groups * plan.depth) == 0,
        SPLITS=splits,
        GROUPS=plan.groups,
        ROWS=rows,
        OUTPUTS=plan.outputs,
        DEPTH=plan.depth,
        num_warps=plan.warps,
        num_stages=plan.stages_in(shared_bytes(planes.device), 2 * rows, 1),
        **turns(planes),
    )
    return out


def counted(plan: Plan, outputs: int) -> int:
    """Counters that `run` needs for a weight of `outputs` rows; one tile of token rows."""
    return -(-outputs // plan.outputs) if plan.splits > 1 else 0
