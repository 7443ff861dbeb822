"""Whether a row's result depends on how many rows are in its pass: tried on this machine, at start.

Speculation writes the text of plain decoding because verify's rows have the bits they have alone.
Our kernels are made so; of the matrix library it is known for the machines where somebody tried.
So each distinct product of a target is run over random rows, one by one and in the numbers that the
engine's passes have, and bits are compared. Nothing is known here of texts or graphs' contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.graphs import buckets
from eyas.kernels.calls import in_calls
from eyas.kernels.experts_triton import Shared
from eyas.kernels.router import Chosen
from eyas.kernels.terms import summed
from eyas.layers.basic import GatedMLP
from eyas.layers.linear import Linear
from eyas.layers.mla import MLA
from eyas.layers.moe import RoutedMLP
from eyas.models.decoder import Decoder

MOST_ROWS = 256
"""Passes of more rows are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """A product whose rows depend on their number."""

    name: str
    shape: tuple[int, ...]
    """Of its weight."""
    dtype: str
    rows: int
    """The least number of rows tried that changes the bits a row has alone."""

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return f"{self.name} ({shape}, {self.dtype}) from {self.rows} rows on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCheck:
    """What was tried, and what depends on the number of rows."""

    counts: tuple[int, ...] = ()
    """Numbers of rows."""
    products: int = 0
    """Distinct ones that were tried."""
    dependent: tuple[Dependent, ...] = ()
    seconds: float = 0.0
    skipped: str = ""
    """Why nothing was tried."""

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def warning(self, deterministic: str) -> str:
        """What a user should know, given the engine's `deterministic`; empty: nothing."""
        if not self.dependent or deterministic == "off":
            return ""
        remedy = "--deterministic on forces it"
        if deterministic == "on":
            remedy = "this machine's library does so even in calls of fixed rows"
        names = "; ".join(map(str, self.dependent))
        return (
            f"a row's result depends on how many rows are in its pass: {names}. "
            f"A text may part from plain decoding's at a near tie; {remedy}"
        )


def check_start(target: Decoder, config: EngineConfig, speculation: SpeculationConfig) -> RowCheck:
    """Try a target's products in the numbers of rows that an engine's passes will have."""
    device = target.embed.weight.device
    if device.type != "cuda":
        return RowCheck(skipped="passes are padded to the row tile, by which rows are independent")
    found = check_rows(target, row_counts(config, speculation))
    torch.cuda.empty_cache()  # graphs have a pool of their own
    return found


def row_counts(config: EngineConfig, speculation: SpeculationConfig) -> tuple[int, ...]:
    """Rows of plain and verify passes of every batch that is captured, ascending."""
    batches, nodes = {1, *buckets(config)}, speculation.num_nodes
    counts = batches | {size * nodes for size in batches}
    return tuple(sorted(count for count in counts if count <= MOST_ROWS))


