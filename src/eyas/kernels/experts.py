"""The routed experts of a layer: every row through the experts chosen for it, summed by weight.

Ways with one signature. `experts_reference` gathers each chosen expert's weights: static shapes, no
host read, any device and type; the oracle. On a CPU an operator takes expert after expert; a GPU
takes the kernels of `experts_triton.py` for few rows, and torch's grouped product for many where
its type and dimensions suit it. All sum a row's experts in the order they were chosen, in float32,
and round once. Which experts there are, and why, is not known here.

Always holds on a CPU: a row's bits do not depend on the other rows, since an expert's rows are
padded to a tile; in float32 products have exactly that many rows.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from eyas.kernels.calls import in_calls
from eyas.kernels.experts_triton import Lists, Shared, experts_triton, shared_reference, suits
from eyas.kernels.lang import runs_kernels
from eyas.kernels.terms import Delta, Terms, sum_reference

ROW_TILE = 4
"""On a CPU an expert's rows are padded to a multiple of this; see `eyas.layers.linear.row_tile`.

MKL's float32 product of a multiple is not everywhere that of its tiles: on some processors sums
were added in another order from 8 rows on, or from 24. So in float32 every tile is its own product.
"""
GATHERED_BYTES = 2**28
"""The reference gathers weights of about this size at a time."""
GROUPED_ALIGNMENT = 8
"""torch's grouped product wants rows of a multiple of 16 bytes."""


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    shared: Shared | None = None,
    lists: Lists | None = None,
    fixed_rows: int = 0,
) -> Delta:
    """`sum_k weights[t, k] * expert_ids[t, k](x[t])` by the way that suits device and type.

    x [T, H] in the model's dtype, ids int64[T, K] all different in a row, weights float32[T, K],
    gate_up [E, 2 * I, H] (gates first) and down [E, H, I] in x's dtype. An expert is
    `down @ (silu(gate @ x) * (up @ x))`. Returns [T, H] in x's dtype, our kernels as terms; what
    the expert `shared` gives is added to the rounded sum. `lists` are those of `ids`, if they
    exist. With `fixed_rows` the way is the same for any number of rows: on a GPU the kernels',
    elsewhere the shared expert takes so many rows a call. Reads nothing on the host.
    """
    if fixed_rows and runs_kernels(x):
        run = partial(experts_triton, shared=shared, lists=lists, shared_rows=x.shape[0])
        return run(x, ids, weights, gate_up, down)
    if suits(x, ids, gate_up):
        return experts_triton(x, ids, weights, gate_up, down, shared=shared, lists=lists)
    if x.device.type == "cpu":
        y = torch.ops.eyas.experts_cpu(x, ids, weights, gate_up, down)
    elif _grouped_suits(x, down):
        y = experts_grouped(x, ids, weights, gate_up, down)
    else:
        y = experts_reference(x, ids, weights, gate_up, down)
    if shared is None:
        return y
    return y + in_calls(x, fixed_rows, partial(shared_reference, shared=shared))


def experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See `experts`: each pair of a row and an expert on its own, with gathered weights."""
    pairs, rows = ids.flatten(), x.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
    step = max(1, GATHERED_BYTES // (3 * down[0].numel() * down.element_size()))
    parts = []
    for start in range(0, pairs.shape[0], step):
        chosen = pairs[start : start + step]
        gate, up = torch.bmm(gate_up[chosen], rows[start : start + step]).chunk(2, dim=1)
        parts.append(torch.bmm(down[chosen], F.silu(gate) * up).squeeze(-1))
    return sum_reference(Terms(torch.cat(parts), weights))


def experts_grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See `experts`: pairs sorted by expert, two grouped products over all of them."""
    order = ids.flatten().argsort(stable=True)
    every = torch.arange(down.shape[0], device=ids.device)
    ends = torch.searchsorted(ids.flatten()[order], every, right=True).int()
    rows = x[order // ids.shape[1]]
    gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=1)
    out = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    return sum_reference(Terms(torch.empty_like(out).index_copy_(0, order, out), weights))


def _grouped_suits(x: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether torch's grouped product runs here without reading the groups on the host."""
    major, _ = torch.cuda.get_device_capability(x.device)
    aligned = all(size % GROUPED_ALIGNMENT == 0 for size in down.shape[1:])
    return major in (9, 10) and x.dtype == torch.bfloat16 and aligned


@torch.library.custom_op(
    "eyas::experts_cpu",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down) -> Tensor",
)
def _experts_cpu(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See `experts`: expert after expert, each over its rows, padded to the row tile.

    One operator, since it counts rows on the host, which costs nothing on a CPU. A row of zeros, as
    padding is, gives zeros without waking an expert.
    """
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    used = (x != 0).any(1, keepdim=True)
    expert, order = torch.where(used, ids, num_experts).flatten().sort(stable=True)
    counts = torch.bincount(expert, minlength=num_experts + 1)
    tiles = (counts + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends = tiles.cumsum(0)
    place = torch.arange(len(order)) + (ends - tiles - counts.cumsum(0) + counts)[expert]
    rows = x.new_zeros(int(ends[-1]), x.shape[1]).index_copy_(0, place, x[order // top_k])
    most = ROW_TILE if x.dtype == torch.float32 else max(len(rows), 1)
    spans, start = [], 0
    for number, end in enumerate(ends[:-1].tolist()):
        spans += [(number, slice(at, min(at + most, end))) for at in range(start, end, most)]
        start = end
    wide, out = rows.new_empty(len(rows), gate_up.shape[1]), torch.zeros_like(rows)
    into_wide, into_out = gate_up.mT, down.mT
    for number, span in spans:
        torch.mm(rows[span], into_wide[number], out=wide[span])
    gate, up = wide[:start].chunk(2, dim=1)
    hidden = F.silu(gate) * up
    for number, span in spans:
        torch.mm(hidden[span], into_out[number], out=out[span])
    pairs = out[torch.empty_like(place).index_copy_(0, order, place)]
    return sum_reference(Terms(pairs, weights))
