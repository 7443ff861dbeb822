"""Linear layers of few rows with 8-bit weights: two planes of bytes stand for a token row.

Converting weights to 16 bits would take longer than reading them. Instead each token row becomes
16-bit integers times one unit, and each integer a high and a low byte: integers are multiplied with
integers, twice, and the two sums put together. A row loses 1.5e-5 of its largest number at most,
its weights nothing. On a CPU torch's operator for 8-bit weights takes the rows as they are.

Always holds: sums are exact, so a row's bits depend neither on how a weight is cut nor on the other
rows. Roundings stand where torch's operators have them: the product with its bias, the silu and the
gated product are each rounded to the rows' dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.gated import gated, gated_reference
from eyas.kernels.lang import runs_kernels
from eyas.kernels.norm import Norm
from eyas.kernels.planes_triton import LARGEST, ROWS, counted, planes_triton, run
from eyas.kernels.skinny import Counters
from eyas.kernels.skinny_triton import Plan

MOST_ROWS_8_BIT = ROWS[-1]
"""Rows of a pass from which on it multiplies more than it reads."""
SMALL = 8 << 20
"""Weights of less bytes are read by many programs of few outputs."""
FILLING = 264
"""Programs that an H200 runs at once: two a multiprocessor."""
ROOM_ROWS = 16
"""Rows up to which there is room for two."""


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: Counters,
    gates: bool = False,
) -> torch.Tensor:
    """`x[..., K] @ (scales[:, None] * weight[N, K]).T (+ bias)`: [..., N].

    With `gates`, whose outputs come first, `silu(gate) * up` of that: [..., N / 2]. The weight is
    int8; scales [N] are float32, on a CPU bfloat16 as x is.
    """
    if runs_kernels(x):
        return _launch(x, None, weight, scales, bias, counters, gates)[0]
    if x.device.type == "cpu":
        y = torch._weight_int8pack_mm(x, weight, scales)
        y = y if bias is None else y + bias
        return gated(y) if gates else y
    return int8_linear_reference(x, weight, scales, bias, gates)


def int8_norm_linear(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: Counters,
    gates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`int8_linear` of the normed rows, `x (+ norm.delta)` [..., K]).

    One launch norms rows and cuts them in planes.
    """
    if runs_kernels(x):
        return _launch(x, norm, weight, scales, bias, counters, gates)
    normed, x = norm(x)
    return int8_linear(normed, weight, scales, bias, counters, gates), x


def planes_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as (planes int8[2 * T, K], units float32[T]).

    Lines 2 * t and 2 * t + 1 of the planes are the high and the low bytes of row t, which is
    `units[t] * (256 * high + low)`. The largest number of a row becomes `LARGEST`; a row with one
    that is not finite has no finite unit, so that it gives none.
    """
    wide = x.to(torch.float32)
    most = torch.where(wide.isnan(), torch.inf, wide.abs()).amax(-1)
    scale = most.clamp(min=1e-30).reciprocal() * LARGEST
    whole = (wide * scale[:, None] + 0.5).floor().to(torch.int32)
    high = (whole + 128) >> 8
    planes = torch.stack((high, whole - high * 256), 1).to(torch.int8)
    return planes.flatten(0, 1), most * (1 / LARGEST)


def int8_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    gates: bool = False,
) -> torch.Tensor:
    """See `int8_linear`; float64 holds every sum of integers exactly."""
    planes, units = planes_reference(x.reshape(-1, x.shape[-1]))
    high, low = F.linear(planes.double(), weight.double()).unflatten(0, (-1, 2)).unbind(1)
    y = (256 * high + low) * units[:, None] * scales
    y = (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], -1)
    return gated_reference(y) if gates else y


def config(outputs: int, inputs: int, gated: bool = False, num_rows: int = 1) -> Plan:
    """How a weight [outputs, inputs] is cut, by `benchmarks/skinny.py --layers int8` on an H200.

    Tiles of a program hold 48 to 96 KB of weights on their way, so that two or more programs run on
    a multiprocessor, and all of them at once. Planes of more than `ROOM_ROWS` rows take as much
    again, so that there is room for one.
    """
    if outputs * inputs < SMALL:
        return Plan(outputs=32 if gated else 16, depth=128, groups=4, stages=4)
    if num_rows > ROOM_ROWS:
        if outputs > 64 * FILLING:
            return Plan(outputs=128, depth=128, warps=8, stages=4)
        splits = 2 if not gated and outputs <= 64 * (FILLING // 4) and inputs >= 2048 else 1
        return Plan(outputs=64, depth=128 * splits, splits=splits, stages=8 // splits)
    if outputs > 64 * FILLING:
        return Plan(outputs=64, depth=256, stages=3 if gated else 4)
    if gated:
        return Plan(outputs=128 if outputs > 64 * FILLING // 2 else 64, depth=256, stages=4)
    splits = max(1, min(2, FILLING // -(-outputs // 64), inputs // 1024))
    return Plan(outputs=64, depth=256, splits=splits, stages=4)


def _launch(
    x: torch.Tensor,
    norm: Norm | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    counters: Counters,
    gates: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `int8_norm_linear`; without a norm x is as it was."""
    planes, units, total = planes_triton(x.reshape(-1, x.shape[-1]), norm)
    plan = config(weight.shape[0], weight.shape[1], gates, planes.shape[0] // 2)
    count = counted(plan, weight.shape[0])
    counts = counters.zeros(count, x.device) if count else None
    y = run(planes, units, weight, scales, plan, x.dtype, bias=bias, gated=gates, counts=counts)
    return y.view(*x.shape[:-1], -1), total.view(x.shape)


def cost(rows: int, outputs: int, inputs: int) -> tuple[int, int]:
    """(operations, bytes) of the product of `rows` rows in planes, and of making them."""
    operations = 2 * (2 * rows) * outputs * inputs
    made = rows * inputs * (2 + 2)
    return operations, outputs * inputs + made + 2 * rows * (inputs + outputs)