@torch.inference_mode()
def check_rows(target: Decoder, counts: Sequence[int]) -> RowCheck:
    """Try each distinct product of `target` with `counts` rows against one row alone."""
    start = perf_counter()
    kinds = list(products(target, max(counts)))
    changed = torch.stack([differences(kind, counts) for kind in kinds]).tolist()
    dependent = []
    for kind, flags in zip(kinds, changed, strict=True):
        rows = [count for count, flag in zip(counts, flags, strict=True) if flag]
        if rows:
            where = Dependent(name=kind.name, shape=kind.shape, dtype=kind.dtype, rows=min(rows))
            dependent.append(where)
    return RowCheck(
        counts=tuple(counts),
        products=len(kinds),
        dependent=tuple(dependent),
        seconds=perf_counter() - start,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of a layer, over rows that stand ready."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    x: torch.Tensor
    """[R, ...]"""
    run: Callable[[torch.Tensor, slice], torch.Tensor]
    """Some rows of x, and which they are, to at least as many."""


def products(target: Decoder, rows: int) -> Iterator[Product]:
    """One of each kind in `target`, without its collectives, over `rows` random rows."""
    generator = torch.Generator(target.embed.weight.device).manual_seed(0)
    seen: set[tuple[Any, ...]] = set()
    gates = {id(mlp.gate_up) for mlp in target.modules() if isinstance(mlp, GatedMLP)}
    shared = {  # goes with the routed experts
        id(part)
        for routed in target.modules()
        if isinstance(routed, RoutedMLP) and routed.shared is not None
        for part in routed.shared.modules()
    }
    for module in target.modules():
        if not isinstance(module, (Linear, RoutedMLP, MLA)) or id(module) in shared:
            continue
        gated = id(module) in gates
        weights = [(tuple(p.shape), p.dtype) for _, p in sorted(module.named_parameters())]
        key = (type(module) is RoutedMLP, isinstance(module, MLA), gated, *weights)
        if key not in seen:
            seen.add(key)
            yield from _of(module, rows, generator, gated)


def _of(
    module: Linear | RoutedMLP | MLA, rows: int, generator: torch.Generator, gated: bool
) -> Iterator[Product]:
    """The products of one layer; those of layers inside it come by themselves."""

    def drawn(like: torch.Tensor, *size: int) -> torch.Tensor:
        x = torch.empty(rows, *size, dtype=like.dtype, device=like.device)
        return x.normal_(generator=generator)

    match module:
        case Linear(weight=weight):
            name = "+".join(part.rpartition(".")[2] for part in module.parts)
            call, x = partial(module.product, gates=gated), drawn(weight, weight.shape[1])
            yield _product(name, weight, x, lambda x, _: in_calls(x, module.call_rows, call))
        case RoutedMLP(experts=experts, shared=mlp):
            x = drawn(experts.down, experts.down.shape[1])
            yield _product("router", module.router.weight, x, lambda x, _: _told(module.router(x)))
            ids, scores, _ = module.router(x)
            shared = None if mlp is None else Shared(mlp.gate_up.weight, mlp.down.weight)
            yield _product(
                "experts",
                experts.gate_up,
                x,
                lambda x, r: summed(experts(x, Chosen(ids[r], scores[r]), shared)),
            )
        case MLA(kv_up=weight):
            (heads, _, latent), mla = weight.shape, module.mla
            x = drawn(weight, heads, mla.nope_dim + mla.rope_dim)
            kept = drawn(weight, latent + mla.rope_dim)
            yield _product(
                "kv_b_proj in queries",
                weight,
                x,
                lambda x, r: torch.cat(module.absorb(x, kept[r]), dim=1),
            )
            x = drawn(weight, heads * latent)
            yield _product("kv_b_proj in results", weight, x, lambda x, _: module.values(x))


def _told(chosen: Chosen) -> torch.Tensor:
    """float32[T, 2 * K]: experts' numbers and weights."""
    return torch.cat((chosen.ids.float(), chosen.weights), dim=1)


def _product(
    name: str,
    weight: torch.Tensor,
    x: torch.Tensor,
    run: Callable[[torch.Tensor, slice], torch.Tensor],
) -> Product:
    dtype = str(weight.dtype).removeprefix("torch.")
    return Product(name=name, shape=tuple(weight.shape), dtype=dtype, x=x, run=run)


def differences(product: Product, counts: Sequence[int]) -> torch.Tensor:
    """bool[len(counts)]: where rows at the front or the end of x differ from each alone."""
    total = product.x.shape[0]

    def bits(start: int, count: int) -> torch.Tensor:
        rows = slice(start, start + count)
        found = product.run(product.x[rows].clone(), rows)[:count]
        return found.view(torch.int16 if found.element_size() == 2 else torch.int32)

    alone = torch.cat([bits(row, 1) for row in range(total)])
    flags = []
    for count in counts:
        starts = {0, total - count}
        each = [(bits(start, count) != alone[start : start + count]).any() for start in starts]
        flags.append(torch.stack(each).any())
    return torch.stack(flags)
