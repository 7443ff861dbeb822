"""Scores and numbers in one integer, so that one maximum finds both, for use inside kernels.

A key orders by score, ties by lower number; what is not a number stands above all scores, as in
torch's maximum. Numbers are below 2**31 - 1.
"""

from __future__ import annotations

from eyas.kernels.lang import tl, triton


@triton.jit
def key_of(score, number):  # type: ignore[no-untyped-def]
    """int64 keys of float32 scores and int32 numbers."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def without(keys, gone):  # type: ignore[no-untyped-def]
    """`keys` with the least of all integers where `gone`."""
    return tl.where(gone, -0x8000000000000000, keys)


@triton.jit
def number_of(key):  # type: ignore[no-untyped-def]
    """int32 number of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def score_of(key):  # type: ignore[no-untyped-def]
    """float32 score of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
