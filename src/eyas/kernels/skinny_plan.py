"""Which linear layers of few rows the own kernel runs, and how it cuts their weights.

A plan follows from a weight's shape alone, never from the number of rows: rows keep their bits.
Constants are from `benchmarks/skinny.py` on one H200 (docs/performance.md).
"""

from __future__ import annotations

import dataclasses

import torch

from eyas.kernels.lang import runs_kernels
from eyas.kernels.skinny_triton import ROWS, Plan

MOST_ROWS = 64
"""Passes of more rows go to the library."""
MOST_GATED_ROWS = 128
"""The same of large layers with gates, whose library product leaves the gates to another launch."""
FULL_ROWS = 225, ROWS[-1]
"""Between these rows the kernel is the quicker one again where its tiles fill the device well."""
WELL = 0.8
"""Of the places for programs in all turns, how many are to be taken for that."""
LEAST_BYTES = 1 << 19
"""Weights smaller than this go to the library."""
MOST_BYTES = 1 << 29
"""Larger weights, which large models' vocabulary heads are, the library reads as fast."""
SMALL = 8 << 20
"""Weights of less bytes are in the cache before their programs are under way."""
LARGE = 1 << 25
"""Weights of so many bytes have programs with a multiprocessor each: where two fit on one, those
that come early crowd where the kernel before them is through first, and others stay idle."""
WIDE = 1 << 14
"""Weights of a tile so large that beside more than 16 rows two programs have room with half."""
FILLING = 132
"""Tiles that keep a device busy."""


def plan_of(outputs: int, inputs: int, gated: bool = False) -> Plan | None:
    """The plan for a weight [outputs, inputs]; None: it is the library's."""
    if inputs % 16 or not worth(outputs, inputs):
        return None
    return config(outputs, inputs, gated)


def takes(num_rows: int, outputs: int, gated: bool) -> bool:
    """Whether the kernel runs a pass of so many rows over a weight that has a plan."""
    tiles, turns = outputs / 128, -(-outputs // (128 * FILLING))
    if not gated or tiles < FILLING:
        return num_rows <= MOST_ROWS
    full = FULL_ROWS[0] <= num_rows <= FULL_ROWS[1] and tiles >= WELL * FILLING * turns
    return num_rows <= MOST_GATED_ROWS or full


def of_rows(plan: Plan, num_rows: int) -> Plan:
    """`plan` for a pass of so many rows: what is fetched at once changes, and no sum's order."""
    if num_rows <= ROWS[0] or (num_rows <= MOST_ROWS and plan.depth * plan.outputs < WIDE):
        return plan
    if num_rows <= MOST_ROWS:
        return dataclasses.replace(plan, depth=64, stages=5 if num_rows <= 32 else 4)
    stages = 3 if num_rows <= 128 else 4
    return dataclasses.replace(plan, depth=64, warps=8, stages=stages, rows=ROWS[-1])


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
    stages = 6 if 2 * outputs * inputs >= LARGE else 5
    splits = 2 if 2 * outputs < 64 * FILLING else 1
    return Plan(outputs=64, depth=128, splits=splits, stages=stages)


def serves(x: torch.Tensor) -> bool:
    """Whether the kernel takes rows like x [..., K], if the weight has a plan."""
    return runs_kernels(x) and x.dtype in (torch.bfloat16, torch.float16)
