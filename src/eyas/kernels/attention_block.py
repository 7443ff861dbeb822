"""A block of keys against a tile of rows: scores, weights and sums of attention, one after another.

Two ways to lay them. AXIS 0: scores stand upright, a block's keys are the rows of the product and
the tile's rows its columns, so that sums are [D, R]. AXIS 1: the tile's rows are the rows of the
product, `ROWS_OF_WARPS` of them, sums are [R, D]; what weighs values then never leaves its warp,
and neither does a row's largest score. A row's arithmetic is the same in all tiles of one way. Of
latents it is the same both ways: tensor cores give a number the same bits wherever it stands in a
product, and masses are added in one order. That holds on an H200, and is to be tried on other GPUs
(`tests/kernels/test_paged_attention.py`). Hence few rows of latents stand upright, many lie across.
Online softmax as in FlashAttention (arXiv 2205.14135). Nothing here knows splits or programs.
"""

from __future__ import annotations

from eyas.kernels.kv_write import head_rows
from eyas.kernels.lang import tl, triton
from eyas.kernels.splits import FLOOR

HIDDEN = tl.constexpr(-1e30)
"""Score of a key that a row does not see: its weight is exactly zero."""
ROWS_OF_WARPS = tl.constexpr(64)
"""Rows of a product of four warps."""


