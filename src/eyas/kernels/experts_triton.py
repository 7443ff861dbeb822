"""Routed experts of few rows: each touched expert's weights are read once, however rows fall.

Four launches. The first lists every expert's pairs of a row and an expert, in order; one row alone
needs no list. The second multiplies gates and ups, the third goes down, both with a program for an
expert and a tile of its outputs; the last sums a row's experts by weight in the order they were
chosen. The grids follow from shapes alone. The oracle is `eyas.kernels.experts.experts_reference`;
every product is rounded where it rounds.

Always holds: an expert's pairs go through tiles of `PAIRS`, whose numbers do not depend on the
tile's other pairs, and no sum is shared between programs. A row's bits are those it has alone.
"""

from __future__ import annotations

import torch

from eyas.kernels.lang import runs_kernels, take_turn, tl, triton, turns

PAIRS = 16
"""Pairs per tile: the fewest a tensor core takes."""
PAIRS_PER_EXPERT = 16
"""Up to so many pairs an expert, on average, this beats a grouped product."""
LIST_BLOCK, SUM_BLOCK = 1024, 1024
"""Pairs compared at a time when lists are made; columns summed per program."""
OUTPUTS, DEPTH, STAGES = 32, 128, 4
"""A program's tile of weights, outputs (gates and ups: as many of each) by inputs, and how many of
them are on their way from memory."""


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
    ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE: tl.constexpr, BY_PAIR: tl.constexpr
):
    """(expert of this program, number of its pairs); no pairs where another program has them.

    Programs stand for experts, or for pairs where those are fewer: an expert's first pair leads.
    """
    slot = tl.program_id(1)
    expert, count = slot.to(tl.int64), 1
    if SINGLE or BY_PAIR:
        expert = tl.load(ids_ptr + slot)
    if not SINGLE:
        count = tl.load(counts_ptr + expert)
        if BY_PAIR:
            count = tl.where(tl.load(members_ptr + expert * num_rows) == slot, count, 0)
    return expert, count


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    members_ptr, expert, start, count, num_rows, SINGLE: tl.constexpr, PAIRS: tl.constexpr
):
    """(pairs, which of them are there) of an expert's tile that begins at `start`."""
    place = start + tl.arange(0, PAIRS)
    there = place < count
    if SINGLE:
        pair = place * 0 + tl.program_id(1)
    else:
        pair = tl.load(members_ptr + expert * num_rows + place, there, 0)
    return pair, there


