"""RMSNorm of the parts of rows, each by its own weight, in one launch: heads, or stacked states.

Arithmetic is that of `eyas.kernels.norm`. A program norms some parts of one row, lying the same
way whatever the number of rows: a part's bits are those it has alone.
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns, warps_of
from eyas.kernels.norm import rms_norm_reference

MOST = 4
"""Weights a launch takes."""
NUMBERS = 2048
"""A program norms about so many, at least one part."""


def norm_parts_reference(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], each: int, eps: float
) -> torch.Tensor:
    """See `norm_parts`."""
    groups = x.split(each, dim=-2)
    normed = [rms_norm_reference(g, w, eps) for g, w in zip(groups, weights, strict=True)]
    return torch.cat(normed, dim=-2)


@triton.jit
def _norm_parts_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    w3_ptr,
    out_ptr,
    row_stride,
    part_stride,
    parts,
    each,
    size,
    eps,
    WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, tile of parts)."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.program_id(1) * PARTS + tl.arange(0, PARTS), tl.arange(0, BLOCK)
    inside = (part < parts)[:, None] & (column < size)[None, :]
    where = row * row_stride + part[:, None] * part_stride + column[None, :]
    x = tl.load(x_ptr + where, inside, 0.0).to(tl.float32)
    owner, columns = (part // each)[:, None], column[None, :] + part[:, None] * 0
    weight = tl.load(w0_ptr + columns, inside & (owner == 0), 0.0).to(tl.float32)
    if WEIGHTS > 1:
        weight += tl.load(w1_ptr + columns, inside & (owner == 1), 0.0).to(tl.float32)
    if WEIGHTS > 2:
        weight += tl.load(w2_ptr + columns, inside & (owner == 2), 0.0).to(tl.float32)
    if WEIGHTS > 3:
        weight += tl.load(w3_ptr + columns, inside & (owner == 3), 0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    y = (x * scale[:, None]).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + (row * parts + part[:, None]) * size + column[None, :], y.to(dtype), inside)


def norm_parts_triton(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], each: int, eps: float
) -> torch.Tensor:
    """See `norm_parts`."""
    assert len(weights) <= MOST, f"{len(weights)} weights, a launch takes {MOST}"
    parts, size = x.shape[-2:]
    rows = x.flatten(0, -3)
    assert x.stride(-1) == 1, f"numbers of a part lie side by side: {x.stride()}"
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = block_of(size)
    tile = min(max(1, NUMBERS // block), block_of(parts))
    _norm_parts_kernel[(rows.shape[0], triton.cdiv(parts, tile))](
        rows,
        *weights,
        *[weights[0]] * (MOST - len(weights)),
        out,
        rows.stride(0),
        rows.stride(1),
        parts,
        each,
        size,
        eps,
        WEIGHTS=len(weights),
        PARTS=tile,
        BLOCK=block,
        num_warps=warps_of(tile * block),
        **turns(rows),
    )
    return out.view(x.shape)


def norm_parts(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], each: int, eps: float
) -> torch.Tensor:
    """Parts x [..., P, D] normed, times the weight [D] of their group: `each` parts have the first.

    The next `each` have the second weight and so on; the last group may be smaller. Same shape and
    dtype, dense.
    """
    fits = runs_kernels(x) and len(weights) <= MOST
    return (norm_parts_triton if fits else norm_parts_reference)(x, weights, each, eps)


def cost(rows: int, parts: int, size: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` of so many parts."""
    return 4 * rows * parts * size, 2 * rows * parts * size * itemsize
