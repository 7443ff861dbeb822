"""Where the keys lie that each node of a tree sees, in the order of its path.

With them a node's keys are read as if its path stood in the text: see `Plan.tree` RANKS. What
attends is not known here.
"""

from __future__ import annotations

import torch

from eyas.batch import ForwardBatch
from eyas.kernels.kv_write import PASS_VALUES
from eyas.kernels.lang import take_turn, tl, triton, turns
from eyas.kernels.splits import set_bits


@triton.jit(do_not_specialize=PASS_VALUES)
def _attention_order_kernel(  # type: ignore[no-untyped-def]
    order_ptr, bits_ptr, prefix_ptr, table_ptr, num_new, table_stride, table_width,
    PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row): flat positions int64[64] of its visible tail keys, those in front."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    request = row // num_new
    place = tl.arange(0, 64)
    bits = tl.load(bits_ptr + row)
    one = tl.full([64], 1, tl.int64)
    rank = set_bits(bits & ((one << place) - 1))
    index = tl.load(prefix_ptr + request) + place
    seen = ((bits >> place) & 1) != 0
    inside = seen & (index // PAGE < table_width)
    page = tl.load(table_ptr + request * table_stride + index // PAGE, inside, 0)
    tl.store(order_ptr + row * 64 + rank, page * PAGE + index % PAGE, seen)


def node_orders(batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """Flat positions int64[T, 64] of each row's visible tail keys, in order; the rest is unset."""
    assert batch.ancestors is not None, "a causal tail is in order"
    out = torch.empty(batch.ancestors.shape[0], 64, dtype=torch.int64, device=batch.tokens.device)
    _attention_order_kernel[(out.shape[0],)](
        out,
        batch.ancestors,
        batch.prefix_lens,
        batch.page_table,
        batch.num_new,
        batch.page_table.stride(0),
        batch.page_table.shape[1],
        PAGE=page_size,
        num_warps=1,
        **turns(out),
    )
    return out
