"""Products of latent attention with a matrix a head, for few rows, with no copies around them.

Queries take the matrix that would have made keys, results the one that makes values (DeepSeek-V2,
arXiv 2405.04434, section 2.1.2). The kernel reads heads where they lie, writes them where attention
or the next layer wants them, and copies what stands behind a query. The launch that makes a layer's
queries also norms its new latents, in programs of their own, beside the products.

Always holds: rows go through tiles of `ROWS`, whose numbers do not depend on the tile's other rows,
and a latent is normed by one program, the same way in a pass of any size. A row's bits are those
it has alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas.kernels.lang import block_of, prefetch, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.norm import Norm, norm_weight, normed_row, rms_norm_reference

ROWS = 16
"""Rows per tile: the fewest a tensor core takes."""
MOST_ROWS = 64
"""Passes of more rows go to the library."""
DEPTH = 128
"""Inputs per step."""


class Latents(NamedTuple):
    """New rows' latents, with their rotary keys behind them."""

    rows: torch.Tensor
    """[T, n], numbers of a row side by side."""
    norm: Norm
    """Of the first numbers, as many as its weight has; it adds nothing."""


def head_product_reference(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None
) -> torch.Tensor:
    """See `head_product`."""
    y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
    return y if tail is None else torch.cat((y, tail), dim=-1)


def latents_reference(latents: Latents) -> torch.Tensor:
    """See `absorb`: the keys."""
    rows, norm = latents
    first, rest = rows.tensor_split((norm.weight.shape[0],), dim=-1)
    return torch.cat((rms_norm_reference(first, norm.weight, norm.eps), rest), dim=-1)


