"""Paged attention: right against a naive softmax, and the same bits in any company.

Shapes are SmolLM2's (9 query heads over 3, dim 64), latent ones (a value is the front of its key),
and a sliding window in the layer that is tried. On the CPU keys and values are float32 whatever the
model's type; values come in the model's type.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch

from eyas.attention.reference import BLOCK, ReferenceAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kv.pool import KVPool, flat_rows
from eyas.model_config import AttentionShape

HEADS = 9
PLAIN = AttentionShape.heads(2, 3, 64)
LATENT = AttentionShape(
    num_layers=2, num_kv_heads=1, key_dim=80, value_dim=64, scale=0.17, latent=True
)
WINDOWED = dataclasses.replace(PLAIN, windows=(0, 75))
each_shape = pytest.mark.parametrize(
    "shape", [PLAIN, LATENT, WINDOWED], ids=["heads", "latent", "window"]
)
MODEL_TYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One request's queries, keys and values at every position, in the model's type."""

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sequence(length: int, seed: int, dtype: torch.dtype, shape: AttentionShape = PLAIN) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    kv_heads, value = shape.num_kv_heads, shape.value_dim
    q = torch.randn(length, HEADS, shape.key_dim, generator=generator) * 2
    k = torch.randn(length, kv_heads, shape.key_dim, generator=generator)
    v = torch.randn(length, kv_heads, value, generator=generator).to(dtype)
    if shape.latent:
        k[..., :value] = v.float()
    return Sequence(shape=shape, q=q, k=k, v=v)


class Paged:
    """Sequences in a pool with scattered pages; unowned memory is poisoned."""

    def __init__(
        self, sequences: list[Sequence], page_size: int, room: int, poison: float = 3e4
    ) -> None:
        self.sequences = sequences
        each = -(-room // page_size)
        num_pages = len(sequences) * each + 3
        self.pool = KVPool(
            sequences[0].shape,
            num_pages=num_pages,
            page_size=page_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.pool.k.fill_(poison)
        self.pool.v.fill_(poison)
        order = list(range(1, num_pages))
        random.Random(0).shuffle(order)
        pages = [order[i * each : (i + 1) * each] for i in range(len(sequences))]
        self.table = torch.tensor(pages)
        self.attention = ReferenceAttention(self.pool)

    def keep(self, row: int, length: int) -> None:
        """Put the first `length` keys and values of a sequence into its pages."""
        index = flat_rows(self.table[row : row + 1], torch.arange(length)[None], self.page_size)
        one = self.sequences[row]
        self.pool.write(1, index[0], one.k[:length], one.v[:length])

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    def run(
        self,
        rows: list[int],
        prefix: list[int],
        num_new: int,
        *,
        ancestors: torch.Tensor | None = None,
        slack: int = 0,
        padding: int = 0,
        tail_offset: int = 0,
    ) -> torch.Tensor:
        """[B, N, H * D]: new rows at `prefix + tail_offset` of the sequences named by `rows`."""
        spans = [
            (r, p + tail_offset, p + tail_offset + num_new)
            for r, p in zip(rows, prefix, strict=True)
        ]
        parts = [
            [getattr(self.sequences[r], name)[a:b] for r, a, b in spans] for name in ("q", "k", "v")
        ]
        q, k, v = (torch.cat(part) for part in parts)
        if padding:
            q, k, v = (torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in (q, k, v))
        depths = torch.arange(num_new).repeat(len(rows)) + tail_offset
        if ancestors is not None:
            depths = torch.tensor([(m % (1 << 64)).bit_count() - 1 for m in ancestors.tolist()])
        batch = ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            tokens=torch.zeros(len(rows) * num_new).long(),
            positions=torch.tensor(prefix).repeat_interleave(num_new) + depths,
            prefix_lens=torch.tensor(prefix),
            page_table=self.table[rows],
            num_new=num_new,
            max_kv_len=max(b for _, _, b in spans) + slack,
            ancestors=ancestors,
            tail_offset=tail_offset,
        )
        out = self.attention.begin(batch)(1, q, k, v)
        width = HEADS * self.pool.shape.value_dim
        assert out.shape == (len(rows) * num_new + padding, width)
        assert out.dtype == v.dtype
        assert not out[len(rows) * num_new :].any(), "padding rows are zero"
        return out[: len(rows) * num_new].view(len(rows), num_new, -1)


def naive(one: Sequence, row: int, visible: list[int]) -> torch.Tensor:
    """[H * value_dim] in float64: softmax over the visible positions for query `row`.

    `visible` is the row's path; of that a window leaves the end.
    """
    visible = visible[-one.shape.window(1) :]
    group = HEADS // one.shape.num_kv_heads
    k = one.k[visible].double().repeat_interleave(group, 1)
    v = one.v[visible].double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", one.q[row].double(), k) * one.shape.scale
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v).flatten()


