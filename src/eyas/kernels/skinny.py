"""Linear layers of few rows, gates behind them in the same launch.

A decode or verify pass has few rows: its linear layers read weights and do little else. Where a
weight has a plan (`skinny_plan.py`) and rows are few, the kernel of `skinny_triton.py` runs them,
else torch's operators, which are also the oracle. Roundings stand where torch's operators have
them: the product, the silu and the gated product are each rounded to the rows' dtype. Sums are
float32. A norm in the same launch was slower than one of its own (docs/performance.md).

Always holds: the choice follows from device, dtype and shapes alone. A row's bits do not depend on
the other rows, as long as the kernel takes them (`takes`) or the library keeps that too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.gated import gated
from eyas.kernels.skinny_plan import MOST_ROWS, of_rows, plan_of, serves, takes
from eyas.kernels.skinny_triton import Plan, counted, run


class Counters:
    """Where the programs that share a tile of a layer's outputs count themselves.

    Zeros between launches. A layer owns one, so no launch of another layer can count there.
    """

    def __init__(self) -> None:
        self._zeros: torch.Tensor | None = None

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """int32[count] on `device`; made at the first use, and kept: graphs know its address."""
        if self._zeros is None or self._zeros.device != device:
            self._zeros = torch.zeros(count, dtype=torch.int32, device=device)
        assert self._zeros.shape[0] == count, "a layer's plan changed"
        return self._zeros


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counters: Counters
) -> torch.Tensor:
    """`x[..., K] @ weight[N, K].T (+ bias[N])`: [..., N]."""
    plan = _plan(x, weight, gates=False)
    if plan is None:
        return F.linear(x, weight, bias)
    return _launch(x, weight, plan, counters, bias=bias)


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counters: Counters
) -> torch.Tensor:
    """`silu(gate) * up` of `linear`, whose outputs are gates first: [..., N / 2]."""
    plan = _plan(x, weight, gates=True)
    if plan is None:
        return gated(F.linear(x, weight, bias))
    return _launch(x, weight, plan, counters, bias=bias, gates=True)


def _plan(x: torch.Tensor, weight: torch.Tensor, gates: bool) -> Plan | None:
    """How the kernel runs this, if it does."""
    outputs, inputs = weight.shape
    num_rows = x.numel() // inputs
    if not serves(x) or not takes(num_rows, outputs, gates):
        return None
    plan = plan_of(outputs, inputs, gates)
    return None if plan is None else of_rows(plan, num_rows)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    counters: Counters,
    *,
    bias: torch.Tensor | None = None,
    gates: bool = False,
) -> torch.Tensor:
    """`run` of rows of any leading shape."""
    rows = x.reshape(-1, x.shape[-1])
    count = counted(plan, MOST_ROWS, weight.shape[0])  # those that split take no more rows
    counts = counters.zeros(count, x.device) if count else None
    y = run(rows, weight, plan, bias=bias, gated=gates, counts=counts)
    return y.view(*x.shape[:-1], -1)


def cost(rows: int, outputs: int, inputs: int) -> tuple[int, int]:
    """(FLOPs, bytes) of a weight and rows of 16 bits."""
    flops = 2 * rows * outputs * inputs
    return flops, 2 * (outputs * inputs + rows * (outputs + inputs))
