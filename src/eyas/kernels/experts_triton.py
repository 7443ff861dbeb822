"""Routed experts of few rows: each touched expert's weights are read once, however rows fall.

Three launches. The first lists every expert's pairs of a row and an expert, in order; it falls away
for one row alone, and where who chose has made the lists. The second multiplies gates and ups, the
third goes down, both with a program for an expert and a tile of its outputs. They leave the terms
of a sum by weight, in the order in which experts were chosen (`eyas.kernels.terms`): whoever norms
the rows next takes it. The expert that all rows share goes along in the same launches, and is
rounded on its own. The grids follow from shapes alone. The oracle is `experts_reference` of
`eyas.kernels.experts`; every product is rounded where it rounds.

Always holds: an expert's pairs go through tiles of `PAIRS`, whose numbers do not depend on the
tile's other pairs, and no sum is shared between programs. A row's bits are those it has alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from eyas.kernels.gated import gated
from eyas.kernels.lang import runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.terms import Terms

PAIRS = 16
"""Pairs per tile: the fewest a tensor core takes."""
SHARED_ROWS = 32
"""Up to so many rows the shared expert goes with the routed ones: its weights are read a tile."""
PAIRS_PER_EXPERT = 16
"""Up to so many pairs an expert, on average, this beats a grouped product."""
LIST_BLOCK = 1024
"""Pairs compared at a time when lists are made."""
OUTPUTS, DEPTH, STAGES = 32, 128, 4
"""A program's tile of weights, outputs (gates and ups: as many of each) by inputs, and how many of
them are on their way from memory."""


class Shared(NamedTuple):
    """The expert, or all of them together, that every row goes through; no rank's bias."""

    gate_up: torch.Tensor
    """[2 * S, H], gates first."""
    down: torch.Tensor
    """[H, S]"""


class Lists(NamedTuple):
    """Each expert's pairs of a row and an expert."""

    members: torch.Tensor
    """int32[E, T]: pairs t * K + k, ascending; the rest is unset."""
    counts: torch.Tensor
    """int32[E]: how many."""


def new_lists(x: torch.Tensor, num_experts: int) -> Lists:
    """Lists for rows x [T, H], to be filled."""
    members = x.new_empty(num_experts, x.shape[0], dtype=torch.int32)
    return Lists(members, x.new_empty(num_experts, dtype=torch.int32))


def shared_reference(x: torch.Tensor, shared: Shared) -> torch.Tensor:
    """`[T, H] -> [T, H]`: rows through the shared expert."""
    return F.linear(gated(F.linear(x, shared.gate_up)), shared.down)


