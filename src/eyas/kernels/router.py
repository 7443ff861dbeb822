"""Hidden rows to experts: router product, scores, choice and lists, in one launch for few rows.

A program multiplies `OUTPUTS` experts' weights with `ROWS` rows over a chunk of the inputs and
leaves the float32 sums; the last program of the rows adds them, chunk after chunk, and chooses by
`eyas.kernels.route.choose`. Where the pass is one tile of rows it also lists each expert's pairs
for the kernels of `eyas.kernels.experts_triton`. Of many rows a program goes through all chunks
itself, adding in the same order, and a second launch chooses. The oracle is the reference below.

Products of 16-bit rows are exact and their sums float32: float32 weights are taken apart into three
bfloat16 numbers whose sum they are, so that tensor cores multiply them (as in Henry, Tang and
Heinecke, arXiv 1904.06376). Scores stand upright, experts by rows, so the tensor cores' work is
shaped by the experts, and a row's is the same in a wider tile.

Always holds: chunks follow from the weight's shape alone, so a row's bits depend neither on the
number of rows nor on its place among them. float32 rows have one tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from eyas.kernels.experts_triton import Lists, new_lists
from eyas.kernels.lang import block_of, prefetch, take_turn, tl, triton, turns
from eyas.kernels.route import choose, constants, route_reference, route_triton
from eyas.kernels.skinny import Counters
from eyas.model_config import MoEConfig

ROWS, OUTPUTS = 16, 16
"""Rows and experts of a program's product."""
MANY_ROWS, MANY_OUTPUTS = 64, 32
"""The same where rows are many and of 16 bits."""
MOST_ROWS = 256
"""Of more rows every program goes through all chunks."""
DEPTH, STAGES = 64, 4
"""Inputs of a step of a product, which is part of its arithmetic, and steps under way."""
CHUNK = 128
"""The shortest chunk."""
REGISTERS = 128
"""Of a thread of eight warps: two programs share a multiprocessor."""
PROGRAMS = 512
"""Chunks are as long as it takes that a tile of rows has no more programs."""


class Chosen(NamedTuple):
    """Each row's experts, best first."""

    ids: torch.Tensor
    """int64[T, K]"""
    weights: torch.Tensor
    """float32[T, K]"""
    lists: Lists | None = None
    """The same by expert, where it was no work to make it."""


class Plan(NamedTuple):
    """How the product of a router is cut."""

    rows: int
    outputs: int
    chunk: int
    chunks: int
    """Programs that share an expert's inputs; 1: each goes through all of them."""
    warps: int
    choices: int
    """At most so many rows choose at a time; 0: in another launch."""


