"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A position keeps one latent and one rotary key for all heads. Keys are never made per head: the
matrix that would make them is multiplied into the queries, and the one of the values is applied to
what attention returns. So attention sees one KV head, whose key is the normed latent with the
rotary key behind it, and whose value is that latent. It knows neither pages nor how rotary pairs
lie in a checkpoint: loading brings them into half-split order.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from eyas.attention import Attend
from eyas.attention.rope import Rope
from eyas.distributed.group import SOLO, Group
from eyas.kernels.absorb import Latents, absorb, head_product
from eyas.kernels.norm import Norm
from eyas.layers.basic import RMSNorm
from eyas.layers.linear import (
    ColumnParallel,
    Linear,
    Place,
    Places,
    Products,
    RowParallel,
    share_of,
    whole,
)
from eyas.model_config import MLAConfig


class MLA(Products):
    """Latent attention; ranks share heads, and each holds the whole way down to the latents."""

    def __init__(
        self,
        layer: int,
        prefix: str,
        in_features: int,
        hidden: int,
        num_heads: int,
        mla: MLAConfig,
        group: Group = SOLO,
    ) -> None:
        """`num_heads` of the whole network; `in_features` differs from `hidden` in a drafter."""
        super().__init__()
        self.layer, self.prefix, self.mla, self.group = layer, prefix, mla, group
        self.num_heads = share_of(num_heads, group, "the query heads")
        latent, head = mla.kv_lora_rank, mla.nope_dim + mla.rope_dim
        self.first = mla.q_lora_rank or self.num_heads * head
        first = "q_a_proj" if mla.q_lora_rank else "q_proj"
        rows = {first: self.first, "kv_a_proj_with_mqa": latent + mla.rope_dim}
        self.down = Linear({f"{prefix}.{name}": n for name, n in rows.items()}, in_features)
        self.q_norm = RMSNorm(mla.q_lora_rank, mla.norm_eps) if mla.q_lora_rank else None
        self.q_up: ColumnParallel | None = None
        if mla.q_lora_rank:
            parts = {f"{prefix}.q_b_proj": num_heads * head}
            self.q_up = ColumnParallel(parts, mla.q_lora_rank, group=group)
        self.kv_norm = RMSNorm(latent, mla.norm_eps)
        self.kv_up = nn.Parameter(torch.empty(self.num_heads, mla.nope_dim + mla.value_dim, latent))
        width = num_heads * mla.value_dim
        self.o = RowParallel(f"{prefix}.o_proj", hidden, width, False, group)

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """`[T, in_features] -> [T, hidden]`."""
        return self._mix(self.down(x), rope, attend)

    def normed(
        self, x: torch.Tensor, norm: Norm, rope: Rope, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward` of the normed rows, the rows before their norm)."""
        projected, x = self.down.normed(x, norm)
        return self._mix(projected, rope, attend), x

    def _mix(self, projected: torch.Tensor, rope: Rope, attend: Attend) -> torch.Tensor:
        """Attention among what `down` gave, and the way out."""
        mla = self.mla
        q, kept = projected.split((self.first, mla.kv_lora_rank + mla.rope_dim), dim=-1)
        if self.q_up is not None and self.q_norm is not None:
            q, _ = self.q_up.normed(q, self.q_norm.of(None))
        q, k = self.absorb(q.unflatten(-1, (self.num_heads, -1)), kept)
        return self.o(self.values(attend(self.layer, q, k, k[..., : mla.kv_lora_rank], rope)))

    def absorb(self, q: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, latent + rope] as they meet latents, keys [T, 1, latent + rope].

        Of q [T, H, nope + rope] and `kept` [T, latent + rope] as projected.
        """
        plain, turned = q.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        made = self.kv_up[:, : self.mla.nope_dim]
        latents = Latents(kept, self.kv_norm.of(None))
        queries, keys = absorb(plain, made, turned, latents, fixed=self.call_rows > 0)
        return queries, keys[:, None]

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Heads' values [T, H * value_dim] of what attention gave, [T, H * latent]."""
        heads = out.unflatten(-1, (self.num_heads, -1))
        made = self.kv_up[:, self.mla.nope_dim :].mT
        return head_product(heads, made, fixed=self.call_rows > 0).flatten(1)

    def places(self) -> Places:
        """Checkpoint tensor name -> the place of this rank's share; rotary rows half-split."""
        mla, name = self.mla, f"{self.prefix}."
        places = self.down.places() | self.o.places()
        if self.q_up is not None and self.q_norm is not None:
            places |= self.q_up.places()
            places[f"{name}q_a_layernorm.weight"] = whole(self.q_norm.weight)
        else:
            places[f"{name}q_proj.weight"] = self._of_heads(places[f"{name}q_proj.weight"].into)
        places[f"{name}kv_a_layernorm.weight"] = whole(self.kv_norm.weight)
        places[f"{name}kv_b_proj.weight"] = self._of_heads(self.kv_up.detach().flatten(0, 1))
        if mla.interleaved:
            query = f"{name}{'q_b_proj' if mla.q_lora_rank else 'q_proj'}.weight"
            orders = {
                query: half_split(self.num_heads, mla.nope_dim, mla.rope_dim),
                f"{name}kv_a_proj_with_mqa.weight": half_split(1, mla.kv_lora_rank, mla.rope_dim),
            }
            places |= {n: dataclasses.replace(places[n], order=o) for n, o in orders.items()}
        return places

    def _of_heads(self, into: torch.Tensor) -> Place:
        """The place of `into` [rows of this rank's heads, n] in the tensor of all heads."""
        rows, columns = into.shape
        return Place(into, (rows * self.group.size, columns), 0, self.group.rank * rows)


def half_split(heads: int, before: int, rope_dim: int) -> torch.Tensor:
    """Order int64[heads * (before + rope_dim)] that parts the interleaved pairs of each head.

    A head is `before` rows that stay and `rope_dim` rows of which pairs lie side by side: their
    first members come first, then their second ones.
    """
    turned = before + torch.arange(rope_dim).view(-1, 2).T.flatten()
    head = torch.cat((torch.arange(before), turned))
    return (torch.arange(heads)[:, None] * len(head) + head).flatten()