@each_shape
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_causal_rows_equal_naive_attention(page_size: int, shape: AttentionShape) -> None:
    """Fault: wrong visibility at page and block edges; scattered pages, poisoned neighbours."""
    sequences = [sequence(600, s, torch.float32, shape) for s in range(3)]
    paged = Paged(sequences, page_size, 600)
    prefix = [0, BLOCK - 2, 530]
    for row, length in enumerate(prefix):
        paged.keep(row, length)
    out = paged.run([0, 1, 2], prefix, 5)
    for row, length in enumerate(prefix):
        for n in range(5):
            expected = naive(sequences[row], length + n, list(range(length + n + 1)))
            assert torch.allclose(out[row, n].double(), expected, atol=2e-5)


@each_shape
@pytest.mark.parametrize("count", [6, 33, 64])
def test_tree_rows_see_prefix_and_ancestors(count: int, shape: AttentionShape) -> None:
    """Fault: stale mask, siblings visible to each other; up to bit 63 of the mask."""
    rng = random.Random(count)
    prefix = [BLOCK - 20, 3]
    sequences = [sequence(BLOCK + 80, s, torch.float32, shape) for s in range(2)]
    paged = Paged(sequences, 16, BLOCK + 80)
    paths: list[list[set[int]]] = []
    for row, length in enumerate(prefix):
        paged.keep(row, length)
        seen = [{0}]
        for n in range(1, count):
            seen.append(seen[rng.randrange(n)] | {n})
        paths.append(seen)
    words = [[sum(1 << j for j in s) for s in seen] for seen in paths]
    masks = torch.tensor([[w - (1 << 64) if w >> 63 else w for w in row] for row in words])
    out = paged.run([0, 1], prefix, count, ancestors=masks.flatten())
    for row, length in enumerate(prefix):
        for n in range(count):
            visible = [*range(length), *sorted(length + j for j in paths[row][n])]
            expected = naive(sequences[row], length + n, visible)
            assert torch.allclose(out[row, n].double(), expected, atol=2e-5)


def test_a_tail_is_written_in_levels() -> None:
    """Fault: drafting levels over each other. Rows at a tail offset see earlier rows by bits."""
    one = sequence(300, 0, torch.float32)
    paged = Paged([one], 16, 300)
    paged.keep(0, 250)
    paged.run([0], [250], 3, ancestors=torch.tensor([0b1, 0b10, 0b100]))
    bits = [0b001001, 0b010001, 0b100100]
    out = paged.run([0], [250], 3, ancestors=torch.tensor(bits), tail_offset=3)
    for n, mask in enumerate(bits):
        visible = [*range(250), *(250 + j for j in range(6) if mask >> j & 1)]
        expected = naive(one, 253 + n, visible)
        assert torch.allclose(out[0, n].double(), expected, atol=2e-5)


