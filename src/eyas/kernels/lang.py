"""Triton where it is installed, and when its kernels run.

Kernel files take `triton` and `tl` from here, so that a machine without Triton can import them: it
runs their torch references. Nothing here knows an operation.
"""

from __future__ import annotations

from functools import cache
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

__all__ = [
    "await_turn",
    "block_of",
    "pass_turn",
    "prefetch",
    "runs_kernels",
    "shared_bytes",
    "take_turn",
    "tl",
    "triton",
    "turns",
    "warpgroups",
    "warps_of",
]

EARLY = True
"""Whether kernels are launched before the one they follow has ended: see `take_turn`.

What a pass is given (lengths, pages, bits of trees) is written before its embedding is read, by a
launch that lets the next one come only when all before it have ended; so a kernel may read that
ahead of its turn.
"""


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether an operation on `x` launches its kernel, and not the reference.

    It does on a GPU, or where Triton interprets, unless a gradient may be asked for.
    """
    return (x.is_cuda or INTERPRETED) and not torch.is_grad_enabled()


@triton.jit
def take_turn(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """First of all in a kernel: wait for the launch before, then let the next one come.

    On a GPU of the Hopper generation or later a kernel launched EARLY may begin while the one it
    follows still runs (programmatic dependent launch). Until that one has ended and its writes are
    seen it must touch no memory that any launch writes, so every program of it waits here. A kernel
    that is not launched so follows as ever.
    """
    await_turn(EARLY)
    pass_turn(EARLY)


@triton.jit
def await_turn(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """`take_turn` without letting the next launch come; `pass_turn` or a program's end does."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pass_turn(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next launch come once all programs have said so.

    It begins wherever a multiprocessor has room by then, and stays there. So programs that leave
    room on few of them say so late, when what follows has much to do.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(address, size, LINES: tl.constexpr = 8):  # type: ignore[no-untyped-def]
    """Bring `size` bytes, one at least, at each int64 `address` [N] into the L2 cache.

    A thread asks for lines of 128 bytes, LINES of an address together. Bulk requests would be
    fewer, but each has its operands from registers that a warp has once: 32 threads would ask in
    turn, and every warp for all there is.
    """
    for first in range(0, size, 128 * LINES):
        inside = tl.minimum(first + tl.arange(0, LINES) * 128, size - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [address[:, None] + inside[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def turns(x: torch.Tensor) -> dict[str, bool]:
    """Arguments of a launch on x's device, for a kernel that takes its turn by `EARLY`."""
    early = EARLY and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


SHARED_BYTES = 227 * 2**10
"""Shared memory of a program of an H200: what constants of plans were chosen for."""


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program on `device` may take; an H200's where it is no GPU."""
    if device.type != "cuda":
        return SHARED_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def warpgroups(x: torch.Tensor) -> bool:
    """Whether tensor cores of x's device read shared memory while a program goes on, as Hopper's.

    What they read then lies in two buffers at least (`wgmma`).
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def block_of(size: int) -> int:
    """The power of two that covers `size`."""
    return 1 << max(size - 1, 0).bit_length()


def warps_of(block: int) -> int:
    """Warps for a program that reduces one row of `block` numbers."""
    return min(max(block // 512, 1), 16)