@triton.jit
def _expert_list_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    members_ptr,
    counts_ptr,
    num_pairs,
    num_rows,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (expert): its pairs, ascending, and their number."""
    take_turn(EARLY)
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = tl.load(ids_ptr + pair, pair < num_pairs, -1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(members_ptr + expert * num_rows + place, pair, mine & (place < num_rows))
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, tl.minimum(count, num_rows))


@triton.jit
def _expert(  # type: ignore[no-untyped-def]
    slot, ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE: tl.constexpr, BY_PAIR: tl.constexpr
):
    """(expert of a slot, number of its pairs); no pairs where another slot has them.

    Slots stand for experts, or for pairs where those are fewer: an expert's first pair leads.
    """
    expert, count = slot.to(tl.int64), slot * 0 + 1
    if SINGLE or BY_PAIR:
        expert = tl.load(ids_ptr + slot)
    if not SINGLE:
        count = tl.load(counts_ptr + expert)
        if BY_PAIR:
            count = tl.where(tl.load(members_ptr + expert * num_rows) == slot, count, 0)
    return expert, count


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    members_ptr,
    slot,
    expert,
    alone,
    start,
    count,
    num_rows,
    SINGLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """(pairs, which of them are there) of a tile that begins at `start`; `alone`: of all rows."""
    place = start + tl.arange(0, PAIRS)
    there = place < count
    if SINGLE:
        pair = place * 0 + tl.where(alone, 0, slot)
    else:
        listed = tl.load(members_ptr + expert * num_rows + place, there, 0)
        pair = tl.where(alone, place, listed)
    return pair, there


@triton.jit
def _expert_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    out_ptr,
    shared_w_ptr,
    shared_out_ptr,
    ids_ptr,
    members_ptr,
    counts_ptr,
    x_stride,
    num_rows,
    top_k,
    size,
    inner,
    shared_size,
    tiles,
    shared_tiles,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (a tile of the shared expert's outputs, then slots by tiles): `silu(gate) * up`."""
    take_turn(EARLY)
    program = tl.program_id(0) - shared_tiles
    alone = program < 0
    slot, tile = tl.maximum(program, 0) // tiles, tl.maximum(program, 0) % tiles
    expert, count = _expert(slot, ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE, BY_PAIR)
    weights, out, wide, each = w_ptr + expert * (2 * size * inner), out_ptr, size, top_k
    if SHARED:
        if alone:
            weights, out = shared_w_ptr, shared_out_ptr
        wide, each = tl.where(alone, shared_size, size), tl.where(alone, 1, top_k)
        tile = tl.where(alone, program + shared_tiles, tile)
        count = tl.where(alone, num_rows, count)
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = columns < wide
    depth = tl.arange(0, DEPTH)
    weights = weights + (columns * inner)[None, :] + depth[:, None]
    dtype = out_ptr.dtype.element_ty
    for start in range(0, count, PAIRS):
        pair, there = _tile(members_ptr, slot, expert, alone, start, count, num_rows, SINGLE, PAIRS)
        rows = x_ptr + (pair // each)[:, None] * x_stride + depth[None, :]
        gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for k in range(0, inner, DEPTH):
            if EVEN:
                x = tl.load(rows + k, there[:, None], 0.0)
                g = tl.load(weights + k, inside[None, :], 0.0)
                u = tl.load(weights + wide * inner + k, inside[None, :], 0.0)
            else:
                left = depth < inner - k
                x = tl.load(rows + k, there[:, None] & left[None, :], 0.0)
                g = tl.load(weights + k, inside[None, :] & left[:, None], 0.0)
                u = tl.load(weights + wide * inner + k, inside[None, :] & left[:, None], 0.0)
            gate = tl.dot(x, g, gate, input_precision="ieee")
            up = tl.dot(x, u, up, input_precision="ieee")
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        where = out + pair[:, None] * wide + columns[None, :]
        tl.store(where, (silu * up).to(dtype), there[:, None] & inside[None, :])


@triton.jit
def _expert_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    out_ptr,
    shared_x_ptr,
    shared_w_ptr,
    shared_out_ptr,
    ids_ptr,
    members_ptr,
    counts_ptr,
    num_rows,
    size,
    inner,
    shared_inner,
    tiles,
    shared_tiles,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (a tile of the shared expert's outputs, then slots by tiles): the way down."""
    take_turn(EARLY)
    program = tl.program_id(0) - shared_tiles
    alone = program < 0
    slot, tile = tl.maximum(program, 0) // tiles, tl.maximum(program, 0) % tiles
    expert, count = _expert(slot, ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE, BY_PAIR)
    inputs, weights, out, long = x_ptr, w_ptr + expert * (size * inner), out_ptr, inner
    if SHARED:
        if alone:
            inputs, weights, out = shared_x_ptr, shared_w_ptr, shared_out_ptr
        long = tl.where(alone, shared_inner, inner)
        tile = tl.where(alone, program + shared_tiles, tile)
        count = tl.where(alone, num_rows, count)
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = columns < size
    depth = tl.arange(0, DEPTH)
    weights = weights + (columns * long)[None, :] + depth[:, None]
    for start in range(0, count, PAIRS):
        pair, there = _tile(members_ptr, slot, expert, alone, start, count, num_rows, SINGLE, PAIRS)
        rows = inputs + pair[:, None] * long + depth[None, :]
        total = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for k in range(0, long, DEPTH):
            if EVEN:
                x = tl.load(rows + k, there[:, None], 0.0)
                w = tl.load(weights + k, inside[None, :], 0.0)
            else:
                left = depth < long - k
                x = tl.load(rows + k, there[:, None] & left[None, :], 0.0)
                w = tl.load(weights + k, inside[None, :] & left[:, None], 0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
        where = out + pair[:, None] * size + columns[None, :]
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(where, value, there[:, None] & inside[None, :])


def suits(x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether so few rows x [T, H] are for `experts_triton`; follows from shapes and device."""
    return runs_kernels(x) and ids.numel() <= PAIRS_PER_EXPERT * gate_up.shape[0]


def experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    shared: Shared | None = None,
    lists: Lists | None = None,
    shared_rows: int = SHARED_ROWS,
) -> Terms:
    """See `eyas.kernels.experts.experts`; up to `shared_rows` rows `shared` goes along."""
    (num_rows, hidden), (num_experts, _, size) = x.shape, down.shape
    ids, pairs = ids.contiguous(), ids.numel()
    single, by_pair = num_rows == 1, pairs < num_experts
    if lists is None:
        lists = new_lists(x, num_experts)
        if not single:
            _expert_list_kernel[(num_experts,)](
                ids, *lists, pairs, num_rows, BLOCK=LIST_BLOCK, **turns(x)
            )
    slots = pairs if single or by_pair else num_experts
    inside = shared is not None and num_rows <= shared_rows
    own, back = shared if shared is not None and inside else (gate_up, down)
    long = own.shape[0] // 2 if inside else 0
    wide, each = x.new_empty(pairs, size), x.new_empty(pairs, hidden)
    more_wide, more = x.new_empty(num_rows, long), x.new_empty(num_rows, hidden)
    kinds = {"SHARED": inside, "SINGLE": single, "BY_PAIR": by_pair, "EARLY": False}
    cut = {"PAIRS": PAIRS, "OUTPUTS": OUTPUTS, "DEPTH": DEPTH, "num_stages": STAGES}
    listed, tiles, more_tiles = (ids, *lists), _tiles(size), _tiles(long)
    even = hidden % DEPTH == 0
    sizes = (num_rows, ids.shape[1], size, hidden, long, tiles, more_tiles)
    _expert_gate_up_kernel[(slots * tiles + more_tiles,)](
        x, gate_up, wide, own, more_wide, *listed, x.stride(0), *sizes, EVEN=even, **kinds, **cut
    )
    tiles = _tiles(hidden)
    more_tiles, even = tiles * inside, size % DEPTH == long % DEPTH == 0
    ends = (num_rows, hidden, size, long, tiles, more_tiles)
    _expert_down_kernel[(slots * tiles + more_tiles,)](
        wide, down, each, more_wide, back, more, *listed, *ends, EVEN=even, **kinds, **cut
    )
    if shared is not None and not inside:
        more = shared_reference(x, shared)
    return Terms(each, weights.contiguous(), more if shared is not None else None)


def _tiles(outputs: int) -> int:
    """Programs over `outputs`."""
    return -(-outputs // OUTPUTS)


def cost(
    rows: int, top_k: int, touched: float, hidden: int, size: int, shared_size: int = 0
) -> tuple[float, float]:
    """(FLOPs, bytes in 16 bits) of `rows` that touch `touched` different experts."""
    pairs = rows * top_k
    weights = 3 * hidden * (touched * size + shared_size)
    flops = 6 * hidden * (pairs * size + rows * shared_size)
    return flops, 2 * (weights + pairs * (2 * hidden + 2 * size) + rows * (hidden + shared_size))