def plan_of(num_rows: int, num_experts: int, inner: int, narrow: bool) -> Plan:
    """The cut for `num_rows` rows of `inner` numbers; `narrow`: tensor cores multiply them."""
    tiles, chunk = -(-num_experts // OUTPUTS), CHUNK
    while tiles * -(-inner // chunk) > PROGRAMS:
        chunk *= 2
    if num_rows <= MOST_ROWS:
        wide = num_experts > 128
        return Plan(ROWS, OUTPUTS, chunk, -(-inner // chunk), 8 if wide else 4, 4 if wide else 16)
    if narrow:
        return Plan(MANY_ROWS, MANY_OUTPUTS, chunk, 1, 4, 0)
    return Plan(ROWS, OUTPUTS, chunk, 1, 4, 0)


def router_reference(
    x: torch.Tensor, weight: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None
) -> Chosen:
    """See `router`; without a kernel's demands."""
    kind = torch.float32 if config.float32_router else x.dtype
    return Chosen(*route_reference(F.linear(x.to(kind), weight.to(kind)), config, bias))


@triton.jit
def _product(w, x, total):  # type: ignore[no-untyped-def]
    """`w [OUTPUTS, DEPTH] @ x[ROWS, DEPTH].T + total`, float32 sums of exact products."""
    x = tl.trans(x)
    if w.dtype == x.dtype:
        total = tl.dot(w, x, total, input_precision="ieee")
    elif x.dtype == tl.bfloat16:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(low, x, total)
        total = tl.dot(middle, x, total)
        total = tl.dot(high, x, total)
    else:
        total = tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    return total


@triton.jit
def _chunk_sums(  # type: ignore[no-untyped-def]
    weights,
    rows,
    used,
    first,
    inner,
    EVEN: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """float32[OUTPUTS, ROWS]: the products over one chunk of the inputs."""
    depth = tl.arange(0, DEPTH)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for k in range(first, tl.minimum(first + CHUNK, inner), DEPTH):
        if EVEN:
            w, x = tl.load(weights + depth + k), tl.load(rows + depth + k, used, 0.0)
        else:
            left = depth < inner - k
            w = tl.load(weights + depth + k, left, 0.0)
            x = tl.load(rows + depth + k, used & left, 0.0)
        total = _product(w, x, total)
    return total


@triton.jit
def _list(  # type: ignore[no-untyped-def]
    ids_ptr,
    members_ptr,
    counts_ptr,
    num_rows,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Write each expert's pairs, ascending, and their number, from the ids of all pairs."""
    every, pair = tl.arange(0, EXPERT_BLOCK), tl.arange(0, PAIRS)
    tl.store(counts_ptr + every, 0, every < EXPERTS)
    tl.debug_barrier()  # ids stand, and zeros before counts
    used = pair < num_rows * TOP_K
    expert = tl.load(ids_ptr + pair, used, -1).to(tl.int32)
    same = expert[:, None] == expert[None, :]
    before = same & (pair[None, :] < pair[:, None])
    count, place = tl.sum(same.to(tl.int32), 1), tl.sum(before.to(tl.int32), 1)
    tl.store(members_ptr + expert * num_rows + place, pair, used)
    tl.store(counts_ptr + expert, count, used)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    x_ptr,
    bias_ptr,
    part_ptr,
    ids_ptr,
    weights_ptr,
    members_ptr,
    counts_ptr,
    first_row,
    num_rows,
    factor,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Add the chunks of a tile of rows in order, choose experts, and list them if it is all."""
    experts: tl.constexpr = GROUPS * MEMBERS
    group = tl.arange(0, GROUP_BLOCK)[:, None]
    member = tl.arange(0, MEMBER_BLOCK)[None, :]
    there = ((group < GROUPS) & (member < MEMBERS))[None, :, :]
    for start in range(first_row, tl.minimum(first_row + ROWS, num_rows), CHOICES):
        row = start + tl.arange(0, CHOICES)
        parts = part_ptr + (row * experts)[:, None, None] + (group * MEMBERS + member)[None, :, :]
        used = there & (row < num_rows)[:, None, None]
        logits = tl.zeros([CHOICES, GROUP_BLOCK, MEMBER_BLOCK], tl.float32)
        for number in tl.static_range(CHUNKS):
            parts_of = parts + number * num_rows * experts
            logits += tl.load(parts_of, used, 0.0, cache_modifier=".cg")
        if ROUNDED:
            logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
        chosen, chances = choose(
            tl.where(there, logits, float("-inf")),
            bias_ptr,
            factor,
            GROUPS,
            MEMBERS,
            TOP_K,
            TOP_GROUPS,
            SIGMOID,
            BIASED,
            TOP2,
            NORMALIZE,
            GROUP_BLOCK,
            MEMBER_BLOCK,
            K_BLOCK,
        )
        place = tl.arange(0, K_BLOCK)[None, :]
        used = (row < num_rows)[:, None] & (place < TOP_K)
        where = row[:, None] * TOP_K + place
        tl.store(ids_ptr + where, chosen.to(tl.int64), used)
        tl.store(weights_ptr + where, chances, used)
    if PAIRS > 0:
        block: tl.constexpr = GROUP_BLOCK * MEMBER_BLOCK
        _list(ids_ptr, members_ptr, counts_ptr, num_rows, TOP_K, experts, block, PAIRS)


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    part_ptr,
    arrived_ptr,
    ids_ptr,
    weights_ptr,
    members_ptr,
    counts_ptr,
    num_rows,
    inner,
    x_stride,
    factor,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHOICES: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile of rows, tile of experts, chunk of inputs); with one chunk: all inputs."""
    experts: tl.constexpr = GROUPS * MEMBERS
    first_row, chunk = tl.program_id(0) * ROWS, tl.program_id(2)
    row = first_row + tl.arange(0, ROWS)
    expert = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights = w_ptr + tl.minimum(expert, experts - 1) * inner
    if EARLY & (CHUNKS > 1):  # others have many rows, and time
        width: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        size = tl.minimum(CHUNK, inner - chunk * CHUNK) * width
        prefetch((weights + chunk * CHUNK).to(tl.int64), size, 4)
    take_turn(EARLY)
    weights = weights[:, None]
    rows, used = x_ptr + (row.to(tl.int64) * x_stride)[:, None], (row < num_rows)[:, None]
    where = (chunk * num_rows + row)[None, :].to(tl.int64) * experts + expert[:, None]
    inside = (row < num_rows)[None, :] & (expert < experts)[:, None]
    if CHUNKS == 1:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for first in range(0, inner, CHUNK):
            total += _chunk_sums(
                weights, rows, used, first, inner, EVEN, CHUNK, ROWS, OUTPUTS, DEPTH
            )
        if ROUNDED:
            total = total.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(part_ptr + where, total, inside)
    else:
        first = chunk * CHUNK
        total = _chunk_sums(weights, rows, used, first, inner, EVEN, CHUNK, ROWS, OUTPUTS, DEPTH)
        tl.store(part_ptr + where, total, inside)
        tl.debug_barrier()  # all threads' sums stand before the count says so
        others = tl.num_programs(1) * tl.num_programs(2) - 1
        arrived_ptr += tl.program_id(0)
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == others:
            tl.store(arrived_ptr, 0)
            _finish(
                x_ptr,
                bias_ptr,
                part_ptr,
                ids_ptr,
                weights_ptr,
                members_ptr,
                counts_ptr,
                first_row,
                num_rows,
                factor,
                GROUPS,
                MEMBERS,
                TOP_K,
                TOP_GROUPS,
                SIGMOID,
                BIASED,
                TOP2,
                NORMALIZE,
                GROUP_BLOCK,
                MEMBER_BLOCK,
                K_BLOCK,
                ROUNDED,
                CHUNKS,
                ROWS,
                CHOICES,
                PAIRS,
            )


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: MoEConfig,
    bias: torch.Tensor | None,
    counters: Counters,
) -> Chosen:
    """The experts of rows x [T, H] in the model's dtype, contiguous each, on a device of kernels.

    Weights [E, H] are of x's type or float32; their products are summed in float32 and the sums
    rounded to x's type unless the config says float32. `bias` float32[E] counts for the choice
    alone. `counters` are this router's alone.
    """
    (num_rows, inner), num_experts = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous(), "numbers of a row lie side by side"
    wide = x.dtype == torch.float32 or (x.dtype == torch.float16 and x.dtype != weight.dtype)
    plan = plan_of(num_rows, num_experts, inner, narrow=not wide)
    split = plan.chunks > 1
    tiles, shape = -(-num_rows // plan.rows), (num_rows, config.top_k)
    parts = x.new_empty(plan.chunks, num_rows, num_experts, dtype=torch.float32)
    ids = x.new_empty(shape, dtype=torch.int64)
    weights = x.new_empty(shape, dtype=torch.float32)
    listed = split and 1 < num_rows <= ROWS
    lists, block = new_lists(x, num_experts) if listed else None, block_of(min(num_rows, ROWS))
    _router_kernel[(tiles, -(-num_experts // plan.outputs), plan.chunks)](
        x,
        weight,
        x if bias is None else bias,
        parts,
        counters.zeros(MOST_ROWS // ROWS, x.device) if split else parts,
        ids,
        weights,
        ids if lists is None else lists.members,
        ids if lists is None else lists.counts,
        num_rows,
        inner,
        x.stride(0),
        config.scaling_factor,
        ROUNDED=not config.float32_router and x.dtype != torch.float32,
        CHUNKS=plan.chunks,
        CHUNK=plan.chunk,
        EVEN=inner % DEPTH == 0,
        ROWS=plan.rows,
        OUTPUTS=plan.outputs,
        DEPTH=DEPTH,
        CHOICES=min(block, plan.choices),
        PAIRS=block_of(block * config.top_k) if listed else 0,
        num_stages=STAGES,
        num_warps=plan.warps,
        maxnreg=REGISTERS if plan.warps == 8 else None,
        **constants(config, bias is not None),
        **turns(x),
    )
    if not split:
        return Chosen(*route_triton(parts[0], config, bias))
    return Chosen(ids, weights, lists)


def cost(rows: int, config: MoEConfig, inner: int, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) of few rows of 16 bits and weights of `itemsize` bytes a number."""
    chunks = plan_of(rows, config.num_experts, inner, narrow=True).chunks
    flops = 2 * rows * config.num_experts * inner
    parts = 2 * 4 * chunks * rows * config.num_experts
    read = (config.num_experts * itemsize + 2 * rows) * inner
    return flops, read + parts + rows * config.top_k * 16
