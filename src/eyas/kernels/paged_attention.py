"""Attention of a batch's new rows over their paged keys and values.

The rows of a request that share a KV head sit side by side in tiles, so that one read of its keys
serves every node and query head of a verify pass. How a block of keys meets a tile is told in
`eyas.kernels.attention_block`: tiles of 16 to 64 rows cost nearly the same, and a row's arithmetic
is the same in all of them. Keys are cut as `eyas.kernels.splits` says; the oracle is
`eyas.attention.reference`. It knows neither networks nor how pages are lent.

Always holds for a causal tail, and for trees with `Plan.tree` RANKS: a row's bits are those it has
alone, whatever the pass, the batch, the tile, the pages and the number of programs.
"""

from __future__ import annotations

import math

import torch

from eyas.batch import ForwardBatch
from eyas.kernels.attention_block import (
    HIDDEN,
    ROWS_OF_WARPS,
    absorb,
    block,
    flat_places,
    nothing,
    queries,
    scores,
    seen,
    whole,
)
from eyas.kernels.attention_plan import (
    MERGED_ABREAST,
    MERGED_SUMS,
    RANKS,
    Launch,
    Plan,
    Workspace,
)
from eyas.kernels.kv_write import (
    PASS_VALUES,
    Layout,
    Rope,
    ask_rows,
    keep_rows,
    new_rows,
    rope_arguments,
)
from eyas.kernels.lang import await_turn, pass_turn, tl, triton, turns, warpgroups
from eyas.kernels.splits import (
    FLOOR,
    SPARE,
    attention_merge_kernel,
    extent,
    fold,
    give,
    is_last,
    last_of_tile,
    part_of,
    parted,
    put,
    settled,
    share,
    slots_of,
    splits_end,
)


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    pid, tiles, shared, first_tile, num_new, GROUP: tl.constexpr, R: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    """A program's part of the keys, tile, whether it takes a node's rows alone; its rows.

    With TREE 2 the first `shared` programs take tiles of all rows, the others a node's rows each.
    """
    part, tile, own = pid // tiles, pid % tiles, False
    first_row, last_row = (first_tile + tile) * R, num_new * GROUP
    if TREE == 2:  # selections: behind a branch Triton loses what it knows of addresses
        own, index, each = pid >= shared, pid - shared, tl.cdiv(GROUP, R)
        node = first_tile * R // GROUP + index // each
        first_row = tl.where(own, node * GROUP + index % each * R, first_row)
        last_row = tl.where(own, (node + 1) * GROUP, last_row)
    return part, tile, own, first_row, last_row


@triton.jit
def _to_keep(  # type: ignore[no-untyped-def]
    own, bits, num_new, tail_offset, start, TREE: tl.constexpr
):  # fmt: skip
    """New rows int32[16] that a program keeps, from the `start`-th on, which there are, how many.

    With TREE 2 those on the path of a node's own program: so it finds them where it reads.
    """
    lane, most = tl.arange(0, 16), num_new
    rows = start + lane
    if TREE == 2:
        bits, place = tl.max(bits, 0), tl.arange(0, 64)
        seen = ((bits >> place) & 1 != 0) & (place >= tail_offset)
        rank = tl.cumsum(seen.to(tl.int32), 0) - 1
        here = seen[None, :] & (rank[None, :] == rows[:, None])
        rows = tl.sum(tl.where(here, (place - tail_offset)[None, :], 0), 1)
        most = tl.where(own, tl.sum(seen.to(tl.int32), 0), 0)
    return rows, start + lane < most, most