@triton.jit
def flat_places(  # type: ignore[no-untyped-def]
    table_ptr, order_ptr, start, last, prefix, table_width,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, RANKS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Flat positions int32[BLOCK] of the places from `start` on, a multiple of BLOCK.

    Those past `last` are told as that one. Across, where heads are long, a thread has several
    places of a run that lies in one page, and asks for it once.
    """
    kv = tl.minimum(start + tl.arange(0, BLOCK), last)
    place = kv.to(tl.uint32)  # of unsigned numbers a page's powers of two are shifts and masks
    run: tl.constexpr = min(BLOCK, PAGE & -PAGE) if AXIS == 1 else 1
    if run == 1:
        number = (place // PAGE).to(tl.int32)
        page = tl.load(table_ptr + number, number < table_width, 0).to(tl.int32)
    else:
        firsts = tl.minimum(start + tl.arange(0, BLOCK // run) * run, last)
        number = (firsts.to(tl.uint32) // PAGE).to(tl.int32)
        page = tl.load(table_ptr + number, number < table_width, 0).to(tl.int32)
        page = tl.reshape(tl.broadcast_to(page[:, None], (BLOCK // run, run)), (BLOCK,))
    flat = page * PAGE + (place % PAGE).to(tl.int32)
    if RANKS:
        tail = tl.load(order_ptr + kv - prefix, kv >= prefix, 0).to(tl.int32)
        flat = tl.where(kv >= prefix, tail, flat)
    return flat


@triton.jit
def _laid(x, M: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows x [R, SIZE] as the product takes them; repeated where it has more."""
    if x.shape[0] < M:
        many = tl.broadcast_to(x[None, :, :], (M // x.shape[0], x.shape[0], x.shape[1]))
        x = tl.reshape(many, (M, x.shape[1]))
    return tl.trans(x) if AXIS == 0 else x


@triton.jit
def queries(  # type: ignore[no-untyped-def]
    q_ptr, cos_ptr, sin_ptr, first_row, last_row, q_stride, rope_stride, kind: tl.constexpr,
    GROUP: tl.constexpr, R: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SIZE_A: tl.constexpr, SIZE_B: tl.constexpr, ROPE: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Rotated queries of a tile in the pool's type, in one part or two."""
    rows = first_row + tl.arange(0, R)
    used, node = rows < last_row, tl.minimum(rows, last_row - 1) // GROUP
    start = node * q_stride + rows % GROUP * DIM
    qa = head_rows(
        q_ptr, cos_ptr, sin_ptr, start, node, used, rope_stride,
        0, SIZE_A, DIM if SIZE_B == 0 else WIDE, DIM, ROPE,
    )  # fmt: skip
    qb = qa
    if SIZE_B > 0:
        qb = head_rows(
            q_ptr, cos_ptr, sin_ptr, start, node, used, rope_stride, WIDE, SIZE_B, DIM, DIM, ROPE
        )
    return _laid(qa.to(kind), M, AXIS), _laid(qb.to(kind), M, AXIS)


@triton.jit
def _numbers(ptr, SIZE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """COUNT numbers behind each pointer [BLOCK, 1], and zeros up to SIZE."""
    dims = tl.arange(0, SIZE)[None, :]
    return tl.load(
        ptr + dims, None if COUNT == SIZE else dims < COUNT, None if COUNT == SIZE else 0
    )


@triton.jit
def block(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, flat,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_V: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Keys at the positions `flat` in one part or two, and their values."""
    flat = flat.to(tl.int64)[:, None]
    ka = _numbers(k_ptr + flat * DIM, SIZE_A, DIM if SIZE_B == 0 else WIDE)
    kb, v = ka, ka
    if SIZE_B > 0:
        kb = _numbers(k_ptr + flat * DIM + WIDE, SIZE_B, DIM - WIDE)
    if not LATENT:
        v = _numbers(v_ptr + flat * WIDE, SIZE_V, WIDE)
    return ka, kb, v


@triton.jit
def seen(  # type: ignore[no-untyped-def]
    kv, low, end, bits, prefix, MASKED: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """bool, as scores are laid: which places rows see."""
    kv = tl.expand_dims(kv, 1 - AXIS)
    found = (kv < tl.expand_dims(end, AXIS)) & (kv >= tl.expand_dims(low, AXIS))
    if MASKED:
        tail = kv - prefix
        place = tl.minimum(tl.maximum(tail, 0), 63).to(tl.int64)
        found &= (tail < 0) | ((tl.expand_dims(bits, AXIS) >> place) & 1 != 0)
    return found


@triton.jit
def scores(  # type: ignore[no-untyped-def]
    ka, kb, qa, qb, SIZE_B: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Products float32 of keys, in one part or two, with queries.

    Parts are added here: a product that another one adds to would be done by all warps alike.
    """
    if AXIS == 1:
        found = tl.dot(qa, tl.trans(ka), input_precision="ieee")
    else:
        found = tl.dot(ka, qa, input_precision="ieee")
    if SIZE_B > 0:
        if AXIS == 1:
            rest = tl.dot(qb, tl.trans(kb), input_precision="ieee")
        else:
            rest = tl.dot(kb, qb, input_precision="ieee")
        found = tl.fma(found, tl.full(found.shape, 1.0, tl.float32), rest)
    return found


@triton.jit
def nothing(  # type: ignore[no-untyped-def]
    M: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Largest scores, mass and sums of M rows that have seen no key."""
    top = tl.full([M], FLOOR, tl.float32)
    if AXIS == 0:
        mass, acc = tl.zeros([BLOCK, M], tl.float32), tl.zeros([SIZE, M], tl.float32)
    else:
        mass, acc = tl.zeros([M], tl.float32), tl.zeros([M, SIZE], tl.float32)
    if LATENT:
        mass = tl.zeros([4, 8, M] if AXIS == 0 else [M, 4, 8], tl.float32)
    return top, mass, acc


@triton.jit
def _pairs(weights, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of a latent block's 64 places, those added that a thread has, whichever way they lie.

    [4, 8, R] with AXIS 0, [R, 4, 8] with AXIS 1.
    """
    if AXIS == 0:
        weights = tl.reshape(weights, (4, 2, 8, weights.shape[1]))
    else:
        weights = tl.reshape(weights, (weights.shape[0], 4, 2, 8))
    return tl.sum(weights, AXIS + 1)


@triton.jit
def absorb(score, v, factor, top, mass, acc, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's scores and values [BLOCK, D] taken into the sums.

    The mass, [BLOCK, R] with AXIS 0 and as `_pairs` leaves it of latents, is summed over a split's
    blocks here, over a block's places when the split is done; else it is [R].
    """
    higher = tl.maximum(top, tl.max(score, AXIS) * factor)
    weights = tl.exp2(tl.fma(score, factor, tl.expand_dims(-higher, AXIS)))
    shrink = tl.where(top > FLOOR, tl.exp2(top - higher), 0.0)  # what a split left is dropped
    acc *= tl.expand_dims(shrink, AXIS)
    if len(mass.shape) == 3:
        near = shrink[None, None, :] if AXIS == 0 else shrink[:, None, None]
        mass = tl.fma(mass, near, _pairs(weights, AXIS))
    elif AXIS == 0:
        mass = tl.fma(mass, shrink[None, :], weights)
    else:
        mass = tl.fma(mass, shrink, tl.sum(weights, 1))
    if AXIS == 0:
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return higher, mass, acc


@triton.jit
def whole(mass, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass [R] of a split; latents' is added pair by pair, in one order however it is laid."""
    if len(mass.shape) == 3:
        if AXIS == 0:
            mass = tl.reshape(mass, (2, 2, 2, 2, 2, mass.shape[2]))
        else:
            mass = tl.reshape(mass, (mass.shape[0], 2, 2, 2, 2, 2))
        for last in tl.static_range(4, -1, -1):  # those of a thread and a warp before others
            mass = tl.sum(mass, AXIS + last)
    elif len(mass.shape) == 2:
        mass = tl.sum(mass, 0)
    return mass