@triton.jit
def _norm_latents(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    out_ptr,
    stride,
    size,
    wide,
    eps,
    count,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """This program's of `count` rows: `size` numbers normed, those up to `wide` copied."""
    columns = tl.arange(0, BLOCK)
    latent = columns < size
    weight = norm_weight(w_ptr, columns, size)
    take_turn(EARLY)
    dtype = out_ptr.dtype.element_ty
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        x = tl.load(x_ptr + row * stride + columns, columns < wide, 0.0)
        y = normed_row(tl.where(latent, x.to(tl.float32), 0.0), weight, size, eps, dtype)
        tl.store(out_ptr + row * wide + columns, tl.where(latent, y, x), columns < wide)


@triton.jit
def _ask(  # type: ignore[no-untyped-def]
    w_ptr, w_in, w_out, first, inputs, outputs, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Bring a head's weights of OUTPUTS outputs, from the `first` on, into the L2 cache."""
    width: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    if w_in == 1:
        column = tl.minimum(first + tl.arange(0, OUTPUTS), outputs - 1)
        prefetch((w_ptr + column * w_out).to(tl.int64), inputs * width)
    else:
        for k in range(0, inputs, DEPTH):
            line = tl.minimum(k + tl.arange(0, DEPTH), inputs - 1)
            size = tl.minimum(OUTPUTS, outputs - first) * width
            prefetch((w_ptr + line * w_in + first * w_out).to(tl.int64), size, 1)


@triton.jit
def _absorb_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    tail_ptr,
    out_ptr,
    latent_ptr,
    norm_ptr,
    key_ptr,
    x_row,
    x_head,
    w_head,
    w_in,
    w_out,
    tail_row,
    tail_head,
    latent_row,
    num_rows,
    heads,
    inputs,
    outputs,
    tail,
    latent,
    key,
    eps,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile of outputs, head, tile of rows); with KEYS those behind the heads norm."""
    if KEYS > 0:
        first = tl.program_id(2).to(tl.int64) * ROWS
        if tl.program_id(1) == heads:
            count = tl.minimum(num_rows - first, ROWS).to(tl.int32)
            _norm_latents(
                latent_ptr + first * latent_row, norm_ptr, key_ptr + first * key,
                latent_row, latent, key, eps, count, KEYS, EARLY,
            )  # fmt: skip
            return
    head = tl.program_id(1).to(tl.int64)
    if EARLY:
        first_output = tl.program_id(0) * OUTPUTS
        _ask(w_ptr + head * w_head, w_in, w_out, first_output, inputs, outputs, OUTPUTS, DEPTH)
    take_turn(EARLY)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)
    there, inside = (row < num_rows)[:, None], (column < outputs)[None, :]
    rows = x_ptr + row[:, None] * x_row + head * x_head + depth[None, :]
    weights = w_ptr + head * w_head + depth[:, None] * w_in + column[None, :] * w_out
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in range(0, inputs, DEPTH):
        if EVEN:
            x = tl.load(rows + k, there, 0.0)
            w = tl.load(weights + k * w_in, inside, 0.0)
        else:
            left = depth < inputs - k
            x = tl.load(rows + k, there & left[None, :], 0.0)
            w = tl.load(weights + k * w_in, inside & left[:, None], 0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    wide = outputs + tail
    place = out_ptr + (row[:, None] * heads + head) * wide
    tl.store(place + column[None, :], total.to(out_ptr.dtype.element_ty), there & inside)
    if TAIL > 0:
        extra = tl.arange(0, TAIL)[None, :]
        source = tail_ptr + row[:, None] * tail_row + head * tail_head + extra
        used = there & (extra < tl.where(tl.program_id(0) == 0, tail, 0))
        tl.store(place + outputs + extra, tl.load(source, used), used)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    tail: torch.Tensor | None,
    latents: Latents | None,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(products of the first `heads` heads, keys); without latents the keys are nothing."""
    (num_rows, _, inputs), outputs = x.shape, w.shape[2]
    extra, behind = (0, x) if tail is None else (tail.shape[-1], tail)
    kept, norm = (x[:, 0], None) if latents is None else latents
    assert x.stride(-1) == behind.stride(-1) == kept.stride(-1) == 1, "numbers lie side by side"
    out = torch.empty(num_rows, heads, outputs + extra, dtype=x.dtype, device=x.device)
    keys = x.new_empty(num_rows, 0 if norm is None else kept.shape[1])
    tile = 32 if outputs <= 128 else 64
    each = heads + (norm is not None)
    _absorb_kernel[(triton.cdiv(outputs, tile), each, triton.cdiv(num_rows, ROWS))](
        x,
        w,
        behind,
        out,
        kept,
        w if norm is None else norm.weight,
        keys,
        *x.stride()[:2],
        *w.stride(),
        *behind.stride()[:2],
        kept.stride(0),
        num_rows,
        heads,
        inputs,
        outputs,
        extra,
        0 if norm is None else norm.weight.shape[0],
        kept.shape[1],
        0.0 if norm is None else norm.eps,
        EVEN=inputs % DEPTH == 0,
        TAIL=block_of(extra) if extra else 0,
        KEYS=0 if norm is None else block_of(kept.shape[1]),
        ROWS=ROWS,
        OUTPUTS=tile,
        DEPTH=DEPTH,
        **turns(x),
    )
    return out, keys


def head_product_triton(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None
) -> torch.Tensor:
    """See `head_product`."""
    return _launch(x, w, tail, None, x.shape[1])[0]


def absorb_triton(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor, latents: Latents, few: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `absorb`; unless rows are `few` the library makes the queries."""
    queries, keys = _launch(x, w, tail, latents, x.shape[1] if few else 0)
    return (queries if few else head_product_reference(x, w, tail)), keys


def head_product(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None, fixed: bool = False
) -> torch.Tensor:
    """`x[T, H, K] @ w[H, K, N]`, head by head, with `tail` [T, H, R] behind it: [T, H, N + R].

    x and w may be views. The result is in x's dtype, rounded once. With `fixed` the way is the same
    for any number of rows: on a GPU the kernel's.
    """
    few = runs_kernels(x) and (fixed or x.shape[0] <= MOST_ROWS)
    return (head_product_triton if few else head_product_reference)(x, w, tail)


def absorb(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor, latents: Latents, fixed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries: `head_product` of the other arguments, keys [T, n]: latents normed).

    One launch where rows are few, or `fixed`.
    """
    if runs_kernels(x):
        return absorb_triton(x, w, tail, latents, fixed or x.shape[0] <= MOST_ROWS)
    return head_product_reference(x, w, tail), latents_reference(latents)


def cost(rows: int, heads: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` without tails."""
    products = heads * inputs * outputs
    return 2 * rows * products, (products + rows * heads * (inputs + outputs)) * itemsize