@triton.jit
def _end_split(  # type: ignore[no-untyped-def]
    sum_ptr, stat_ptr, start, slot0, fine, end, shift, top, mass, acc, total_top, total_mass, total,
    places, used, columns, SIZE_V: tl.constexpr, R: tl.constexpr, FOLD: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Fold or put the sums of the split before `start`, for rows of which it is one; their tops."""
    done, now = splits_end(start, end, shift), whole(mass, AXIS)
    peak, now, acc = settled(top, now, acc, sum_ptr.dtype.element_ty, AXIS)
    if FOLD:
        total_top, total_mass, total = fold(
            total_top, total_mass, total, peak, now, acc, done, AXIS
        )
    else:
        slot = start - 1 - slot0 >> fine
        put(sum_ptr, stat_ptr, peak, now, acc, slot, places, used, columns, SIZE_V, R, AXIS)
    top = tl.where(done, FLOOR, top)  # so what sums hold will weigh nothing
    return top, total_top, total_mass, total


@triton.jit(do_not_specialize=PASS_VALUES)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_new_ptr, v_new_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, out_ptr,
    table_ptr, prefix_ptr, bits_ptr, order_ptr, sum_ptr, stat_ptr, count_ptr,
    factor, num_new, tail_offset, parts, inverse, tiles, shared, columns, positions, table_stride,
    table_width, first_request, first_tile, q_stride, k_new_stride, v_new_stride, rope_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_V: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr,
    GROUP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, FOLD: tl.constexpr, WRITE: tl.constexpr,
    MERGE: tl.constexpr, SOON: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    AXIS: tl.constexpr, ASKS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part of the keys x tile of rows, KV head, request), from `first_..` on."""
    pid, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, request = request * tl.num_programs(1) + head, request + first_request
    prefix = tl.load(prefix_ptr + request).to(tl.int32)
    part, tile, own, first_row, last_row = _place(
        pid, tiles, shared, first_tile, num_new, GROUP, R, TREE
    )
    row0, first = request * num_new, prefix + tail_offset
    high: tl.constexpr = R if AXIS == 0 else ROWS_OF_WARPS
    rows = first_row + tl.arange(0, high) % R  # repeated where a tile has fewer than its products
    places = rows - first_tile * R  # their columns
    used, node = rows < last_row, tl.minimum(rows, last_row - 1) // GROUP
    low, end, shift, bits = extent(
        prefix, node, bits_ptr + row0, num_new, tail_offset, TREE, WINDOW, SPLITS, LEAST
    )
    fine, coarse, slot0 = slots_of(low, shift, prefix, first + num_new, TREE, WINDOW, SPLITS, LEAST)
    lo, hi, expected = share(slot0, end, coarse, prefix, part, parts, inverse, own, TREE, FOLD)
    k_ptr += head.to(tl.int64) * positions * DIM
    v_ptr += head.to(tl.int64) * positions * WIDE
    table_ptr += request * table_stride
    kind = k_ptr.dtype.element_ty
    if WRITE:
        new, there, most = _to_keep(own, bits, num_new, tail_offset, 0, TREE)
    if EARLY:  # lengths, pages and committed keys were there before the launch ahead of this one
        ask_rows(
            k_ptr, v_ptr, table_ptr, lo + tl.arange(0, BLOCK), tl.minimum(hi, prefix), table_width,
            DIM, WIDE, PAGE, kind.primitive_bitwidth // 8, LATENT,
        )  # fmt: skip
    await_turn(EARLY)
    pass_turn(EARLY & (FOLD | MERGE))
    if lo >= hi:  # most, where keys are few: they ask for nothing that others wait for
        return
    cos_ptr, sin_ptr = cos_ptr + row0 * rope_stride, sin_ptr + row0 * rope_stride
    k_new_ptr += row0 * k_new_stride + head * DIM
    v_new_ptr += row0 * v_new_stride + head * WIDE
    qa, qb = queries(
        q_ptr + row0 * q_stride + head * GROUP * DIM, cos_ptr, sin_ptr, first_row, last_row,
        q_stride, rope_stride, kind, GROUP, R, high, DIM, WIDE, SIZE_A, SIZE_B, ROPE, AXIS,
    )  # fmt: skip
    if WRITE:
        na, nb, nv = new_rows(
            k_new_ptr, v_new_ptr, cos_ptr, sin_ptr, new, there,
            k_new_stride, v_new_stride, rope_stride, kind,
            DIM, WIDE, SIZE_A, SIZE_B, SIZE_V, ROPE, LATENT,
        )  # fmt: skip
        for start in range(0, most, 16):
            if start > 0:
                new, there, _ = _to_keep(own, bits, num_new, tail_offset, start, TREE)
                na, nb, nv = new_rows(
                    k_new_ptr, v_new_ptr, cos_ptr, sin_ptr, new, there,
                    k_new_stride, v_new_stride, rope_stride, kind,
                    DIM, WIDE, SIZE_A, SIZE_B, SIZE_V, ROPE, LATENT,
                )  # fmt: skip
            index = first + new
            mine = there & ((TREE == 2) | ((index >= lo) & (index < hi)))
            keep_rows(
                k_ptr, v_ptr, table_ptr, na, nb, nv, index, mine, table_width,
                DIM, WIDE, SIZE_B, PAGE, LATENT,
            )  # fmt: skip
        tl.debug_barrier()
    columns_before = group * (SPLITS + SPARE) * columns
    sum_ptr, stat_ptr = sum_ptr + columns_before * SIZE_V, stat_ptr + columns_before * 2
    top, mass, acc = nothing(high, BLOCK, SIZE_V, LATENT, AXIS)
    total_top, total_mass, total = top, tl.zeros([high], tl.float32), acc
    plain, newest = prefix if TREE == 1 else tl.min(end, 0), tl.max(low, 0)
    order_ptr += (row0 + first_row // GROUP) * 64
    for start in tl.range(lo, hi, BLOCK, num_stages=STAGES):
        kv, stop = start + tl.arange(0, BLOCK), start + BLOCK
        edge = (start >> fine << fine == start) & (start > lo)  # a split's sums stand
        if edge & (AXIS == 0):
            top, total_top, total_mass, total = _end_split(
                sum_ptr, stat_ptr, start, slot0, fine, end, shift, top, mass, acc,
                total_top, total_mass, total, places, used, columns, SIZE_V, R, FOLD, AXIS,
            )  # fmt: skip
        flat = flat_places(
            table_ptr, order_ptr, start, hi - 1, prefix, table_width, BLOCK, PAGE, TREE == 2, AXIS
        )
        ka, kb, v = block(k_ptr, v_ptr, flat, DIM, WIDE, SIZE_A, SIZE_B, SIZE_V, LATENT)
        score = scores(ka, kb, qa, qb, SIZE_B, AXIS)
        if (edge & (AXIS == 1)) | (stop > plain) | (start < newest):
            if edge & (AXIS == 1):  # here, so that keys are asked for beside the product of values
                top, total_top, total_mass, total = _end_split(
                    sum_ptr, stat_ptr, start, slot0, fine, end, shift, top, mass, acc,
                    total_top, total_mass, total, places, used, columns, SIZE_V, R, FOLD, AXIS,
                )  # fmt: skip
            score = tl.where(seen(kv, low, end, bits, prefix, TREE == 1, AXIS), score, HIDDEN)
        if (not ASKS_FIRST) | (stop > lo):  # always; a branch comes behind the next block's loads
            top, mass, acc = absorb(score, v, factor, top, mass, acc, AXIS)
    finished, wide = True, tl.num_programs(1) * GROUP * WIDE
    top, now, acc = settled(top, whole(mass, AXIS), acc, sum_ptr.dtype.element_ty, AXIS)
    out_ptr += row0 * wide + head * GROUP * WIDE
    if FOLD:
        top, now, acc = fold(total_top, total_mass, total, top, now, acc, end > 0, AXIS)
    elif (not MERGE) | (expected > 1) | (hi - lo > 1 << fine):
        pass_turn(EARLY & SOON)  # else a program's end does, or it has been done
        finished, slot = False, hi - 1 - slot0 >> fine
        put(sum_ptr, stat_ptr, top, now, acc, slot, places, used, columns, SIZE_V, R, AXIS)
        if is_last(count_ptr + group * tiles + tile, expected) if MERGE else False:
            last_of_tile(
                out_ptr, sum_ptr, stat_ptr, bits_ptr + row0, first_row, last_row,
                first_tile * R, prefix, num_new, tail_offset, slot0, fine, columns, wide,
                GROUP, R, WIDE, SIZE_V, TREE, WINDOW, SPLITS, LEAST, AXIS,
            )  # fmt: skip
    if finished:
        place, dims = node * wide + rows % GROUP * WIDE, part_of(SIZE_V, R, high, AXIS)
        give(out_ptr, now, parted(acc, R, AXIS), place, used, dims, WIDE, AXIS)


def constants(
    layout: Layout, plan: Plan, group: int, rope_dim: int, window: int
) -> dict[str, int | bool]:
    """What the attention kernel is compiled for."""
    return {
        **layout.constants,
        "TREE": plan.tree,
        "WINDOW": window,
        "SPLITS": plan.splits,
        "LEAST": plan.least,
        "ROPE": rope_dim,
        "GROUP": group,
        "R": plan.tile,
        "BLOCK": plan.block,
        "STAGES": plan.num_stages,
        "FOLD": plan.parts == 1,
        "WRITE": plan.write,
        "MERGE": plan.merge,
        "SOON": plan.soon,
        "AXIS": int(plan.across),
        "ASKS_FIRST": plan.asks_first,
    }


def paged_attention(
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    pooled: tuple[torch.Tensor, torch.Tensor],
    layout: Layout,
    batch: ForwardBatch,
    rope: Rope | None,
    plan: Plan,
    workspace: Workspace,
    window: int,
    order: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attend the rows q [T', H, key_dim] of `batch`, not rotated yet, over one layer's pages.

    `new` are the rows' keys and values, kept on the way if the plan says so and else in the pages
    already; `pooled` is [Hkv, P * page_size, key_dim and value_dim]. `window` is 0 for none;
    `order` comes from `node_orders` for RANKS. Writes rows 0 .. T - 1 of out [.., H * value_dim].
    """
    (k, v), (pool_k, pool_v) = new, pooled
    heads, num_new = pool_k.shape[0], batch.num_new
    group, dense = q.shape[1] // heads, layout.shape.key_dim
    assert q.stride(-1) == 1 and q.stride(-2) == dense, f"heads of q must be dense: {q.stride()}"
    cos, sin, rope_stride, rope_dim = rope_arguments(rope, q)
    bits = batch.prefix_lens if batch.ancestors is None else batch.ancestors
    compiled = constants(layout, plan, group, rope_dim, window)
    compiled["ASKS_FIRST"] = plan.asks_first and warpgroups(out)
    for launch in plan.launches(batch.prefix_lens.shape[0]):
        shared = plan.parts * launch.tiles
        programs = shared
        if plan.tree == RANKS:
            shared *= plan.parts > 1
            first, end = (tile * plan.tile // group for tile in launch.range_of_tiles)
            nodes = min(num_new, end) - first
            programs = shared + nodes * triton.cdiv(group, plan.tile)
        _attention_kernel[(programs, heads, launch.requests)](
            q,
            k,
            v,
            cos,
            sin,
            pool_k,
            pool_v,
            out,
            batch.page_table,
            batch.prefix_lens,
            bits,
            bits if order is None else order,
            workspace.sums,
            workspace.stats,
            workspace.counts,
            layout.shape.scale * math.log2(math.e),
            num_new,
            batch.tail_offset,
            plan.parts,
            -(-(2**30) // plan.parts),
            launch.tiles,
            shared,
            plan.columns,
            pool_k.shape[1],
            batch.page_table.stride(0),
            batch.page_table.shape[1],
            launch.first_request,
            launch.first_tile,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            rope_stride,
            num_warps=plan.num_warps,
            enable_fp_fusion=False,
            **compiled,
            **turns(out),
        )
        if plan.parts > 1 and not plan.merge:
            _merge(layout, batch, plan, workspace, launch, heads, bits, compiled, out)


def _merge(
    layout: Layout,
    batch: ForwardBatch,
    plan: Plan,
    workspace: Workspace,
    launch: Launch,
    heads: int,
    bits: torch.Tensor,
    compiled: dict[str, int | bool],
    out: torch.Tensor,
) -> None:
    """Fold what the programs of a launch left for each other."""
    chunk, rows = merged_by(layout, plan)
    first_row, group = launch.first_tile * plan.tile, int(compiled["GROUP"])
    columns = min(launch.tiles * plan.tile, batch.num_new * group - first_row)
    tiles = layout.constants["SIZE_V"] // chunk, triton.cdiv(columns, rows)
    names = ("GROUP", "WIDE", "SIZE_V", "R", "TREE", "WINDOW", "SPLITS", "LEAST", "SOON", "AXIS")
    attention_merge_kernel[(*tiles, launch.requests * heads)](
        out,
        workspace.sums,
        workspace.stats,
        batch.prefix_lens,
        bits,
        batch.num_new,
        batch.tail_offset,
        plan.columns,
        heads,
        launch.first_request,
        first_row,
        ROWS=rows,
        CHUNK=chunk,
        COLUMNS=plan.columns * plan.abreast,
        num_warps=merge_warps(plan, rows * chunk),
        enable_fp_fusion=False,
        **{name: compiled[name] for name in names},
        **turns(out),
    )


def merged_by(layout: Layout, plan: Plan) -> tuple[int, int]:
    """Numbers and columns of a program of the merge: of what lies side by side many."""
    sums, size = MERGED_ABREAST if plan.abreast else MERGED_SUMS, layout.constants["SIZE_V"]
    if not plan.across:
        return min(size, sums // plan.tile), plan.tile
    rows = 1 if plan.abreast else max(sums // size, 4)
    return min(size, sums // rows), rows


def merge_warps(plan: Plan, sums: int) -> int:
    """Warps of a merge's program of so many sums: threads of two where they lie side by side."""
    return max(1, sums // 64) if plan.abreast else 4


def cost(layout: Layout, batch: ForwardBatch, num_heads: int, element: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one layer with every request at the batch's bound on its length.

    Keys and values are read once for each request, in numbers of `element` bytes.
    """
    shape, requests = layout.shape, batch.prefix_lens.shape[0]
    rows = requests * batch.num_new * num_heads
    both = shape.key_dim + shape.value_dim
    read = requests * batch.max_kv_len * shape.values_per_position
    return 2 * rows * batch.max_kv_len * both, (read + rows * both) * element