@each_shape
@pytest.mark.parametrize("dtype", MODEL_TYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_company(
    dtype: torch.dtype, threads: int, shape: AttentionShape
) -> None:
    """Fault: verify arithmetic that depends on the number of rows (v#54506).

    A row alone, in runs of 1..33 new rows, under loose bounds, beside other requests, with padding
    rows, causal or by mask, on any number of threads: the same bits.
    """
    length = 2 * BLOCK + 40
    sequences = [sequence(length, s, dtype, shape) for s in range(8)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start in (5, BLOCK - 3, 2 * BLOCK - 1):
            single = Paged(sequences[:1], 16, length)
            single.keep(0, start)
            expected = torch.cat([single.run([0], [start + n], 1)[0] for n in range(33)])
            for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
                chained = torch.tensor([(1 << (n + 1)) - 1 for n in range(count)])
                for slack in (0, 300):
                    fresh = Paged(sequences[:1], 16, length, poison=-7e3)
                    fresh.keep(0, start)
                    for masks in (None, chained):
                        out = fresh.run([0], [start], count, slack=slack, ancestors=masks)
                        assert torch.equal(out[0], expected[:count]), (start, count, slack)
                crowd = Paged(sequences, 64, length)
                prefix = [start, 0, 7, 100, BLOCK, BLOCK + 1, 33, 2 * BLOCK]
                prefix = [min(p, length - count) for p in prefix]
                for row, one in enumerate(prefix):
                    crowd.keep(row, one)
                order = [3, 1, 0, 2, 7, 6, 5, 4][: 3 if count > 9 else 8]
                out = crowd.run(order, [prefix[r] for r in order], count, padding=3)
                assert torch.equal(out[order.index(0)], expected[:count]), (start, count, "crowd")
    finally:
        torch.set_num_threads(before)


def check_path(one: Sequence, start: int, count: int, rng: random.Random) -> None:
    """Four nodes of a tree of `count` behind `start` positions have the bits of plain text."""
    length = len(one.q)
    path = [0, *sorted(rng.sample(range(1, count), 3))]
    mixed = sequence(length, 1, one.v.dtype, one.shape)
    for part, whole in ((mixed.q, one.q), (mixed.k, one.k), (mixed.v, one.v)):
        part[:start] = whole[:start]
        for depth, node in enumerate(path):
            part[start + node] = whole[start + depth]
    masks = [1 << n if n not in path else 0 for n in range(count)]
    for depth, node in enumerate(path):
        masks[node] = sum(1 << n for n in path[: depth + 1])
    signed = torch.tensor([m - (1 << 64) if m >> 63 else m for m in masks])
    tree, straight = Paged([mixed], 16, length), Paged([one], 16, length)
    tree.keep(0, start)
    straight.keep(0, start)
    out = tree.run([0], [start], count, ancestors=signed)[0]
    assert torch.equal(out[path], straight.run([0], [start], 4)[0]), (start, count)


@each_shape
@pytest.mark.parametrize("dtype", MODEL_TYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_node_of_a_tree_has_the_bits_of_its_path(
    dtype: torch.dtype, threads: int, shape: AttentionShape
) -> None:
    """Fault: trees that are almost lossless. A path spread among other nodes, across the edges of
    blocks, reads bit for bit as if it stood in the text alone.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    one, rng = sequence(3 * BLOCK + 80, 0, dtype, shape), random.Random(threads)
    try:
        for start in (3, BLOCK - 9, BLOCK - 1, 2 * BLOCK - 30, 2 * BLOCK + 1, 3 * BLOCK - 2):
            for count in (4, 16, 64):
                check_path(one, start, count, rng)
    finally:
        torch.set_num_threads(before)


def test_keys_of_deepseeks_width_keep_their_bits() -> None:
    """Fault: a library that splits sums of 576 terms by the number of rows or their place."""
    shape = AttentionShape(
        num_layers=2, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, latent=True
    )
    one, start = sequence(BLOCK + 90, 0, torch.float32, shape), BLOCK - 3
    single = Paged([one], 16, len(one.q))
    single.keep(0, start)
    expected = torch.cat([single.run([0], [start + n], 1)[0] for n in range(17)])
    for count in (2, 5, 8, 17):
        assert torch.equal(single.run([0], [start], count)[0], expected[:count]), count
    for count in (6, 40):
        check_path(one, start, count, random.Random(count))


@each_shape
def test_page_size_does_not_change_bits(shape: AttentionShape) -> None:
    """Fault: results that depend on the memory layout."""
    one = sequence(400, 0, torch.float32, shape)
    results = []
    for page_size in (1, 7, 16, 48, 64, 512):
        paged = Paged([one], page_size, 400)
        paged.keep(0, 390)
        results.append(paged.run([0], [390], 4))
    assert all(torch.equal(r, results[0]) for r in results)


def test_rows_past_the_pages_fall_on_the_dummy_page() -> None:
    """Fault: padded rows write real memory (v PR#43682). Only own rows and page 0 change."""
    one, other = (sequence(64, s, torch.float32) for s in range(2))
    paged = Paged([one, other], 4, 16)
    paged.keep(0, 14)
    paged.keep(1, 16)
    table = paged.table.clone()
    table[0, 3:] = 0
    paged.table = table
    before = paged.pool.k.clone()
    expected = naive(one, 11, list(range(12)))
    out = paged.run([0], [8], 12)
    assert torch.allclose(out[0, 3].double(), expected, atol=2e-5)
    changed = (paged.pool.k != before).any(-1).any(0).any(0).nonzero().flatten().tolist()
    own = flat_rows(table[:1], torch.arange(8, 12)[None], 4)[0].tolist()
    assert set(changed) <= {*own, *range(4)}
