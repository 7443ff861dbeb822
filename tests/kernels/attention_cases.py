"""Cases of paged attention: sequences in scattered pages, and passes over them by any backend.

A sequence's queries, keys and values are given at every position, so that the same row can be asked
for in many passes. Pages that nobody owns, and what lies behind a prefix, are poisoned.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from eyas.attention import PagedAttention
from eyas.attention.reference import ReferenceAttention
from eyas.attention.rope import Rope, rotate
from eyas.attention.triton import TritonAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kv.pool import KVPool, flat_rows
from eyas.model_config import AttentionShape
from tests.kernels.running import DEVICE

SMALL_WORKSPACE = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of a pool and of the queries over it."""

    group: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    latent: bool = False
    rope_dim: int = 0
    window: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    poison: float = 3e4

    @property
    def shape(self) -> AttentionShape:
        """What a network would ask for; two layers, of which the second is used."""
        return AttentionShape(
            num_layers=2,
            num_kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            scale=self.key_dim**-0.5,
            latent=self.latent,
            windows=(0, self.window) if self.window else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One request's rows at every position: [L, heads, dim] each, and tables float32 [L, 1, R]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: Rope | None

    @classmethod
    def random(cls, case: Case, length: int, seed: int) -> Sequence:
        """Rows of order one."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=generator).to(case.dtype).to(DEVICE)

        q = normal(case.kv_heads * case.group, case.key_dim)
        k = normal(case.kv_heads, case.key_dim)
        v = k[..., : case.value_dim] if case.latent else normal(case.kv_heads, case.value_dim)
        rope = None
        if case.rope_dim:
            angles = torch.rand(length, 1, case.rope_dim // 2, generator=generator).to(DEVICE) * 6
            cos, sin = angles.cos(), angles.sin()
            rope = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cls(q=q, k=k, v=v, rope=rope)

    def float(self) -> Sequence:
        """The same rows in float32."""
        return replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float())

    def picked(self, index: list[int]) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values and tables of some positions."""
        parts = (self.q, self.k, self.v, *(self.rope or ()))
        return tuple(part[index] for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """New rows of one request: where it stands, which positions they are, what they see."""

    sequence: Sequence
    prefix: int
    index: list[int]
    """Positions of the sequence whose rows are the new ones, node by node."""
    bits: list[int] | None = None
    """Ancestor bits of each node; None: causal."""
    offset: int = 0
    before: list[int] = field(default_factory=list)
    """Positions of the sequence kept in the tail before the offset."""


class Pages:
    """A pool with the prefixes of some requests, and a way to run passes over it."""

    def __init__(self, case: Case, tails: list[Tail], spare: int = 0) -> None:
        """`spare` more pages a request than its tail needs."""
        self.case, self.tails = case, tails
        width = max(t.prefix + t.offset + len(t.index) for t in tails)
        each = -(-width // case.page_size) + spare
        self.pool = KVPool(
            case.shape,
            num_pages=len(tails) * each + 3,
            page_size=case.page_size,
            dtype=case.dtype,
            device=torch.device(DEVICE),
        )
        self.pool.k.fill_(case.poison)
        self.pool.v.fill_(case.poison)
        order = list(range(1, len(tails) * each + 3))
        random.Random(0).shuffle(order)
        table = [order[i * each : (i + 1) * each] for i in range(len(tails))]
        self.table = torch.tensor(table, device=DEVICE)
        for i, tail in enumerate(tails):
            self._keep(i, 0, list(range(tail.prefix)))
            self._keep(i, tail.prefix, tail.before)

    def _keep(self, request: int, start: int, index: list[int]) -> None:
        """Put keys, rotated, and values of positions into a request's pages."""
        _, k, v, *rope = self.tails[request].sequence.picked(index)
        places = torch.arange(start, start + len(index), device=DEVICE)[None]
        rows = flat_rows(self.table[request : request + 1], places, self.case.page_size)
        self.pool.write(1, rows[0], rotate(k, (rope[0], rope[1]) if rope else None), v)

    def batch(self) -> ForwardBatch:
        """The tails as a pass; all have the same number of new rows and the same offset."""
        first = self.tails[0]
        rows = [[t.prefix + t.offset + n for n in range(len(t.index))] for t in self.tails]
        ancestors = None
        if first.bits is not None:
            bits = [b for t in self.tails for b in t.bits or ()]
            signed = [b - (1 << 64) if b >> 63 else b for b in bits]
            ancestors = torch.tensor(signed, device=DEVICE)
            rows = [[t.prefix + b.bit_count() - 1 for b in t.bits or ()] for t in self.tails]
        positions = torch.tensor(rows, device=DEVICE).flatten()
        return ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            tokens=torch.zeros_like(positions),
            positions=positions,
            prefix_lens=torch.tensor([t.prefix for t in self.tails], device=DEVICE),
            page_table=self.table,
            num_new=len(first.index),
            max_kv_len=max(t.prefix + t.offset + len(t.index) for t in self.tails),
            ancestors=ancestors,
            tail_offset=first.offset,
        )

    def run(self, backend: PagedAttention) -> torch.Tensor:
        """[B, N, H * value_dim]: the pass by a backend over this pool."""
        parts = [t.sequence.picked(t.index) for t in self.tails]
        q, k, v, *rope = (torch.cat(part) for part in zip(*parts, strict=True))
        tables = (rope[0], rope[1]) if rope else None
        out = backend.begin(self.batch())(1, q, k, v, tables)
        return out.view(len(self.tails), -1, out.shape[1])


def by_reference(case: Case, tails: list[Tail]) -> tuple[torch.Tensor, KVPool]:
    """What the torch reference gives in float32 of the same numbers, and the pool it leaves."""
    case = replace(case, dtype=torch.float32)
    pages = Pages(case, [replace(t, sequence=t.sequence.float()) for t in tails])
    return pages.run(ReferenceAttention(pages.pool)), pages.pool


def by_kernel(
    case: Case,
    tails: list[Tail],
    *,
    programs: int = 8,
    deterministic: bool = True,
    verify: str = "decode",
    splits: int | None = None,
    workspace_bytes: int = SMALL_WORKSPACE,
    spare: int = 0,
) -> tuple[torch.Tensor, KVPool]:
    """What the kernels give, and the pool they leave; their workspace starts poisoned."""
    pages = Pages(case, tails, spare)
    backend = TritonAttention(
        pages.pool,
        deterministic=deterministic,
        verify=verify,
        programs=programs,
        splits=splits,
        workspace_bytes=workspace_bytes,
    )
    backend.workspace.sums.fill_(float("nan"))
    backend.workspace.stats.fill_(float("nan"))
    out = pages.run(backend)
    assert not backend.workspace.counts.any(), "counts are zero between launches"
    whole = verify == "decode" or backend.workspace.sums.isnan().all()
    assert whole, "programs of a verify pass shared keys in prefill mode"
    return out, pages.pool


def random_bits(count: int, offset: int, rng: random.Random) -> list[int]:
    """Ancestor bits of `count` nodes behind `offset` tail places, each with a random parent."""
    bits = [1 << n for n in range(offset)]
    for n in range(offset, offset + count):
        parent = bits[rng.randrange(n)] if n else 0
        bits.append(parent | 1 << n)
    return bits[offset:]
