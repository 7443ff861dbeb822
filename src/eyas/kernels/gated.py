"""`silu(gate) * up` of rows that hold both side by side, in one pass over them.

Rounds as torch's two operators do: the silu to the rows' dtype, then the product. Numbers are
independent of each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.lang import runs_kernels, take_turn, tl, triton, turns

BLOCK = 1024
"""Outputs per program."""


def gated_reference(both: torch.Tensor) -> torch.Tensor:
    """See `gated`."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    both_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, tile of its outputs)."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(both_ptr + row * stride + columns, inside, 0.0).to(tl.float32)
    up = tl.load(both_ptr + row * stride + size + columns, inside, 0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (silu * up).to(dtype), inside)


def gated_triton(both: torch.Tensor) -> torch.Tensor:
    """See `gated`."""
    rows, size = both.reshape(-1, both.shape[-1]), both.shape[-1] // 2
    out = torch.empty(rows.shape[0], size, dtype=both.dtype, device=both.device)
    grid = (rows.shape[0], triton.cdiv(size, BLOCK))
    _gated_kernel[grid](rows, out, rows.stride(0), size, BLOCK=BLOCK, **turns(rows))
    return out.view(*both.shape[:-1], size)


def gated(both: torch.Tensor) -> torch.Tensor:
    """`both[..., 2 * I]`, gates first, to `silu(gate) * up` [..., I] in its dtype."""
    return gated_triton(both) if runs_kernels(both) else gated_reference(both)


def cost(rows: int, size: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` of `size` outputs."""
    return 5 * rows * size, 3 * rows * size * itemsize
