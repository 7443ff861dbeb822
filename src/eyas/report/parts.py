"""Parts of a pass, measured one by one: memory, linear layers, experts, attention, small kernels.

They run through the engine's own layers and kernels, with weights and keys that no cache holds.
What a part is used for is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from eyas.attention import PagedAttention, paged_attention
from eyas.attention.triton import TritonAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.hardware import Curve
from eyas.kernels.draw import draw
from eyas.kernels.experts import experts
from eyas.kernels.gated import gated
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
COPIES = 48
"""Copies of weights at most, so that none is in a cache when its turn comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: shapes as models have them, on a device that takes them quickly."""

    tensor_bytes: int
    """Of what memory's bandwidth is measured on."""
    layers: tuple[tuple[int, int], ...]
    """Outputs and inputs of linear layers."""
    large: tuple[int, int]
    """The layer whose rows are many."""
    many_rows: tuple[int, ...]
    small: tuple[int, int]
    """The layer that stands for small ones."""
    experts: tuple[tuple[int, int, int, int], ...]
    """Experts, hidden size, intermediate size of one, experts a row."""
    contexts: tuple[tuple[int, int], ...]
    """Requests and their committed positions."""
    crowds: tuple[int, ...]
    """Rows whose experts are many to each."""
    arithmetic: tuple[int, int, int]
    """Requests, rows of each and positions where arithmetic bounds attention."""
    vocabularies: tuple[int, ...] = (32_000, 49_152, 128_256)


CPU_SIZES = Sizes(
    tensor_bytes=2**26,
    layers=(
        (576, 576),
        (960, 576),
        (3072, 576),
        (2048, 2048),
        (3648, 2048),
        (4096, 4096),
        (6144, 4096),
    ),
    large=(4096, 4096),
    many_rows=(128, 256),
    small=(960, 576),
    experts=((16, 512, 256, 4),),
    contexts=((1, 64), (1, 256), (1, 1024), (4, 256)),
    crowds=(64,),
    arithmetic=(1, 16, 256),
)
GPU_SIZES = Sizes(
    tensor_bytes=2**31,
    layers=(*CPU_SIZES.layers, (4096, 14_336), (28_672, 4096), (128_256, 4096)),
    large=(28_672, 4096),
    many_rows=(128, 256, 512, 1024, 2048),
    small=(3072, 576),
    experts=((64, 2048, 352, 6), (64, 2048, 1408, 6)),
    contexts=((1, 64), (1, 256), (1, 1024), (1, 8192), (1, 32_768), (8, 1024), (8, 8192)),
    crowds=(64, 128, 256, 512),
    arithmetic=(8, 16, 4096),
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


def linear_us(machine: Machine, outputs: int, inputs: int, rows: int) -> float:
    """A linear layer over `rows` rows, padded as the engine pads them."""
    size = outputs * inputs * machine.dtype.itemsize
    weight = machine.normal(outputs, inputs)
    others = (weight.clone() for _ in range(machine.copies(size) - 1))
    layers = [_layer(one) for one in (weight, *others)]
    x = pad_rows(machine.normal(rows, inputs), row_tile(machine.device, machine.dtype))
    return machine.timer.us([partial(layer, x) for layer in layers])


def _layer(weight: torch.Tensor) -> Linear:
    with torch.device("meta"):
        layer = Linear({"": weight.shape[0]}, weight.shape[1])
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def linear_layers(machine: Machine) -> tuple[Curve, Curve, Curve, Curve]:
    """Times of one row over bytes; factors of few rows, of a large and a small layer; TFLOPS."""
    sizes, large = machine.sizes, machine.sizes.large
    points = [
        (outputs * inputs * machine.dtype.itemsize, linear_us(machine, outputs, inputs, 1))
        for outputs, inputs in sizes.layers
    ]
    few = _factors(machine, large, FEW_ROWS)
    work = 2 * large[0] * large[1] / 1e6
    flops = [(n, n * work / linear_us(machine, *large, n)) for n in sizes.many_rows]
    small = _factors(machine, sizes.small, (*FEW_ROWS, *sizes.many_rows))
    return curve(points), few, small, curve(flops)


def _factors(machine: Machine, layer: tuple[int, int], rows: tuple[int, ...]) -> Curve:
    """What more rows cost a layer."""
    one = linear_us(machine, *layer, 1)
    found = [(n, max(0.5, linear_us(machine, *layer, n) / one)) for n in rows if n > 1]
    return curve([(1.0, 1.0), *found])


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
    pool = KVPool(
        shape,
        num_pages=batch * pages + 1,
        page_size=PAGE,
        dtype=machine.dtype if machine.is_gpu else torch.float32,
        device=machine.device,
    )
    table = torch.arange(1, batch * pages + 1, device=machine.device).view(batch, pages)
    lengths = torch.full((batch,), context, device=machine.device)
    positions = (lengths[:, None] + torch.arange(rows, device=machine.device)).flatten()
    pass_ = ForwardBatch(
        mode=ForwardMode.DECODE if rows == 1 else ForwardMode.TARGET_VERIFY,
        tokens=torch.zeros_like(positions),
        positions=positions,
        prefix_lens=lengths,
        page_table=table,
        num_new=rows,
        max_kv_len=context + rows,
    )
    rope = Rotary(RopeConfig(), rotated, context + rows).to(machine.device)(positions)
    whole = machine.is_gpu and not split
    backend: PagedAttention = TritonAttention(pool, programs=1) if whole else paged_attention(pool)
    attend = backend.begin(pass_)
    widths = ((heads, shape.key_dim), (shape.num_kv_heads, shape.key_dim))
    q, k = (machine.normal(batch * rows, *width) for width in widths)
    v = k[..., : shape.value_dim] if shape.latent else machine.normal(*k.shape)
    layers = range(shape.num_layers)
    return machine.timer.us([partial(attend, layer, q, k, v, rope) for layer in layers])


def attention(machine: Machine, kind: Kind) -> Curve:
    """Times of one row a request over bytes of keys and values."""
    values = kind[1].values_per_position * KV_BYTES
    cases = machine.sizes.contexts
    return curve((b * n * values, attention_us(machine, kind, b, n)) for b, n in cases)


def attention_tflops(machine: Machine, kind: Kind, base_us: float) -> float:
    """Reached where arithmetic is the bound: many rows. `base_us` is what few keys take."""
    batch, rows, context = machine.sizes.arithmetic
    heads, shape, _ = kind
    flops = 2 * batch * heads * rows * context * (shape.key_dim + shape.value_dim)
    us = attention_us(machine, kind, batch, context, rows)
    return flops / max(1e-3, us - min(base_us, us / 2)) / 1e6


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
