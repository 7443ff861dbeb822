"""How a pass of attention is cut into programs: integers, chosen on the host before a launch.

What a row's bits may depend on (`block`, `splits`) follows from the pool alone; what follows from
the pass (`tile`, `parts`, warps, stages) changes no bits. Nothing here reads a device value, so a
plan holds for every length of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.config import MAX_NODES
from eyas.kernels.kv_write import Layout
from eyas.kernels.lang import block_of
from eyas.model_config import AttentionShape

ONE_REQUEST = 128
"""Programs that one long request is cut into, about."""
CAUSAL, MASKED, RANKS = 0, 1, 2
"""Kinds of tail: causal; by ancestor bits; by bits, each node as if it stood in the text."""
FUSED_SUMS = 1024
"""Sums of a tile up to so many are merged by its last program, larger ones by another launch."""
MERGED_SUMS, MERGED_ABREAST = 1024, 256
"""Sums of a split that a merge's program folds, and the same where it asks for many at once."""
FEW_MERGES = 32
"""Programs of a merge that may wait beside the attention's, however long that takes."""
SPARE_SLOTS = 4
"""Slots beside a row's splits: rows of a tile end up to 64 keys apart, a window begins anywhere."""
LATENT_SPLIT = 64
"""Keys of the shortest split of latents."""
HALF_SPLITS = 512
"""Keys of a split of latents up to which a row has half of its most splits, or fewer."""
NARROW = 64
"""Numbers of a head up to which few rows are quicker upright: a block has little to be weighed."""
FEW_ROWS = 8
"""Rows in a tile of 16 of which few columns of sums stand, each of which a program merges."""
BRIEF = 2048
"""Positions up to which a tile of 16 rows that lie across is through as soon as one of 64."""
SHORT = 4096
"""Positions up to which two tiles of 32 rows, which read keys twice, are faster than one of 64."""
MAX_TILES = 4096
"""Tiles of a pass whose keys may be shared by several programs."""
USUAL_BYTES = 2**27
"""What sums of splits may take; passes that want more are launched bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What programs of a pass leave for each other; one serves all layers and passes in turn."""

    sums: torch.Tensor
    """float32 or float16: sums of splits."""
    stats: torch.Tensor
    """float32: their statistics."""
    counts: torch.Tensor
    """int32[MAX_TILES]: programs of a tile that are through; zero between launches."""

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        num_bytes: int = USUAL_BYTES,
    ) -> Workspace:
        """For a pool of `dtype`, of so many bytes. A column has at least 16 sums, two statistics.

        Latents' sums are long, and means of what a norm has left: half precision holds them. Values
        of other models may be larger than that does.
        """
        kind = torch.float16 if shape.latent and dtype.itemsize == 2 else torch.float32
        count = num_bytes // kind.itemsize
        return cls(
            sums=torch.empty(count, dtype=kind, device=device),
            stats=torch.empty(count // 8, dtype=torch.float32, device=device),
            counts=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.sums.nbytes + self.stats.nbytes + self.counts.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Tiles of a pass that are worked on at once, in the order of launches."""

    first_request: int
    requests: int
    first_tile: int
    tiles: int
    """Of each of these requests and KV heads."""

    @property
    def range_of_tiles(self) -> tuple[int, int]:
        """Half open."""
        return self.first_tile, self.first_tile + self.tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Programs of a pass over one layer."""

    tree: int
    """CAUSAL, MASKED or RANKS."""
    tile: int
    """Rows of a tile."""
    block: int
    """Keys of a block."""
    splits: int
    """Splits of a row at most."""
    least: int
    """Keys of the shortest split."""
    parts: int
    """Programs that share a tile's keys; a single one folds its sums in registers."""
    num_tiles: int
    """Tiles of a request and KV head."""
    requests_at_once: int
    """Requests of a launch; the workspace serves one launch after the other."""
    tiles_at_once: int
    """Tiles of a request and KV head in a launch."""
    num_warps: int
    num_stages: int
    """Of Triton's pipeline. Keys wait for page numbers, so 5 hold 3 blocks, 3 hold 2, 1 holds 1."""
    across: bool
    """Whether rows of a tile are rows of its products; see `attention_block`."""
    asks_first: bool
    """Whether the next block's keys are asked for ahead of this one's weights, where tensor cores
    read from shared memory. Beside the product of values alone such blocks come too late."""
    write: bool
    """Whether the kernel keeps new keys and values itself."""
    merge: bool
    """Whether a tile's last program merges its sums."""
    abreast: bool
    """Whether a merge behind it has so few programs that each may ask for many splits at once."""
    soon: bool
    """Whether a merge behind it comes a little before the attention's last sums stand."""

    @property
    def columns(self) -> int:
        """Places for rows of a request and KV head in a launch, with those that fill the last tile.

        Merges abreast are compiled for them, so there they are a power of two.
        """
        columns = self.tiles_at_once * self.tile
        return block_of(columns) if self.abreast else columns

    def launches(self, requests: int) -> Iterator[Launch]:
        """Those of a pass over so many requests."""
        for request in range(0, requests, self.requests_at_once):
            for tile in range(0, self.num_tiles, self.tiles_at_once):
                yield Launch(
                    first_request=request,
                    requests=min(self.requests_at_once, requests - request),
                    first_tile=tile,
                    tiles=min(self.tiles_at_once, self.num_tiles - tile),
                )


def most_splits(shape: AttentionShape, group: int) -> int:
    """Splits of a row at most: what lets one long request fill a device, whatever the device.

    So many that the tiles of one new row, `group` query heads for each KV head, share it. Long
    requests of latents alone have so many, others half: see `eyas.kernels.splits.split_shift`.
    """
    tiles = shape.num_kv_heads * -(-group // _largest_tile(shape.value_dim))
    each = 1 << (ONE_REQUEST // tiles).bit_length() >> 1
    return (max(8, min(64, each)) * 3 // 2) << shape.latent


def _largest_tile(values: int) -> int:
    """Rows of which a program keeps sums twice in registers, with tensor cores."""
    return 64 if values <= 128 else 32


def _latent_bytes(tile: int, keys: int) -> int:
    """Of shared memory, for a tile of latents in 16 bits and one block of keys, about.

    Where it may hold two blocks beside 64 rows, as on Hopper, it has much more.
    """
    return keys * (2 * (LATENT_SPLIT + tile) + tile)


def _at_once(requests: int, tiles: int, room: int, unit: int) -> tuple[int, int] | None:
    """Requests and tiles of each in a launch, alike in all launches about; None: no room.

    There is room for `room` tiles of a KV head. Launches begin with a node, at every `unit` tiles.
    """
    if tiles <= room:
        launches = -(-requests // (room // tiles))
        return -(-requests // launches), tiles
    units = -(-tiles // unit)
    launches = -(-units // max(room // unit, 1))
    each = -(-units // launches) * unit
    return (1, each) if each <= room else None


def _cut(
    requests: int, heads: int, tiles: int, room: int, unit: int, programs: int, narrow: bool
) -> tuple[int, int, int]:
    """Programs that share a tile's keys, requests and tiles of each at once; see `_at_once`.

    With `narrow` a multiprocessor has room for one program.
    """
    each = requests * heads * tiles
    found = _at_once(requests, tiles, room // heads, unit)
    if found is None or (found != (requests, tiles) and 4 * each > programs):
        return 1, requests, tiles  # nearly all of a device is busy anyhow
    each = found[0] * heads * found[1]
    # a few tiles' parts are through sooner with a processor each; many tiles fill them anyhow
    parts = (programs // 2 if narrow or 8 * each <= programs else programs) // each
    return parts, *found


def _comes_soon(sums: int, across: bool, abreast: bool, long: bool) -> bool:
    """Whether a merge of `sums` comes before the attention ends, whose keys may be many if `long`.

    Its programs come where there is room by then. Many of them crowd, so that it comes out even
    only where they hide a launch behind a short attention, or their sums are short.
    """
    if abreast:
        return not long or sums <= MERGED_ABREAST * FEW_MERGES
    return across and sums <= MERGED_SUMS * FEW_MERGES


def _stages(read: int, block: int, crowded: bool) -> int:
    """Stages of a pipeline whose blocks read so many bytes; see `Plan.num_stages`."""
    if read <= 2**15 and block == 64 and not crowded:
        return 5
    return 3 if read <= 76 * 2**10 else 1


def make_plan(
    layout: Layout,
    dtype: torch.dtype,
    group: int,
    requests: int,
    num_new: int,
    tree: int,
    splits: int,
    programs: int,
    workspace: Workspace,
    longest: int,
    shared: int,
) -> Plan:
    """The plan of a pass: `num_new` rows of `group` query heads for each request and KV head.

    `dtype` is the pool's, `splits` the most of a row; `programs` fill the device, each of which may
    take `shared` bytes of a multiprocessor's memory. Requests have `longest` positions at most.
    """
    sizes, heads, rows = layout.constants, layout.shape.num_kv_heads, num_new * group
    narrow, latent = dtype.itemsize == 2, layout.shape.latent
    keys, values = sizes["SIZE_A"] + sizes["SIZE_B"], sizes["SIZE_V"]
    tall = narrow and latent and values > 128  # of these tiles lie either way
    tight = tall and shared < _latent_bytes(32, keys)
    # float32 sums over keys follow the tile's shape, so there is one; tensor cores' do not
    largest = _largest_tile(values) if narrow and not tight else 16
    tile = next(size for size in (16, 32, 64) if size >= min(rows, largest))
    few = rows <= 64 and 16 * requests * heads <= programs
    across = narrow and not latent and values > NARROW
    if tile == 64 and longest <= SHORT and tree == RANKS:
        tile = 32  # with programs for nodes beside them, of which two fit on a multiprocessor
    elif across and few and tree != RANKS and (tile > 16 or longest > BRIEF):
        tile = 64  # rows that are there once; their sums are merged abreast
    if narrow and latent and tree != RANKS:
        units = min(splits, -(-longest // LATENT_SPLIT))
        fits = (n for n in (16, 32) if requests * -(-rows // n) * units <= programs // 2)
        tile = min(tile, next(fits, tile))  # rows of few keys have a multiprocessor a tile and unit
    slots, room = (splits + SPARE_SLOTS) * values, workspace.sums.numel()
    short = latent and longest <= splits // 2 * HALF_SPLITS
    most = splits // 2 if short else splits  # programs without keys cost the others a little

    def cut(tile: int) -> tuple[int, ...]:
        tiles, at_once = -(-rows // tile), min(room // (slots * tile), MAX_TILES)
        unit = math.lcm(tile, group) // tile
        parts, *each = _cut(requests, heads, tiles, at_once, unit, programs, values > 128)
        return tiles, max(1, min(most + 1, parts)), *each

    tiles, parts, *at_once = cut(tile)
    if tall and tile == 32 and rows > 32 and tree != RANKS and shared >= _latent_bytes(64, keys):
        wide = cut(64)
        if min(parts, wide[1]) > 1:  # one alone folds, and has no registers for sums twice
            across, tile, (tiles, parts, *at_once) = True, 64, wide
    least = LATENT_SPLIT if latent else 128
    block = least if narrow and keys <= 64 else 64  # in one split
    if parts == 1 and block == 128 and tile == 64:  # twice the sums do not fit in registers
        tile, tiles = 32, -(-rows // 32)
    at_once = [requests, tiles] if parts == 1 else at_once
    launched = parts * at_once[0] * heads * at_once[1]
    in_tree = tree == RANKS and (across or tile == 32)
    crowded = in_tree or (across and 2 * launched > programs and tile == 64)
    merge = tree != RANKS and parts > 1 and tile < 64 and tile * values <= FUSED_SUMS
    behind, sums = parts > 1 and not merge, launched // parts * tile * values
    # across: rows that are there once, few that are there several times, nodes of a tree
    suits = tile == 64 or rows <= FEW_ROWS or tree == RANKS
    stands = tree != RANKS if latent else across and suits
    abreast = stands and num_new <= MAX_NODES and sums <= MERGED_ABREAST * programs << across
    abreast &= at_once[0] * heads * block_of(at_once[1] * tile) * slots <= room
    soon = _comes_soon(sums, across, abreast, latent and longest > SHORT)
    read = block * (keys + (0 if latent else values)) * dtype.itemsize
    return Plan(
        tree=tree,
        tile=tile,
        block=block,
        splits=splits,
        least=least,
        parts=parts,
        num_tiles=tiles,
        requests_at_once=at_once[0],
        tiles_at_once=at_once[1],
        num_warps=8 if not narrow or values > 128 or (tile == 64 and not across) else 4,
        num_stages=2 if tight else _stages(read, block, crowded),
        across=across,
        asks_first=tall,
        write=num_new <= MAX_NODES,
        merge=merge,
        abreast=behind and abreast,
        soon=behind and soon,
    )
