"""Which linear layers of few rows the own kernel runs, and how it cuts their weights.

A plan follows from a weight's shape alone, never from the number of rows: rows keep their bits.
Constants are from `benchmarks/skinny.py` on one H200 (docs/performance.md).
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import runs_kernels
from eyas.kernels.skinny_triton import ROWS, Plan

MOST_ROWS = ROWS[-1]
"""Passes of more rows go to the library."""
LEAST_BYTES = 1 << 19
"""Weights smaller than this go to the library."""
MOST_BYTES = 1 << 29
"""Larger weights, which large models' vocabulary heads are, the library reads as fast."""
SMALL = 8 << 20
"""Weights of less bytes are in the cache before their programs are under way."""
FILLING = 132
"""Tiles that keep a device busy."""


def plan_of(outputs: int, inputs: int, gated: bool = False) -> Plan | None:
    """The plan for a weight [outputs, inputs]; None: it is the library's."""
    if inputs % 16 or not worth(outputs, inputs):
        return None
    return config(outputs, inputs, gated)


def worth(outputs: int, inputs: int) -> bool:
    """Whether a weight is large enough for the kernel, and not one that the library reads best."""
    return LEAST_BYTES <= 2 * outputs * inputs <= MOST_BYTES


def config(outputs: int, inputs: int, gated: bool = False) -> Plan:
    """How a weight [outputs, inputs] is cut."""
    if 2 * outputs * inputs < SMALL:
        if gated:
            return Plan(outputs=64, depth=64, stages=8, ahead=1024)
        return Plan(outputs=16, depth=64, groups=4, stages=5, ahead=1024)
    if gated:
        if outputs < 128 * FILLING:
            return Plan(outputs=128, depth=64, splits=2, stages=6)
        return Plan(outputs=128, depth=128, stages=3)
    if outputs <= 2048:
        return Plan(outputs=16, depth=64, groups=4, stages=6)
    return Plan(outputs=64, depth=128, splits=2 if 2 * outputs < 64 * FILLING else 1, stages=5)


def serves(x: torch.Tensor) -> bool:
    """Whether rows x [..., K] are for the kernel, if the weight has a plan."""
    few = x.numel() <= MOST_ROWS * x.shape[-1]
    return runs_kernels(x) and few and x.dtype in (torch.bfloat16, torch.float16)
