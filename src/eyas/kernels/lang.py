"""Triton where it is installed, and when its kernels run.

Kernel files take `triton` and `tl` from here, so that a machine without Triton can import them: it
runs their torch references. Nothing here knows an operation.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    INTERPRETED: bool = triton.knobs.runtime.interpret
except ImportError:
    INTERPRETED = False

    class _NoTriton:
        """Decorators that leave kernels uncompiled; nobody launches them here."""

        def jit(self, function: Any = None, **_: Any) -> Any:
            """`function` as it is, also below a decorator with options."""
            return function or self.jit

    triton, tl = _NoTriton(), None

__all__ = ["block_of", "runs_kernels", "tl", "triton", "warps_of"]


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether an operation on `x` launches its kernel, and not the reference.

    It does on a GPU, or where Triton interprets, unless a gradient may be asked for.
    """
    return (x.is_cuda or INTERPRETED) and not torch.is_grad_enabled()


def block_of(size: int) -> int:
    """The power of two that covers `size`."""
    return 1 << max(size - 1, 0).bit_length()


def warps_of(block: int) -> int:
    """Warps for a program that reduces one row of `block` numbers."""
    return min(max(block // 512, 1), 16)
