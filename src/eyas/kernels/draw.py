"""The best few of each row of logits, with the noise of `eyas.sampling` where it is wanted.

Two launches: one over tiles of the vocabulary, one over rows. The vocabulary's tiles are of a fixed
length, so a row's numbers do not depend on other rows. Hashes are those of `gumbel_noise` bit for
bit; the references are `eyas.sampling.draw` and `candidates`. As in torch's maximum, what is not a
number comes first, and ties go to the lower column. The second launch is whoever needs the best:
one here, which writes tokens where they are wanted, or a level of a tree (`eyas.kernels.grow`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from eyas import sampling
from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, number_of, score_of, without
from eyas.sampling import SamplingRows, filter_logits, perturb, scale

TILE = 2048
"""Logits per program."""
COLUMNS = 1024
"""Numbers of a state that a program copies."""


class Scored(NamedTuple):
    """Draft logits, and how the best `topk` of each row are found."""

    logits: torch.Tensor
    """[R, Vd]"""
    ids: torch.Tensor
    """int64[Vd]: the columns' tokens."""
    topk: int
    rows: SamplingRows
    """R rows, or one for every so many."""
    places: torch.Tensor
    """int64, as many: the token to draw stands at `places + ahead`."""
    ahead: int
    sampled: bool
    noise: bool
    """Whether sampled rows are perturbed. Scores are then the log-softmax of perturbed logits: they
    rank nodes by how surely the target, under the same noise, draws them."""


class Kept(NamedTuple):
    """What slots keep of their last extend, a row each."""

    hidden: torch.Tensor
    """[S, F]: what the first drafts' pass is fed."""
    tokens: torch.Tensor
    """int64[S, topk]: candidates behind the root."""
    scores: torch.Tensor
    """float32[S, topk]: their log scores, best first; of a chain zeros."""


