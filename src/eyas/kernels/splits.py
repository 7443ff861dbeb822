"""How a row's keys are cut into splits, and how the sums over splits become one.

A split is a run of keys that one program sums up; its length follows from the number of keys a row
sees and from nothing else, and splits are folded in their order. So a row's bits depend neither on
how many programs share the work, nor on the other rows, requests and nodes of the pass. Sums are
float32 [D, R] or, with AXIS 1, [R, D] (`eyas.kernels.attention_block`); statistics are a row's
largest scaled score and the mass of its weights.

Split sums lie in a workspace: [requests * KV heads, SPLITS + SPARE, D, columns], or with AXIS 1
[.., columns, D], as threads have them; statistics are float32 [.., 2, columns]. Sums are float32,
or float16 as `settled` makes them, whoever folds them. Columns are a head's rows, all those of one
launch. Rows of a tile may differ in the length of their splits; a slot then is a
run of the shortest length, and a longer split lies where it ends. FlashDecoding merges alike
(crfm.stanford.edu, 2023-10-12), with splits that depend on the batch.
"""

from __future__ import annotations

from eyas.kernels.attention_plan import HALF_SPLITS, LATENT_SPLIT, SPARE_SLOTS
from eyas.kernels.lang import take_turn, tl, triton

AHEAD = tl.constexpr(8)
"""Splits that are on their way while one is folded."""
ABREAST, FEW = tl.constexpr(32), tl.constexpr(16)
"""Splits that a merge asks for together where its programs are few, and the same of the rest."""
SPARE, LATENT, HALF = (tl.constexpr(n) for n in (SPARE_SLOTS, LATENT_SPLIT, HALF_SPLITS))
TOGETHER = tl.constexpr(16)
"""Numbers side by side of which a row that is there several times keeps all or none."""
PIECE = tl.constexpr(32)
"""Sums of a row that are stored at once."""
FLOOR = tl.constexpr(-1e20)
"""Statistic of a row that has seen nothing; hidden scores lie far below it."""


@triton.jit
def set_bits(x):  # type: ignore[no-untyped-def]
    """int32: how many bits of int64 `x` are set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 0x7F).to(tl.int32)


@triton.jit
def split_shift(  # type: ignore[no-untyped-def]
    count, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    """Binary logarithm of the length of a row's splits.

    That is the power of two, LEAST or more, that cuts its `count` keys into SPLITS at most. Latents
    are cut into half as many until splits have HALF keys: their sums are long, and cost a merge.
    """
    if WINDOW > 0:
        count = tl.minimum(count, WINDOW)
    least = (count + SPLITS - 1) // SPLITS
    if LEAST == LATENT:
        least = tl.maximum(least, tl.minimum(2 * least, HALF))
    least = tl.maximum(least, LEAST) - 1  # below 2 ** 24: a float is exact
    return (least.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def extent(  # type: ignore[no-untyped-def]
    prefix, node, bits_ptr, num_new, tail_offset,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Of nodes int32[M]: first place they see, end of the places, shift of their splits; bits.

    TREE 0: places are KV indices, the tail causal. 1: the tail as `bits` say. 2: places behind the
    prefix are ranks among a node's visible keys. Windows count ranks.
    """
    if TREE == 0:
        bits, count = node, prefix + tail_offset + node + 1
    else:
        bits = tl.load(bits_ptr + node)
        count = prefix + set_bits(bits)
    end = count
    if TREE == 1:
        end = prefix + tail_offset + num_new + node * 0
    shift = split_shift(count, WINDOW, SPLITS, LEAST)
    low = tl.maximum(count - WINDOW, 0) if WINDOW > 0 else count * 0
    return low, end, shift, bits


