"""Which linear layers of few rows the own kernel runs, and how it cuts their weights.

A plan follows from a weight's shape alone, never from the number of rows: rows keep their bits.
How weights are cut is reasoned, not measured: until `benchmarks/skinny.py` has shown on a GPU where
the kernel is faster, layers of 16 bits stay with the library (`IN_16_BITS`).
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import runs_kernels
from eyas.kernels.skinny_triton import ROWS, Plan

IN_16_BITS = False
"""Whether layers of 16 bits take the kernel where their shape is worth it."""
MOST_ROWS = ROWS
"""Passes of more rows go to the library."""
LEAST_BYTES = 1 << 19
"""Weights smaller than this go to the library."""
MOST_OUTPUTS = 65536
"""Layers of more outputs, which vocabulary heads are, reach the memory's speed in the library."""
MOST_NORMED = 2048
"""Longer rows are normed by a launch of their own, shorter ones by every program."""


def plan_of(outputs: int, inputs: int, itemsize: int = 2, gated: bool = False) -> Plan | None:
    """The plan for a weight [outputs, inputs] of so many bytes a number; None: the library's.

    The library has no 8-bit weights.
    """
    if inputs % 16 or (itemsize > 1 and not (IN_16_BITS and worth(outputs, inputs, itemsize))):
        return None
    return config(outputs, inputs, itemsize, gated)


def worth(outputs: int, inputs: int, itemsize: int) -> bool:
    """Whether a weight is large enough for the kernel, and not one that the library reads best."""
    return outputs * inputs * itemsize >= LEAST_BYTES and outputs <= MOST_OUTPUTS


def config(outputs: int, inputs: int, itemsize: int = 2, gated: bool = False) -> Plan:
    """How a weight [outputs, inputs] is cut."""
    longer = 2 // itemsize
    if outputs * inputs * itemsize < 1 << 23:
        wide = 32 if gated else 16
        return Plan(outputs=wide, depth=64 * longer, groups=4, warps=4, stages=5)
    if gated:
        return Plan(outputs=128, depth=64 * longer, warps=4, stages=5)
    splits = max(1, min(4, 264 // -(-outputs // 64), inputs // 1024))
    return Plan(outputs=64, depth=128 * longer, splits=splits, warps=4, stages=4)


def serves(x: torch.Tensor) -> bool:
    """Whether rows x [..., K] are for the kernel, if the weight has a plan."""
    few = x.numel() <= MOST_ROWS * x.shape[-1]
    return runs_kernels(x) and few and x.dtype in (torch.bfloat16, torch.float16)
