"""RMSNorm, gated MLP and self-attention around a backend.

Self-attention does not know how keys and values are kept: it hands queries, keys, values and the
rotary tables to the `Attend` of the pass (paged cache, dense training batch, ...).
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.attention import Attend
from eyas.attention.rope import Rope
from eyas.distributed.group import SOLO, Group
from eyas.kernels.norm import Norm, add_rms_norm, rms_norm
from eyas.kernels.norm_parts import norm_parts
from eyas.kernels.terms import Delta
from eyas.layers.linear import ColumnParallel, Places, RowParallel, share_of, whole


class RMSNorm(nn.Module):
    """Llama's RMSNorm: statistics in float32, cast, then times the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`, same dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: Delta) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward(x + delta)`, `x + delta`) of `[..., size]`, in one pass over them."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    def of(self, delta: Delta | None) -> Norm:
        """This norm for a layer that norms its own rows, after `delta` [..., size] was added."""
        return Norm(weight=self.weight, eps=self.eps, delta=delta)


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        prefix: str,
        bias: bool = False,
        group: Group = SOLO,
    ) -> None:
        super().__init__()
        halves = {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}
        self.gate_up = ColumnParallel(halves, hidden, bias, group)
        self.down = RowParallel(f"{prefix}.down_proj", hidden, intermediate, bias, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., E] -> [..., E]`."""
        return self.down(self.gate_up.gated(x))

    def normed(self, x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of the normed rows, the rows before their norm), [..., E] each."""
        hidden, x = self.gate_up.normed(x, norm, gates=True)
        return self.down(hidden), x

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        return self.gate_up.places() | self.down.places()


class SelfAttention(nn.Module):
    """Grouped-query attention; `in_features` differs from `hidden` in an EAGLE-3 layer."""

    def __init__(
        self,
        layer: int,
        prefix: str,
        in_features: int,
        hidden: int,
        heads: tuple[int, int, int],
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norm_eps: float | None = None,
        group: Group = SOLO,
    ) -> None:
        """`heads` is (query heads, KV heads, head dim) of the whole network.

        With `norm_eps` query and key heads are normed before the rotary embedding.
        """
        super().__init__()
        self.layer = layer
        num_heads, num_kv_heads, self.head_dim = heads
        self.num_heads = share_of(num_heads, group, "the query heads")
        self.num_kv_heads = share_of(num_kv_heads, group, "the KV heads")
        q, kv = num_heads * self.head_dim, num_kv_heads * self.head_dim
        parts = {f"{prefix}.q_proj": q, f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv}
        self.qkv = ColumnParallel(parts, in_features, qkv_bias, group)
        self.prefix = prefix
        self.q_norm = None if norm_eps is None else RMSNorm(self.head_dim, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(self.head_dim, norm_eps)
        self.o = RowParallel(f"{prefix}.o_proj", hidden, q, o_bias, group)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """`[..., in_features] -> [..., hidden]`."""
        return self._mix(self.qkv(x), rope, attend)

    def normed(
        self, x: torch.Tensor, norm: Norm, rope: Rope, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of the normed rows, the rows before their norm)."""
        projected, x = self.qkv.normed(x, norm)
        return self._mix(projected, rope, attend), x

    def _mix(self, projected: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """Attention among queries, keys and values, and the way out."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        qk, v = heads.tensor_split((self.num_heads + self.num_kv_heads,), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            weights = (self.q_norm.weight, self.k_norm.weight)
            qk = norm_parts(qk, weights, self.num_heads, self.q_norm.eps)
        q, k = qk.tensor_split((self.num_heads,), dim=-2)
        return self.o(attend(self.layer, q, k, v, rope))

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        places = self.qkv.places() | self.o.places()
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                places[f"{self.prefix}.{name}.weight"] = whole(norm.weight)
        return places
