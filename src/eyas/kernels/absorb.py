"""Products of latent attention with a matrix a head, for few rows, with no copies around them.

Queries take the matrix that would have made keys, results the one that makes values (DeepSeek-V2,
arXiv 2405.04434, section 2.1.2). The kernel reads heads where they lie, writes them where attention
or the next layer wants them, and copies what stands behind a query. Rows go through tiles of
`ROWS`, whose numbers do not depend on the tile's other rows: a row's bits are those it has alone.
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns

ROWS = 16
"""Rows per tile: the fewest a tensor core takes."""
MOST_ROWS = 64
"""Passes of more rows go to the library."""
DEPTH = 128
"""Inputs per step."""


def head_product_reference(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None
) -> torch.Tensor:
    """See `head_product`."""
    y = torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
    return y if tail is None else torch.cat((y, tail), dim=-1)


@triton.jit
def _absorb_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    tail_ptr,
    out_ptr,
    x_row,
    x_head,
    w_head,
    w_in,
    w_out,
    tail_row,
    tail_head,
    num_rows,
    inputs,
    outputs,
    tail,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile of outputs, head, tile of rows)."""
    take_turn(EARLY)
    head = tl.program_id(1).to(tl.int64)
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
    place = out_ptr + (row[:, None] * tl.num_programs(1) + head) * wide
    tl.store(place + column[None, :], total.to(out_ptr.dtype.element_ty), there & inside)
    if TAIL > 0:
        extra = tl.arange(0, TAIL)[None, :]
        source = tail_ptr + row[:, None] * tail_row + head * tail_head + extra
        used = there & (extra < tl.where(tl.program_id(0) == 0, tail, 0))
        tl.store(place + outputs + extra, tl.load(source, used), used)


def head_product_triton(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None
) -> torch.Tensor:
    """See `head_product`."""
    (num_rows, heads, inputs), outputs = x.shape, w.shape[2]
    extra, behind = (0, x) if tail is None else (tail.shape[-1], tail)
    assert x.stride(-1) == behind.stride(-1) == 1, "numbers of a head lie side by side"
    out = torch.empty(num_rows, heads, outputs + extra, dtype=x.dtype, device=x.device)
    tile = 32 if outputs <= 128 else 64
    _absorb_kernel[(triton.cdiv(outputs, tile), heads, triton.cdiv(num_rows, ROWS))](
        x,
        w,
        behind,
        out,
        *x.stride()[:2],
        *w.stride(),
        *behind.stride()[:2],
        num_rows,
        inputs,
        outputs,
        extra,
        EVEN=inputs % DEPTH == 0,
        TAIL=block_of(extra) if extra else 0,
        ROWS=ROWS,
        OUTPUTS=tile,
        DEPTH=DEPTH,
        **turns(x),
    )
    return out


def head_product(
    x: torch.Tensor, w: torch.Tensor, tail: torch.Tensor | None = None, fixed: bool = False
) -> torch.Tensor:
    """`x[T, H, K] @ w[H, K, N]`, head by head, with `tail` [T, H, R] behind it: [T, H, N + R].

    x and w may be views. The result is in x's dtype, rounded once. With `fixed` the way is the same
    for any number of rows: on a GPU the kernel's.
    """
    few = runs_kernels(x) and (fixed or x.shape[0] <= MOST_ROWS)
    return (head_product_triton if few else head_product_reference)(x, w, tail)


def cost(rows: int, heads: int, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` without tails."""
    products = heads * inputs * outputs
    return 2 * rows * products, (products + rows * heads * (inputs + outputs)) * itemsize
