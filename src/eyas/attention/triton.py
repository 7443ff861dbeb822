"""Paged attention by our Triton kernels: what a GPU runs.

One launch a layer rotates, keeps and attends where a pass has few rows; see the kernels for how
work is cut. A pass prepares nothing that depends on lengths, so it can be captured in a graph.
"""

from __future__ import annotations

import torch

from eyas.attention.rope import Rope
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kernels.attention_plan import (
    CAUSAL,
    MASKED,
    RANKS,
    USUAL_BYTES,
    Plan,
    Workspace,
    make_plan,
    most_splits,
)
from eyas.kernels.kv_write import Layout, write_kv
from eyas.kernels.lang import shared_bytes
from eyas.kernels.node_orders import node_orders
from eyas.kernels.paged_attention import paged_attention
from eyas.kv.pool import KVPool


class TritonAttention:
    """Reads pages where they lie; see `eyas.kernels.paged_attention`."""

    needs_bound = False

    def __init__(
        self,
        pool: KVPool,
        *,
        deterministic: bool = True,
        verify: str = "decode",
        programs: int | None = None,
        splits: int | None = None,
        workspace_bytes: int = USUAL_BYTES,
    ) -> None:
        """With `deterministic` a node of a tree has the bits of its path alone, at some cost.

        With `verify` "prefill" no keys of a verify pass are shared among programs.
        `programs` fill the device: two for each of its multiprocessors unless told. `splits` are
        those of a row at most; rows of engines with different ones differ in their last bits.
        `workspace_bytes` are for what programs leave each other.
        """
        self.pool, self.deterministic = pool, deterministic
        device = pool.k.device
        if programs is None:
            programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self.programs, self.whole = programs, verify == "prefill"
        self.splits = splits
        self.layout = Layout(shape=pool.shape, page_size=pool.page_size)
        self.workspace = Workspace.of(pool.shape, pool.k.dtype, device, workspace_bytes)

    def programs_for(self, mode: ForwardMode) -> int:
        """Programs that a pass may use to share a request's keys; 1: they are not shared."""
        return 1 if self.whole and mode is ForwardMode.TARGET_VERIFY else self.programs

    def begin(self, batch: ForwardBatch) -> TritonPass:
        """Prepare a pass over `batch`; only a tree's order takes a launch."""
        tree = CAUSAL if batch.ancestors is None else RANKS if self.deterministic else MASKED
        order = node_orders(batch, self.pool.page_size) if tree == RANKS else None
        return TritonPass(self, batch, tree, order)


class TritonPass:
    """One pass over a batch."""

    def __init__(
        self, backend: TritonAttention, batch: ForwardBatch, tree: int, order: torch.Tensor | None
    ) -> None:
        """`order` int64[T, 64] are the tail's positions by rank, for `tree` RANKS."""
        self.backend, self.batch, self.tree, self.order = backend, batch, tree, order
        self._plan: Plan | None = None

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """See `Attend`."""
        backend, batch = self.backend, self.batch
        pool, layout = backend.pool, backend.layout
        num_rows, heads = batch.prefix_lens.shape[0] * batch.num_new, q.shape[1]
        self._plan = plan = self._plan or self._cut(heads // pool.shape.num_kv_heads)
        pooled = (pool.k[layer], pool.v[layer])
        if not plan.write:
            write_kv(k, v, layout, *pooled, batch, rope)
        out = v.new_empty(q.shape[0], heads * pool.shape.value_dim)
        out[num_rows:].zero_()
        paged_attention(
            q,
            (k, v),
            pooled,
            layout,
            batch,
            rope,
            plan,
            backend.workspace,
            pool.shape.window(layer),
            self.order,
            out,
        )
        return out

    def _cut(self, group: int) -> Plan:
        """The pass into programs, with `group` query heads for each KV head."""
        backend, batch = self.backend, self.batch
        pool = backend.pool
        return make_plan(
            backend.layout,
            pool.k.dtype,
            group,
            batch.prefix_lens.shape[0],
            batch.num_new,
            self.tree,
            backend.splits or most_splits(pool.shape, group),
            backend.programs_for(batch.mode),
            backend.workspace,
            batch.max_kv_len,
            shared_bytes(pool.k.device),
        )
