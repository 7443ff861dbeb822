"""The best few of each row of logits, with the noise of `eyas.sampling` where it is wanted.

Two launches: one over tiles of the vocabulary, one over rows. The vocabulary's tiles are of a fixed
length, so a row's numbers do not depend on other rows. Hashes are those of `gumbel_noise` bit for
bit; the references are `eyas.sampling.draw` and `candidates_reference`. As in torch's maximum, what
is not a number comes first, and ties go to the lower column.
"""

from __future__ import annotations

import torch

from eyas import sampling
from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, number_of, score_of, without
from eyas.sampling import SamplingRows, filter_logits, perturb, scale

TILE = 2048
"""Logits per program."""


def candidates_reference(
    logits: torch.Tensor,
    ids: torch.Tensor,
    topk: int,
    rows: SamplingRows,
    index: torch.Tensor,
    ahead: int,
    *,
    sampled: bool,
    noise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `candidates`."""
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
def _gumbel(seed, index, ids):  # type: ignore[no-untyped-def]
    """Noise of int64 `ids` under scalars seed and index; log1p from log as Kahan wrote it."""
    low = _mix(_mix(seed.to(tl.int32)) ^ index.to(tl.int32))
    high = _mix(low + (seed >> 32).to(tl.int32) + -1640531527)
    bits = _mix(_mix(ids.to(tl.int32) * -1640531535 + low) ^ high) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    rest = 1.0 - uniform
    near = tl.where(rest == 1.0, 0.5, rest)
    log1p = tl.where(rest == 1.0, -uniform, tl.div_rn(tl.log(near) * -uniform, near - 1.0))
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
    tokens_ptr,
    scores_ptr,
    tiles,
    TOPK: tl.constexpr,
    MAPPED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): the tokens of its TOPK best columns, and for TOPK > 1 their log-softmax."""
    take_turn(EARLY)
    row = tl.program_id(0)
    keys, log_sum = best_of_tiles(keys_ptr, sums_ptr, row, tiles, TOPK, TILES, BLOCK)
    for k in tl.static_range(TOPK):
        best = tl.max(keys, 0)
        keys = without(keys, keys == best)
        token = number_of(best).to(tl.int64)
        if MAPPED:
            token = tl.load(ids_ptr + token)
        tl.store(tokens_ptr + row * TOPK + k, token)
        tl.store(scores_ptr + row * TOPK + k, score_of(best) - log_sum if TOPK > 1 else 0.0)


def best_triton(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    topk: int,
    rows: SamplingRows,
    index: torch.Tensor,
    ahead: int,
    *,
    scaled: bool,
    noise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64[R, topk] and their log-softmax float32[R, topk], zeros for topk 1.

    Of logits [R, V], whose columns stand for `ids` int64[V] if given. `scaled` divides by the
    temperatures, `noise` adds to rows of positive temperature their noise at `index + ahead`.
    """
    (count, size), device = logits.shape, logits.device
    tiles = triton.cdiv(size, TILE)
    keys = torch.empty(count, tiles, topk, dtype=torch.int64, device=device)
    sums = torch.empty(count, tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(count, topk, dtype=torch.int64, device=device)
    scores = torch.empty(count, topk, dtype=torch.float32, device=device)
    index = index.contiguous()
    columns, mapped = index if ids is None else ids, ids is not None
    _draw_tile_kernel[(count, tiles)](
        logits,
        columns,
        rows.temperature,
        rows.seed,
        index,
        keys,
        sums,
        size,
        logits.stride(0),
        count // rows.seed.shape[0],
        count // index.shape[0],
        ahead,
        TOPK=topk,
        SCALED=scaled,
        NOISE=noise,
        MAPPED=mapped,
        TILE=TILE,
        **turns(logits),
    )
    _draw_row_kernel[(count,)](
        keys,
        sums,
        columns,
        tokens,
        scores,
        tiles,
        TOPK=topk,
        MAPPED=mapped,
        TILES=block_of(tiles),
        BLOCK=block_of(tiles * topk),
        **turns(logits),
    )
    return tokens, scores


def candidates(
    logits: torch.Tensor,
    ids: torch.Tensor,
    topk: int,
    rows: SamplingRows,
    index: torch.Tensor,
    ahead: int,
    *,
    sampled: bool,
    noise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best topk target ids int64[R, topk] and their log scores, of draft logits [R, Vd].

    `ids` int64[Vd] are the columns' tokens; `rows` and `index` have R rows, or one for every so
    many; the token to draw stands at `index + ahead`. With noise the score is the log-softmax of
    the perturbed logits: it ranks nodes by how surely the target, under the same noise, draws them.
    The scores of topk 1 are zeros.
    """
    if runs_kernels(logits):
        shared = sampled and noise
        return best_triton(logits, ids, topk, rows, index, ahead, scaled=sampled, noise=shared)
    return candidates_reference(logits, ids, topk, rows, index, ahead, sampled=sampled, noise=noise)


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
    return best_triton(logits, None, 1, rows, index, ahead, scaled=scaled, noise=sampled)[0][:, 0]


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
