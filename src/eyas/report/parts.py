"""Parts of a pass, measured one by one: memory, linear layers, experts, attention, small kernels.

They run through the engine's own layers and kernels, with weights and keys that no cache holds:
there are copies, and a timer empties caches. What a part is used for is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from eyas.attention import PagedAttention, paged_attention
from eyas.attention.triton import TritonAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.hardware import Curve, Family, Times
from eyas.kernels.draw import draw
from eyas.kernels.experts import experts
from eyas.kernels.gated import gated
from eyas.kernels.skinny_plan import plan_of, takes
from eyas.kv.pool import KVPool
from eyas.layers.basic import RMSNorm
from eyas.layers.linear import Linear, pad_rows, row_tile
from eyas.layers.rotary import Rotary
from eyas.model_config import AttentionShape, RopeConfig
from eyas.report.timing import Call, Timer
from eyas.sampling import SamplingRows

FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)
PAGE, KV_BYTES = 16, 2
"""Keys count as 16 bits, whatever the pool of a device keeps."""
FEW_TO_AN_EXPERT = (1, 2, 4, 8, 32)
"""Rows of which few share an expert."""
QUICK = 10
"""One of many figures that are alike takes so much less time."""
COPIES = 48
"""Copies of weights at most, so that none is in a cache when its turn comes."""


class Layer(NamedTuple):
    """A linear layer."""

    outputs: int
    inputs: int
    gated: bool = False
    """Whether the engine runs it with its gate, in one launch where it can."""


class Crowd(NamedTuple):
    """Passes of attention over as many requests."""

    requests: int
    nodes: tuple[int, ...]
    """New rows of each."""
    contexts: tuple[int, ...]
    """Their committed positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: shapes as models have them, on a device that takes them quickly."""

    tensor_bytes: int
    """Of what memory's bandwidth is measured on."""
    layers: tuple[Layer, ...]
    """Those of which one row is measured, by bytes, beside the small ones."""
    large: Layer
    """The layer whose rows are many."""
    many_rows: tuple[int, ...]
    small: tuple[Layer, ...]
    """Small layers, by bytes, whose rows are few and many."""
    experts: tuple[tuple[int, int, int, int], ...]
    """Experts, hidden size, intermediate size of one, experts a row."""
    crowds: tuple[int, ...]
    """Rows whose experts are many to each."""
    attention: tuple[Crowd, ...]
    """By requests; of the last one's last, arithmetic is the bound."""
    longest: int = 0
    """Positions that passes of attention are made ready for at least, as an engine's are."""
    vocabularies: tuple[int, ...] = (32_000, 49_152, 128_256)


CPU_SIZES = Sizes(
    tensor_bytes=2**26,
    layers=(Layer(3648, 2048), Layer(4096, 4096), Layer(6144, 4096)),
    large=Layer(4096, 4096),
    many_rows=(128, 256),
    small=(Layer(960, 576), Layer(3072, 576, gated=True), Layer(2048, 2048)),
    experts=((16, 512, 256, 4),),
    crowds=(64,),
    attention=(Crowd(1, (1, 4, 16), (64, 256, 1024)), Crowd(4, (1, 4, 16), (64, 256))),
)
CONTEXTS = (64, 256, 1024, 4096, 8192)
GPU_SIZES = Sizes(
    tensor_bytes=2**31,
    layers=(
        *CPU_SIZES.layers,
        Layer(4096, 14_336),
        Layer(28_672, 4096),
        Layer(128_256, 4096),
    ),
    large=Layer(28_672, 4096),
    many_rows=(128, 256, 512, 1024, 2048),
    small=(
        Layer(576, 576),
        Layer(960, 576),
        Layer(576, 1536),
        Layer(3072, 576, gated=True),
        Layer(2048, 2048),
    ),
    experts=((64, 2048, 352, 6), (64, 2048, 1408, 6)),
    crowds=(64, 128, 256, 512),
    attention=(
        Crowd(1, (1, 2, 4, 8, 16, 64), (*CONTEXTS, 32_768)),
        Crowd(8, (1, 2, 4, 8, 16), CONTEXTS),
        Crowd(32, (1, 2, 4, 8, 16), CONTEXTS),
    ),
    longest=8192,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device, the type of its weights, and how much of it is measured."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    cache_bytes: int
    """Of its last cache; more than three times as much is gone through before anything returns."""
    sizes: Sizes

    @property
    def quick(self) -> Machine:
        """The same, with less time for each figure of many that are alike."""
        timer = dataclasses.replace(self.timer, seconds=self.timer.seconds / QUICK)
        return dataclasses.replace(self, timer=timer)

    @property
    def is_gpu(self) -> bool:
        """Whether figures are of large tensors, in graphs."""
        return self.device.type == "cuda"

    def normal(self, *size: int) -> torch.Tensor:
        """Small random numbers in the type of weights."""
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0.0, 0.02)

    def copies(self, num_bytes: float) -> int:
        """How many tensors of so many bytes no cache holds."""
        return min(COPIES, max(1, round(3 * self.cache_bytes / num_bytes) + 1))