def candidates(scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    """Best topk target ids int64[R, topk] and their log scores float32; zeros for topk 1.

    What the kernels of draft passes begin with, in torch.
    """
    logits, ids, topk, rows, index, ahead, sampled, noise = scored
    scores = logits.float()
    if sampled:
        rows, index = _each(logits.shape[0], rows, index, ahead)
        scores = scale(logits, rows)
        scores = perturb(scores, rows, index, ids) if noise else scores
    if topk == 1:
        best = scores.max(-1, keepdim=True).indices
        return ids[best], torch.zeros_like(best, dtype=torch.float32)
    values, best = scores.log_softmax(-1).topk(topk, dim=-1)
    return ids[best], values


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """See `eyas.sampling`: its constants, as int32 reads them."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def uniform(seed, index, ids):  # type: ignore[no-untyped-def]
    """`uniform_noise` of integers `ids` under scalars seed and index, bit for bit."""
    low = _mix(_mix(seed.to(tl.int32)) ^ index.to(tl.int32))
    high = _mix(low + (seed >> 32).to(tl.int32) + -1640531527)
    bits = _mix(_mix(ids.to(tl.int32) * -1640531535 + low) ^ high) & 0x7FFFFFFF
    return tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)


@triton.jit
def _gumbel(seed, index, ids):  # type: ignore[no-untyped-def]
    """Noise of integers `ids` under scalars seed and index; log1p from log as Kahan wrote it."""
    even = uniform(seed, index, ids)
    rest = 1.0 - even
    near = tl.where(rest == 1.0, 0.5, rest)
    log1p = tl.where(rest == 1.0, -even, tl.div_rn(tl.log(near) * -even, near - 1.0))
    return -tl.log(-log1p)


@triton.jit
def _draw_tile_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    ids_ptr,
    temperature_ptr,
    seed_ptr,
    index_ptr,
    keys_ptr,
    sums_ptr,
    size,
    stride,
    rows_each,
    index_each,
    ahead,
    TOPK: tl.constexpr,
    SCALED: tl.constexpr,
    NOISE: tl.constexpr,
    MAPPED: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, tile): its TOPK best keys and, for TOPK > 1, the sum of exp(score - best)."""
    take_turn(EARLY)
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < size
    where = logits_ptr + row.to(tl.int64) * stride + column
    scores = tl.load(where, inside, float("-inf")).to(tl.float32)
    if SCALED or NOISE:
        temperature = tl.load(temperature_ptr + row // rows_each)
    if SCALED:
        divisor = tl.where(temperature <= 0, 1.0, tl.maximum(temperature, 1e-6))
        scores = tl.div_rn(scores, divisor + tl.zeros([TILE], tl.float32))
    if NOISE:
        ids = column
        if MAPPED:
            ids = tl.load(ids_ptr + column, inside, 0)
        index = tl.load(index_ptr + row // index_each) + ahead
        noise = _gumbel(tl.load(seed_ptr + row // rows_each), index, ids)
        scores = tl.where(temperature > 0, scores + noise, scores)
    keys = without(key_of(scores, column), ~inside)
    place = row * tl.num_programs(1) + tile
    best = tl.max(keys, 0)
    tl.store(keys_ptr + place * TOPK, best)
    if TOPK > 1:
        parts = tl.where(inside, tl.exp(scores - score_of(best)), 0.0)
        tl.store(sums_ptr + place, tl.sum(parts, 0))
    for k in tl.static_range(1, TOPK):
        keys = without(keys, keys == best)
        best = tl.max(keys, 0)
        tl.store(keys_ptr + place * TOPK + k, best)


@triton.jit
def best_of_tiles(  # type: ignore[no-untyped-def]
    keys_ptr, sums_ptr, row, tiles, TOPK: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    """(keys of a row's tiles, log of its sum of exponentials; 0 for TOPK 1)."""
    lane = tl.arange(0, BLOCK)
    lowest = -0x8000000000000000
    keys = tl.load(keys_ptr + row * tiles * TOPK + lane, lane < tiles * TOPK, lowest)
    log_sum = 0.0
    if TOPK > 1:
        tile = tl.arange(0, TILES)
        tops = tl.load(keys_ptr + (row * tiles + tile) * TOPK, tile < tiles, lowest)
        sums = tl.load(sums_ptr + row * tiles + tile, tile < tiles, 0.0)
        top = score_of(tl.max(keys, 0))
        parts = tl.where(tile < tiles, sums * tl.exp(score_of(tops) - top), 0.0)
        log_sum = top + tl.log(tl.sum(parts, 0))
    return keys, log_sum


@triton.jit
def _draw_row_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,
    sums_ptr,
    ids_ptr,
    slots_ptr,
    tokens_ptr,
    scores_ptr,
    source_ptr,
    target_ptr,
    tiles,
    tokens_stride,
    source_stride,
    width,
    TOPK: tl.constexpr,
    MAPPED: tl.constexpr,
    SLOTTED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, block of a state): the tokens of the row's TOPK best columns.

    For TOPK > 1 their log-softmax too. Where SLOTTED they go to the row's slot, with its state.
    """
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    to = row
    if SLOTTED:
        to = tl.load(slots_ptr + row)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        state = tl.load(source_ptr + row * source_stride + columns, columns < width)
        tl.store(target_ptr + to * width + columns, state, columns < width)
    if tl.program_id(1) == 0:
        keys, log_sum = best_of_tiles(keys_ptr, sums_ptr, row, tiles, TOPK, TILES, BLOCK)
        for k in tl.static_range(TOPK):
            best = tl.max(keys, 0)
            keys = without(keys, keys == best)
            token = number_of(best).to(tl.int64)
            if MAPPED:
                token = tl.load(ids_ptr + token)
            tl.store(tokens_ptr + to * tokens_stride + k, token)
            if TOPK > 1:
                tl.store(scores_ptr + to * TOPK + k, score_of(best) - log_sum)


class Tiles(NamedTuple):
    """What the tiles of R rows hold for the launch that follows."""

    keys: torch.Tensor
    """int64[R, tiles, topk]: each tile's best; see `order.key_of`."""
    sums: torch.Tensor
    """float32[R, tiles]: of exponentials below the tile's best; unset for topk 1."""

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of a kernel that reads them by `best_of_tiles`."""
        _, tiles, topk = self.keys.shape
        return {"TOPK": topk, "TILES": block_of(tiles), "BLOCK": block_of(tiles * topk)}


def tiles_of(scored: Scored) -> Tiles:
    """Of draft logits."""
    logits, ids, topk, rows, index, ahead, sampled, noise = scored
    return _tiles(logits, ids, topk, rows, index, ahead, scaled=sampled, noise=sampled and noise)


def _tiles(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    topk: int,
    rows: SamplingRows,
    index: torch.Tensor,
    ahead: int,
    *,
    scaled: bool,
    noise: bool,
) -> Tiles:
    """Of logits [R, V], whose columns stand for `ids` int64[V] if given.

    `scaled` divides by the temperatures, `noise` adds to rows of positive temperature their noise
    at `index + ahead`.
    """
    (count, size), device = logits.shape, logits.device
    tiles = triton.cdiv(size, TILE)
    made = Tiles(
        torch.empty(count, tiles, topk, dtype=torch.int64, device=device),
        torch.empty(count, tiles, dtype=torch.float32, device=device),
    )
    index = index.contiguous()
    _draw_tile_kernel[(count, tiles)](
        logits,
        index if ids is None else ids,
        rows.temperature,
        rows.seed,
        index,
        *made,
        size,
        logits.stride(0),
        count // rows.seed.shape[0],
        count // index.shape[0],
        ahead,
        TOPK=topk,
        SCALED=scaled,
        NOISE=noise,
        MAPPED=ids is not None,
        TILE=TILE,
        **turns(logits),
    )
    return made


def _finish(
    tiles: Tiles,
    ids: torch.Tensor | None,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    slots: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> None:
    """Write rows' best into tokens and scores, the latter for topk > 1; see the kernel."""
    keys = tiles.keys
    width = 0 if source is None else source.shape[1]
    _draw_row_kernel[(keys.shape[0], max(1, triton.cdiv(width, COLUMNS)))](
        *tiles,
        keys if ids is None else ids,
        keys if slots is None else slots,
        tokens,
        scores,
        keys if source is None else source,
        keys if target is None else target,
        keys.shape[1],
        tokens.stride(0),
        0 if source is None else source.stride(0),
        width,
        MAPPED=ids is not None,
        SLOTTED=slots is not None,
        COLUMNS=COLUMNS,
        **tiles.blocks,
        **turns(keys),
    )


def draw_into_triton(scored: Scored, out: torch.Tensor) -> None:
    """See `draw_into`."""
    tiles = tiles_of(scored)
    _finish(tiles, scored.ids, out, tiles.sums)


def draw_into_reference(scored: Scored, out: torch.Tensor) -> None:
    """See `draw_into`."""
    out.copy_(candidates(scored)[0][:, 0])


def draw_into(scored: Scored, out: torch.Tensor) -> None:
    """Write each row's best token into `out` int64[R], of any stride; topk is 1."""
    run = draw_into_triton if runs_kernels(out) else draw_into_reference
    run(scored, out)


def keep_best_triton(scored: Scored, slots: torch.Tensor, kept: Kept, hidden: torch.Tensor) -> None:
    """See `keep_best`."""
    into = (kept.tokens, kept.scores, slots.contiguous(), hidden, kept.hidden)
    _finish(tiles_of(scored), scored.ids, *into)


def keep_best_reference(
    scored: Scored, slots: torch.Tensor, kept: Kept, hidden: torch.Tensor
) -> None:
    """See `keep_best`."""
    for whole, rows in zip(kept, (hidden, *candidates(scored)), strict=True):
        whole[slots] = rows


def keep_best(scored: Scored, slots: torch.Tensor, kept: Kept, hidden: torch.Tensor) -> None:
    """Write rows' candidates and states `hidden` [R, F] into rows `slots` int64[R] of `kept`."""
    run = keep_best_triton if runs_kernels(slots) else keep_best_reference
    run(scored, slots, kept, hidden)


def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    index: torch.Tensor,
    ahead: int = 0,
    *,
    sampled: bool,
    filtered: bool,
) -> torch.Tensor:
    """Tokens int64[R] from logits [R, V], as `eyas.sampling.draw`.

    `rows` and `index` have R rows, or one for every so many; the drawn token stands at
    `index + ahead`.
    """
    if not runs_kernels(logits):
        rows, index = _each(logits.shape[0], rows, index, ahead) if sampled else (rows, index)
        return sampling.draw(logits, rows, index, sampled=sampled, filtered=filtered)
    if filtered and sampled:
        each, _ = _each(logits.shape[0], rows, index, ahead)
        logits = filter_logits(scale(logits, each), each)
    scaled = sampled and not filtered
    tiles = _tiles(logits, None, 1, rows, index, ahead, scaled=scaled, noise=sampled)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _finish(tiles, None, tokens, tiles.sums)
    return tokens


def _each(
    count: int, rows: SamplingRows, index: torch.Tensor, ahead: int
) -> tuple[SamplingRows, torch.Tensor]:
    """`rows` and `index + ahead` with a row for each of `count`."""
    times = count // rows.seed.shape[0]
    index = (index + ahead).repeat_interleave(count // index.shape[0])
    return rows if times == 1 else rows.repeat(times), index


def cost(rows: int, size: int, itemsize: int, topk: int, noise: bool) -> tuple[int, int]:
    """(FLOPs or integer operations, bytes) for `rows` of `size` logits."""
    tiles = triton.cdiv(size, TILE)
    return rows * size * (4 + topk + 40 * noise), rows * (size * itemsize + 24 * tiles * topk)