@triton.jit
def _expert_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    out_ptr,
    ids_ptr,
    members_ptr,
    counts_ptr,
    x_stride,
    num_rows,
    top_k,
    size,
    inner,
    SINGLE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile of outputs, slot): `silu(gate) * up` of the expert's pairs."""
    take_turn(EARLY)
    expert, count = _expert(ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE, BY_PAIR)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = columns < size
    depth = tl.arange(0, DEPTH)
    weights = w_ptr + expert * (2 * size * inner) + (columns * inner)[None, :] + depth[:, None]
    dtype = out_ptr.dtype.element_ty
    for start in range(0, count, PAIRS):
        pair, there = _tile(members_ptr, expert, start, count, num_rows, SINGLE, PAIRS)
        rows = x_ptr + (pair // top_k)[:, None] * x_stride + depth[None, :]
        gate = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        up = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for k in range(0, inner, DEPTH):
            if EVEN:
                x = tl.load(rows + k, there[:, None], 0.0)
                g = tl.load(weights + k, inside[None, :], 0.0)
                u = tl.load(weights + size * inner + k, inside[None, :], 0.0)
            else:
                left = depth < inner - k
                x = tl.load(rows + k, there[:, None] & left[None, :], 0.0)
                g = tl.load(weights + k, inside[None, :] & left[:, None], 0.0)
                u = tl.load(weights + size * inner + k, inside[None, :] & left[:, None], 0.0)
            gate = tl.dot(x, g, gate, input_precision="ieee")
            up = tl.dot(x, u, up, input_precision="ieee")
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        where = out_ptr + pair[:, None] * size + columns[None, :]
        tl.store(where, (silu * up).to(dtype), there[:, None] & inside[None, :])


@triton.jit
def _expert_down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    out_ptr,
    ids_ptr,
    members_ptr,
    counts_ptr,
    num_rows,
    size,
    inner,
    SINGLE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (tile of outputs, slot): the expert's way down for its pairs."""
    take_turn(EARLY)
    expert, count = _expert(ids_ptr, members_ptr, counts_ptr, num_rows, SINGLE, BY_PAIR)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = columns < size
    depth = tl.arange(0, DEPTH)
    weights = w_ptr + expert * (size * inner) + (columns * inner)[None, :] + depth[:, None]
    for start in range(0, count, PAIRS):
        pair, there = _tile(members_ptr, expert, start, count, num_rows, SINGLE, PAIRS)
        rows = x_ptr + pair[:, None] * inner + depth[None, :]
        total = tl.zeros([PAIRS, OUTPUTS], tl.float32)
        for k in range(0, inner, DEPTH):
            if EVEN:
                x = tl.load(rows + k, there[:, None], 0.0)
                w = tl.load(weights + k, inside[None, :], 0.0)
            else:
                left = depth < inner - k
                x = tl.load(rows + k, there[:, None] & left[None, :], 0.0)
                w = tl.load(weights + k, inside[None, :] & left[:, None], 0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
        where = out_ptr + pair[:, None] * size + columns[None, :]
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(where, value, there[:, None] & inside[None, :])


@triton.jit
def _expert_sum_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr,
    weights_ptr,
    shared_ptr,
    out_ptr,
    shared_stride,
    size,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, tile of columns): the weighted sum over the row's experts, then `shared`."""
    take_turn(EARLY)
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = row * TOP_K + k
        term = tl.load(pairs_ptr + pair * size + columns, inside, 0.0).to(tl.float32)
        total += term * tl.load(weights_ptr + pair)
    dtype = out_ptr.dtype.element_ty
    if SHARED:
        more = tl.load(shared_ptr + row * shared_stride + columns, inside, 0.0)
        total = total.to(dtype).to(tl.float32) + more.to(tl.float32)
    tl.store(out_ptr + row * size + columns, total.to(dtype), inside)


def suits(x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor) -> bool:
    """Whether so few rows x [T, H] are for `experts_triton`; follows from shapes and device."""
    return runs_kernels(x) and ids.numel() <= PAIRS_PER_EXPERT * gate_up.shape[0]


def experts_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `eyas.kernels.experts.experts`; `shared` [T, H] is added to the rounded sum."""
    (num_rows, hidden), (num_experts, _, size) = x.shape, down.shape
    top_k, pairs = ids.shape[1], ids.numel()
    ids = ids.contiguous()
    members = torch.empty(num_experts, num_rows, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    single, by_pair = num_rows == 1, pairs < num_experts
    if not single:
        _expert_list_kernel[(num_experts,)](
            ids, members, counts, pairs, num_rows, BLOCK=LIST_BLOCK, **turns(x)
        )
    lists = (ids, members, counts)
    grid = {"SINGLE": single, "BY_PAIR": by_pair, "PAIRS": PAIRS}
    tile = {"OUTPUTS": OUTPUTS, "DEPTH": DEPTH, "num_stages": STAGES}
    slots = pairs if single or by_pair else num_experts
    wide = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    _expert_gate_up_kernel[(triton.cdiv(size, OUTPUTS), slots)](
        x,
        gate_up,
        wide,
        *lists,
        x.stride(0),
        num_rows,
        top_k,
        size,
        hidden,
        EVEN=hidden % DEPTH == 0,
        **grid,
        **tile,
        **turns(x),
    )
    each = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    _expert_down_kernel[(triton.cdiv(hidden, OUTPUTS), slots)](
        wide,
        down,
        each,
        *lists,
        num_rows,
        hidden,
        size,
        EVEN=size % DEPTH == 0,
        **grid,
        **tile,
        **turns(x),
    )
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    _expert_sum_kernel[(num_rows, triton.cdiv(hidden, SUM_BLOCK))](
        each,
        weights,
        x if shared is None else shared,
        out,
        0 if shared is None else shared.stride(0),
        hidden,
        TOP_K=top_k,
        SHARED=shared is not None,
        BLOCK=SUM_BLOCK,
        **turns(x),
    )
    return out


def cost(rows: int, top_k: int, touched: int, hidden: int, size: int) -> tuple[int, int]:
    """(FLOPs, bytes in 16 bits) of `rows` that touch `touched` different experts."""
    weights, pairs = touched * 3 * hidden * size, rows * top_k
    return 6 * pairs * hidden * size, 2 * (
        weights + pairs * (2 * hidden + 2 * size) + rows * hidden
    )