def bandwidths(machine: Machine) -> tuple[float, float]:
    """GB/s of reading a large tensor, and of copying it with both ways counted."""
    one, other = (
        torch.zeros(machine.sizes.tensor_bytes // 4, dtype=torch.float32, device=machine.device)
        for _ in range(2)
    )
    read = machine.timer.us([one.sum])
    copy = machine.timer.us([partial(other.copy_, one)])
    return one.nbytes / read / 1e3, 2 * one.nbytes / copy / 1e3


def cache_bandwidth(machine: Machine) -> float:
    """GB/s of reading what the last cache holds: by the difference of two sizes."""
    sizes = [machine.cache_bytes // 8, machine.cache_bytes // 2]
    tensors = [torch.zeros(n // 4, dtype=torch.float32, device=machine.device) for n in sizes]
    times = [machine.timer.us([tensor.sum]) for tensor in tensors]
    return (sizes[1] - sizes[0]) / max(1e-3, times[1] - times[0]) / 1e3


def linear_us(machine: Machine, layer: Layer, rows: int) -> float:
    """A linear layer over `rows` rows, padded as the engine pads them.

    With its gate only where both are one launch: elsewhere a plan counts the gate as its own.
    """
    outputs, inputs, gated = layer
    weight = machine.normal(outputs, inputs)
    others = (weight.clone() for _ in range(machine.copies(weight.nbytes) - 1))
    layers = [_layer(one) for one in (weight, *others)]
    x = pad_rows(machine.normal(rows, inputs), row_tile(machine.device, machine.dtype))
    joined = gated and machine.is_gpu and takes(rows, outputs, gated)
    gates = joined and plan_of(outputs, inputs, gated=True) is not None
    return machine.timer.us([partial(one.product, x, gates=gates) for one in layers])


def _layer(weight: torch.Tensor) -> Linear:
    with torch.device("meta"):
        layer = Linear({"": weight.shape[0]}, weight.shape[1])
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def linear_layers(machine: Machine) -> tuple[Curve, Curve, Family[Curve], Curve]:
    """Times of one row over bytes; factors of few rows, of a large and small layers; TFLOPS."""
    sizes, large = machine.sizes, machine.sizes.large
    itemsize = machine.dtype.itemsize
    points, factors = [], []
    for layer in sizes.small:
        size = float(layer.outputs * layer.inputs * itemsize)
        one, more = _by_rows(machine.quick, layer, (*FEW_ROWS, *sizes.many_rows))
        points.append((size, one))
        factors.append((size, more))
    for layer in sizes.layers:
        size = float(layer.outputs * layer.inputs * itemsize)
        points.append((size, linear_us(machine, layer, 1)))
    _, few = _by_rows(machine, large, FEW_ROWS)
    work = 2 * large.outputs * large.inputs / 1e6
    flops = [(n, n * work / linear_us(machine, large, n)) for n in sizes.many_rows]
    return curve(points), few, Family(tuple(sorted(factors, key=itemgetter(0)))), curve(flops)


def _by_rows(machine: Machine, layer: Layer, rows: tuple[int, ...]) -> tuple[float, Curve]:
    """A layer's time of one row, and what more rows cost it."""
    one = linear_us(machine, layer, 1)
    found = [(n, max(0.5, linear_us(machine, layer, n) / one)) for n in rows if n > 1]
    return one, curve([(1.0, 1.0), *found])


def routed_experts(machine: Machine) -> tuple[Curve, Curve]:
    """Experts of a layer over bytes of the touched ones; the factor of rows that share them."""
    points, factors = [], [(1.0, 1.0)]
    for count, hidden, size, top_k in machine.sizes.experts:
        weights = (machine.normal(count, 2 * size, hidden), machine.normal(count, hidden, size))
        for rows in FEW_TO_AN_EXPERT:
            points.append(_experts(machine, weights, rows, top_k))
    _, few_us = points[-1]  # the last experts stand for all here
    one = 3 * hidden * size * machine.dtype.itemsize
    for rows in machine.sizes.crowds:
        touched, us = _experts(machine, weights, rows, top_k)
        factors.append((rows * top_k * one / touched, max(1.0, us / few_us)))
    few = max(1.0, FEW_TO_AN_EXPERT[-1] * top_k / count)
    return curve(points), curve([*factors, (few, 1.0)])


def _experts(
    machine: Machine, weights: tuple[torch.Tensor, torch.Tensor], rows: int, top_k: int
) -> tuple[float, float]:
    """(bytes touched, us) of some draws of experts."""
    gate_up, down = weights
    generator = torch.Generator().manual_seed(rows)
    x, calls, touched = machine.normal(rows, down.shape[1]), list[Call](), 0
    shares = torch.full((rows, top_k), 1 / top_k, device=machine.device)
    for _ in range(8):
        scores = torch.rand(rows, gate_up.shape[0], generator=generator)
        ids = scores.topk(top_k, dim=-1).indices
        touched += len(ids.unique())
        calls.append(partial(experts, x, ids.to(machine.device), shares, gate_up, down))
    one = (gate_up[0].numel() + down[0].numel()) * machine.dtype.itemsize
    return touched / len(calls) * one, machine.timer.us(calls)


HEADS = (32, AttentionShape.heads(1, 8, 128), 128)
NARROW = (9, AttentionShape.heads(1, 3, 64), 64)
LATENT = (
    16,
    AttentionShape(
        num_layers=1, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.07, latent=True
    ),
    64,
)
"""Query heads, what is kept of a layer, rotated numbers."""
Kind = tuple[int, AttentionShape, int]


def attention_us(
    machine: Machine,
    kind: Kind,
    batch: int,
    context: int,
    rows: int = 1,
    split: bool = True,
) -> float:
    """Attention of `rows` new rows of each request, kept and rotated on the way, on one layer.

    Without `split` a GPU walks the keys of a KV head in one program.
    """
    heads, shape, rotated = kind
    size = batch * context * shape.values_per_position * machine.dtype.itemsize
    shape = dataclasses.replace(shape, num_layers=machine.copies(max(1, size)))
    pages = -(-(context + rows) // PAGE)
    longest = max(context + rows, machine.sizes.longest)
    pool = KVPool(
        shape,
        num_pages=batch * pages + 1,
        page_size=PAGE,
        dtype=machine.dtype if machine.is_gpu else torch.float32,
        device=machine.device,
    )
    table = torch.zeros(batch, -(-longest // PAGE), dtype=torch.int64, device=machine.device)
    table[:, :pages] = torch.arange(1, batch * pages + 1, device=machine.device).view(batch, pages)
    lengths = torch.full((batch,), context, device=machine.device)
    positions = (lengths[:, None] + torch.arange(rows, device=machine.device)).flatten()
    pass_ = ForwardBatch(
        mode=ForwardMode.DECODE if rows == 1 else ForwardMode.TARGET_VERIFY,
        tokens=torch.zeros_like(positions),
        positions=positions,
        prefix_lens=lengths,
        page_table=table,
        num_new=rows,
        max_kv_len=longest,
    )
    rope = Rotary(RopeConfig(), rotated, longest).to(machine.device)(positions)
    whole = machine.is_gpu and not split
    backend: PagedAttention = TritonAttention(pool, programs=1) if whole else paged_attention(pool)
    attend = backend.begin(pass_)
    widths = ((heads, shape.key_dim), (shape.num_kv_heads, shape.key_dim))
    q, k = (machine.normal(batch * rows, *width) for width in widths)
    v = k[..., : shape.value_dim] if shape.latent else machine.normal(*k.shape)
    layers = range(shape.num_layers)
    return machine.timer.us([partial(attend, layer, q, k, v, rope) for layer in layers])


def attention(machine: Machine, kind: Kind) -> tuple[Times, float]:
    """Times, and TFLOPS reached where arithmetic is the bound: of the most rows and keys."""
    heads, shape, _ = kind
    values, group = shape.values_per_position * KV_BYTES, heads // shape.num_kv_heads
    crowds = [
        (
            float(crowd.requests * shape.num_kv_heads),
            _of_a_crowd(machine, kind, crowd, values, group),
        )
        for crowd in machine.sizes.attention
    ]
    times, last = Family(tuple(crowds)), machine.sizes.attention[-1]
    batch, rows, context = last.requests, last.nodes[-1], last.contexts[-1]
    walks = batch * shape.num_kv_heads
    us = times(walks, rows * group, batch * context * values)
    flops = 2 * batch * heads * rows * context * (shape.key_dim + shape.value_dim)
    return times, flops / max(1e-3, us - min(times(walks, 0, 0), us / 2)) / 1e6


def _of_a_crowd(
    machine: Machine, kind: Kind, crowd: Crowd, values: int, group: int
) -> Family[Curve]:
    """Times over rows side by side, over bytes; a position has `values` bytes."""

    def over_bytes(nodes: int) -> Curve:
        batch = crowd.requests
        return curve(
            (batch * n * values, attention_us(machine.quick, kind, batch, n, nodes))
            for n in crowd.contexts
        )

    return Family(tuple((float(nodes * group), over_bytes(nodes)) for nodes in crowd.nodes))


def small_kernels(machine: Machine) -> float:
    """Mean of a norm with its residual and of a gate, over one row."""
    with torch.device("meta"):
        norm = RMSNorm(4096, 1e-5)
    norm.weight = nn.Parameter(machine.normal(4096), requires_grad=False)
    x, wide = machine.normal(1, 4096), machine.normal(1, 2 * 4096)
    times = [machine.timer.us([partial(norm.add, x, x)]), machine.timer.us([partial(gated, wide)])]
    return sum(times) / 2


def sampling(machine: Machine) -> Curve:
    """The greatest score of four rows, over the vocabulary."""
    number = torch.zeros(4, device=machine.device)
    whole = number.long()
    rows = SamplingRows(temperature=number, top_k=whole, top_p=number, min_p=number, seed=whole)
    points = []
    for size in machine.sizes.vocabularies:
        scores = machine.normal(4, size)
        call = partial(draw, scores, rows, whole, sampled=False, filtered=False)
        points.append((size, machine.timer.us([call])))
    return curve(points)


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The points in order, those of one x as their mean."""
    found: dict[float, list[float]] = {}
    for x, y in points:
        found.setdefault(float(x), []).append(y)
    return Curve(tuple((x, sum(ys) / len(ys)) for x, ys in sorted(found.items())))