@triton.jit
def slots_of(  # type: ignore[no-untyped-def]
    low, shift, prefix, most, TREE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Of a tile: shifts of its shortest and longest splits, and the place where slot 0 begins.

    With TREE 2 they are those of all nodes, whose sums come from several tiles; `most` bounds their
    keys.
    """
    if TREE == 2:
        fine = split_shift(prefix + 1, WINDOW, SPLITS, LEAST)
        coarse = split_shift(most, WINDOW, SPLITS, LEAST)
        start = tl.maximum(prefix + 1 - WINDOW, 0) if WINDOW > 0 else prefix * 0
    else:
        fine, coarse, start = tl.min(shift, 0), tl.max(shift, 0), tl.min(low, 0)
    return fine, coarse, start >> coarse << coarse


@triton.jit
def splits_end(place, end, shift):  # type: ignore[no-untyped-def]
    """bool[R]: for which rows a split ends at `place`."""
    return (place >> shift << shift == place) | (place >= end)


@triton.jit
def share(  # type: ignore[no-untyped-def]
    start, end, coarse, prefix, part, parts, inverse, own, TREE: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    """The places lo .. hi - 1 of a part of the work on a tile, and the number of busy parts.

    Parts are whole splits. In a tree the splits below an edge are the same for all its nodes and
    belong to tiles of all rows, the others to the nodes' own tiles; with FOLD there is no edge.
    `inverse` is 2 ** 30 / parts, rounded up: divisions would take longer than all the rest.
    """
    begin, finish = start >> coarse, tl.max(end, 0)
    if TREE == 2:
        edge = prefix * 0 if FOLD else prefix >> coarse
        begin = tl.where(own, tl.maximum(begin, edge), begin)
        finish = tl.where(own, finish, edge << coarse)
        part, parts = tl.where(own, 0, part), tl.where(own, 1, parts)
        inverse = tl.where(own, 1 << 30, inverse)
    units = tl.maximum(((finish - 1) >> coarse) + 1 - begin, 0).to(tl.int64)
    lo = begin + (part * units * inverse >> 30).to(tl.int32)
    hi = begin + ((part + 1) * units * inverse >> 30).to(tl.int32)
    return lo << coarse, tl.minimum(hi << coarse, finish), tl.minimum(parts, units)


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    top, mass, acc, more_top, more_mass, more, counts, AXIS: tl.constexpr
):  # fmt: skip
    """Two sums of rows as one; `more` for the rows where it counts.

    With AXIS 2 statistics are laid as sums are.
    """
    higher = tl.where(counts, tl.maximum(top, more_top), top)
    shrink = tl.exp2(top - higher)
    grow = tl.exp2(tl.where(counts, more_top - higher, 0.0))
    mass = tl.where(counts, tl.fma(mass, shrink, more_mass * grow), mass)
    if AXIS < 2:
        shrink, grow = tl.expand_dims(shrink, AXIS), tl.expand_dims(grow, AXIS)
        counts = tl.expand_dims(counts, AXIS)
    return higher, mass, tl.where(counts, tl.fma(acc, shrink, more * grow), acc)


@triton.jit
def settled(top, mass, acc, kind: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A split's statistics and sums float32, these as numbers of `kind` hold them.

    In 16 bits mass and sums are divided by the power of two that leaves a mass in [1, 2), which the
    largest score takes up. So sums are less than twice a mean of values, and those of half
    precision lose 2 ** -11 of themselves: a quarter of what bfloat16 rows lose at the end.
    """
    if kind != tl.float32:
        power = tl.minimum(tl.maximum(mass.to(tl.int32, bitcast=True) >> 23, 1), 253)
        scale = (254 - power << 23).to(tl.float32, bitcast=True)
        top, mass = top + (power - 127).to(tl.float32), mass * scale
        acc = (acc * tl.expand_dims(scale, AXIS)).to(kind).to(tl.float32)
    return top, mass, acc


@triton.jit
def parted(  # type: ignore[no-untyped-def]
    acc, R: tl.constexpr, AXIS: tl.constexpr, piece=0, PIECES: tl.constexpr = 1
):  # fmt: skip
    """A piece of sums [M, D]; of R rows that are there M / R times each keeps another part of it.

    It is [M, D / PIECES / (M / R)]. Every thread chooses among numbers that it has.
    """
    copies: tl.constexpr = acc.shape[1 - AXIS] // R
    of: tl.constexpr = copies * PIECES
    if of > 1:
        rows: tl.constexpr = acc.shape[0]
        numbers: tl.constexpr = acc.shape[1] // of
        bits = acc.to(tl.int32, bitcast=True)
        bits = tl.reshape(bits, (rows, numbers // TOGETHER, of, TOGETHER))
        which = tl.arange(0, rows) // R * PIECES + piece
        mine = which[:, None, None, None] == tl.arange(0, of)[None, None, :, None]
        bits = tl.sum(tl.where(mine, bits, 0), 2)  # of integers: one of them, as it was
        acc = tl.reshape(bits, (rows, numbers)).to(tl.float32, bitcast=True)
    return acc


@triton.jit
def part_of(  # type: ignore[no-untyped-def]
    SIZE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, AXIS: tl.constexpr,
    piece=0, PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Which of SIZE numbers `parted` leaves of M rows: laid as they are, or along rows alone."""
    of: tl.constexpr = M // R * PIECES
    dims = tl.expand_dims(tl.arange(0, SIZE // of), 1 - AXIS)
    if of > 1:
        which = tl.expand_dims(tl.arange(0, M) // R * PIECES + piece, AXIS)
        dims = (dims // TOGETHER * of + which) * TOGETHER + dims % TOGETHER
    return dims


@triton.jit
def sum_places(  # type: ignore[no-untyped-def]
    slot, dims, column, columns, SIZE: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Where numbers `dims` of columns lie: those of a column side by side with AXIS 1."""
    if AXIS == 1:
        return (slot * columns + column) * SIZE + dims
    return (slot * SIZE + dims) * columns + column


@triton.jit
def put(  # type: ignore[no-untyped-def]
    sum_ptr, stat_ptr, top, mass, acc, slot, places, used, columns, SIZE: tl.constexpr,
    R: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store the used columns of a slot, in pieces: on their way they stand in shared memory.

    There may be little room, and large pieces wait for each other.
    """
    many: tl.constexpr = used.shape[0]
    pieces: tl.constexpr = max(1, SIZE * R // many // PIECE) if AXIS == 1 else 1
    for piece in tl.static_range(pieces):
        dims = part_of(SIZE, R, many, AXIS, piece, pieces)
        place = sum_places(slot, dims, tl.expand_dims(places, AXIS), columns, SIZE, AXIS)
        part = parted(acc, R, AXIS, piece, pieces).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, part, tl.expand_dims(used, AXIS))
    first = used & (tl.arange(0, many) < R)
    tl.store(stat_ptr + slot * 2 * columns + places, top, first)
    tl.store(stat_ptr + (slot * 2 + 1) * columns + places, mass, first)


@triton.jit
def merged(  # type: ignore[no-untyped-def]
    sum_ptr, stat_ptr, start, fine, end, shift, places, dims, columns, SIZE: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Splits of the columns `places` folded in order: mass [R] and sums [D, R] of `dims`.

    Other programs wrote them a moment ago, hence past the first cache.
    """
    top = tl.full([places.shape[0]], FLOOR, tl.float32)
    mass = tl.zeros([places.shape[0]], tl.float32)
    acc = tl.zeros([dims.shape[0], places.shape[0]], tl.float32)
    for slot in tl.range(0, ((tl.max(end, 0) - 1 - start) >> fine) + 1, num_stages=AHEAD):
        at = stat_ptr + slot * 2 * columns + places
        more_top = tl.load(at, cache_modifier=".cg")
        more_mass = tl.load(at + columns, cache_modifier=".cg")
        place = sum_places(slot, dims[:, None], places[None, :], columns, SIZE, AXIS)
        more = tl.load(sum_ptr + place, cache_modifier=".cg").to(tl.float32)
        begin = start + (slot << fine)
        counts = splits_end(begin + (1 << fine), end, shift) & (begin < end)
        top, mass, acc = fold(top, mass, acc, more_top, more_mass, more, counts, 0)
    return mass, acc


@triton.jit
def fold_slots(  # type: ignore[no-untyped-def]
    sum_at, stat_at, top, mass, acc, first, slots, start, fine, end, shift,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """COUNT of `slots` from the `first` on, all on their way before one is folded.

    Loads have masks even where none is masked: else compilers move each to where it serves.
    """
    tops, masses, sums = (), (), ()
    for each in tl.static_range(COUNT):
        slot, at = first + each, stat_at + each * 2 * COLUMNS
        there, all_there = end * 0 + slot < slots, tl.full(sum_at.shape, 0, tl.int32) + slot < slots
        top_of = tl.load(at, there, FLOOR, cache_modifier=".cg")
        mass_of = tl.load(at + COLUMNS, there, 0.0, cache_modifier=".cg")
        sum_of = tl.load(sum_at + each * SIZE * COLUMNS, all_there, 0.0, cache_modifier=".cg")
        tops += (top_of,)  # type: ignore[assignment]
        masses += (mass_of,)  # type: ignore[assignment]
        sums += (sum_of,)  # type: ignore[assignment]
    for each in tl.static_range(COUNT):
        begin = start + (first + each << fine)
        counts = splits_end(begin + (1 << fine), end, shift) & (begin < end)
        top, mass, acc = fold(
            top, mass, acc, tops[each], masses[each], sums[each].to(tl.float32), counts, 2
        )
    return top, mass, acc


@triton.jit
def merged_abreast(  # type: ignore[no-untyped-def]
    sum_ptr, stat_ptr, start, fine, end, shift, places, dims, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """What `merged` does, mass as [D, R], by threads of few sums and many registers.

    A thread folds what it loads, statistics too: none waits for another, and a round trip of loads
    brings many splits. With AXIS 1 there is one column, whose statistics are scalars.
    """
    slots, dims, places = ((tl.max(end, 0) - 1 - start) >> fine) + 1, dims[:, None], places[None, :]
    acc = tl.zeros([dims.shape[0], places.shape[1]], tl.float32)
    sum_at = sum_ptr + sum_places(0, dims, places, COLUMNS, SIZE, AXIS)
    if AXIS == 1:
        tl.static_assert(places.shape[1] == 1, "a program has one column")
        end, shift = tl.max(end, 0), tl.max(shift, 0)
        stat_at = stat_ptr + tl.max(tl.max(places, 1), 0)
        mass = end.to(tl.float32) * 0.0
        top = mass + FLOOR
    else:
        end, shift = dims * 0 + end[None, :], dims * 0 + shift[None, :]
        stat_at = stat_ptr + dims * 0 + places
        top, mass = acc + FLOOR, acc
    many = slots // ABREAST * ABREAST
    for first in tl.range(0, many, ABREAST, num_stages=1):
        top, mass, acc = fold_slots(
            sum_at + first * SIZE * COLUMNS, stat_at + first * 2 * COLUMNS, top, mass, acc,
            first, slots, start, fine, end, shift, SIZE, COLUMNS, ABREAST,
        )  # fmt: skip
    for first in tl.range(many, slots, FEW, num_stages=1):
        top, mass, acc = fold_slots(
            sum_at + first * SIZE * COLUMNS, stat_at + first * 2 * COLUMNS, top, mass, acc,
            first, slots, start, fine, end, shift, SIZE, COLUMNS, FEW,
        )  # fmt: skip
    return mass, acc


@triton.jit
def give(  # type: ignore[no-untyped-def]
    out_ptr, mass, acc, place, used, dims, WIDE: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Store numbers `dims`, as sums are laid, of rows' weighted means; heads start at `place`.

    Masses are [R], or laid as sums are.
    """
    used = tl.expand_dims(used, AXIS)
    if len(mass.shape) == 1:
        mass = tl.expand_dims(mass, AXIS)
    mean = (acc / tl.where(used, mass, 1.0)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.expand_dims(place, AXIS) + dims, mean, used & (dims < WIDE))


@triton.jit
def is_last(count_ptr, expected):  # type: ignore[no-untyped-def]
    """Whether this is the last of a tile's `expected` programs to have put its sums."""
    tl.debug_barrier()  # all threads' sums stand before the count says so
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(count_ptr, 0)
    return last


@triton.jit
def last_of_tile(  # type: ignore[no-untyped-def]
    out_ptr, sum_ptr, stat_ptr, bits_ptr, first_row, last_row, before, prefix, num_new, tail_offset,
    start, fine, columns, wide,
    GROUP: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Merge the R columns of a tile whose sums all stand; `before` is the row of column 0."""
    rows, dims = first_row + tl.arange(0, R), tl.arange(0, SIZE)
    node, used = tl.minimum(rows, last_row - 1) // GROUP, rows < last_row
    _, end, shift, _ = extent(
        prefix, node, bits_ptr, num_new, tail_offset, TREE, WINDOW, SPLITS, LEAST
    )
    mass, acc = merged(
        sum_ptr, stat_ptr, start, fine, end, shift, rows - before, dims, columns, SIZE, AXIS
    )
    give(out_ptr, mass, acc, node * wide + rows % GROUP * WIDE, used, dims[:, None], WIDE, 0)


@triton.jit(do_not_specialize=["num_new", "tail_offset", "first_request", "first_row"])
def attention_merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, sum_ptr, stat_ptr, prefix_ptr, bits_ptr, num_new, tail_offset, columns, heads,
    first_request, first_row,
    GROUP: tl.constexpr, WIDE: tl.constexpr, SIZE_V: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, SOON: tl.constexpr, COLUMNS: tl.constexpr,
    AXIS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (chunk of dims, ROWS columns, request and KV head): merge what tiles of R rows put.

    COLUMNS are `columns`, where a program has so few sums that it asks for many splits at once, or
    0. If SOON says that the attention's end lets programs come, they first work out what to do:
    lengths and bits were there before the attention began.
    """
    take_turn(EARLY & (not SOON))
    dims = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    places = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(2).to(tl.int64)
    request, head = first_request + pair // heads, pair % heads
    prefix, bits_ptr = tl.load(prefix_ptr + request).to(tl.int32), bits_ptr + request * num_new
    most, rows = prefix + tail_offset + num_new, first_row + places
    used, last = rows < num_new * GROUP, num_new * GROUP - 1
    node = tl.minimum(rows, last) // GROUP
    low, end, shift, _ = extent(
        prefix, node, bits_ptr, num_new, tail_offset, TREE, WINDOW, SPLITS, LEAST
    )
    if ROWS < R:  # slots are the whole tile's
        rest = first_row + tl.program_id(1) * ROWS // R * R + tl.arange(0, R)
        low, _, all_shifts, _ = extent(
            prefix, tl.minimum(rest, last) // GROUP, bits_ptr, num_new, tail_offset,
            TREE, WINDOW, SPLITS, LEAST,
        )  # fmt: skip
    else:
        all_shifts = shift
    fine, _, start = slots_of(low, all_shifts, prefix, most, TREE, WINDOW, SPLITS, LEAST)
    before = pair * (SPLITS + SPARE) * columns
    sum_ptr, stat_ptr = sum_ptr + before * SIZE_V, stat_ptr + before * 2
    wide = heads * GROUP * WIDE
    place = node * wide + (head * GROUP + rows % GROUP) * WIDE
    take_turn(EARLY & SOON)
    if COLUMNS > 0:
        mass, acc = merged_abreast(
            sum_ptr, stat_ptr, start, fine, end, shift, places, dims, SIZE_V, COLUMNS, AXIS
        )
    else:
        mass, acc = merged(
            sum_ptr, stat_ptr, start, fine, end, shift, places, dims, columns, SIZE_V, AXIS
        )
    give(out_ptr + request * num_new * wide, mass, acc, place, used, dims[:, None], WIDE, 0)
