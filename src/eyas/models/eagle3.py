"""EAGLE-3 drafter network, shared by engine and trainer.

One layer whose attention reads the token embedding beside a hidden state: the fused
target states in the first step, its own output afterwards. Architecture: arXiv 2503.01840,
section 3; the switches are those of speculators and vLLM (`norm_output`, `fc_norm`,
`norm_before_residual`). It knows neither caches nor trees.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import nn

from eyas.attention import Attend
from eyas.config import SPARE_POSITIONS
from eyas.kernels.norm import rms_norm_pair
from eyas.layers.basic import GatedMLP, RMSNorm, SelfAttention
from eyas.layers.linear import (
    ANY_ROWS,
    Embedding,
    Int8Linear,
    Linear,
    Places,
    RowTile,
    pad_rows,
    whole,
)
from eyas.layers.mla import MLA
from eyas.layers.rotary import Rotary
from eyas.model_config import DrafterConfig


class Eagle3(nn.Module):
    """Fuse target states, run the draft layer, score the draft vocabulary.

    Without an embedding of its own the caller passes the target's (`share_embedding`).
    `target_ids` int64[Vd] maps draft ids to target ids and is strictly ascending.
    """

    target_ids: torch.Tensor

    def __init__(self, config: DrafterConfig, row_tile: RowTile = ANY_ROWS) -> None:
        super().__init__()
        self.config = config
        self.row_tile = row_tile
        hidden, eps = config.hidden_size, config.rms_norm_eps
        num_aux = len(config.aux_layers)
        self.embed = Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.fc_norms = nn.ModuleList(
            RMSNorm(config.target_hidden_size, eps) for _ in range(num_aux * config.fc_norm)
        )
        self.fc = Linear({"fc": hidden}, num_aux * config.target_hidden_size)
        self.input_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.attention = attention_layer(config)
        self.post_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size, "midlayer.mlp")
        self.norm = RMSNorm(hidden, eps)
        self.head = Linear({"lm_head": config.draft_vocab_size}, hidden)
        self.rotary = Rotary(config.rope, config.rope_dim, config.max_position + SPARE_POSITIONS)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Target states [..., num_aux * Et] -> hidden input [..., E] of the first step."""
        if self.config.fc_norm:
            states = aux.chunk(len(self.fc_norms), dim=-1)
            aux = torch.cat([n(s) for n, s in zip(self.fc_norms, states, strict=True)], dim=-1)
        return self.fc(pad_rows(aux, self.row_tile))[: aux.shape[0]]

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft layer over `embeds` [T, E] of the tokens and `hidden` [T, E].

        Returns its normed output [T, E], which `score` reads, and the state [T, E] to feed back.
        Any leading shape will do where `attend` takes it; rows are padded along the first.
        """
        rows = embeds.shape[0]
        embeds, hidden = pad_rows(embeds, self.row_tile), pad_rows(hidden, self.row_tile)
        rope = self.rotary(pad_rows(positions, self.row_tile))
        weights = (self.input_norm.weight, self.hidden_norm.weight)
        both = rms_norm_pair(embeds, hidden, *weights, self.config.rms_norm_eps)
        normed = both[..., embeds.shape[-1] :]
        x = normed if self.config.norm_before_residual else hidden
        normed, x = self.post_norm.add(x, self.attention(both, rope, attend))
        normed, x = self.norm.add(x, self.mlp(normed))
        return normed[:rows], (normed if self.config.norm_output else x)[:rows]

    def score(self, normed: torch.Tensor) -> torch.Tensor:
        """Draft logits [T, Vd] of `forward`'s normed output [T, E]."""
        return self.head(pad_rows(normed, self.row_tile))[: normed.shape[0]]

    def rounded(self) -> Eagle3:
        """A copy that drafts with 8-bit weights, for a CPU in bfloat16."""
        quick = copy.deepcopy(self)
        quick.row_tile = ANY_ROWS
        for module in list(quick.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, Int8Linear(child))
        return quick

    def places(self) -> Places:
        """Checkpoint tensor name (EAGLE / SpecForge) -> its place."""
        norms = {
            "midlayer.input_layernorm": self.input_norm,
            "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.post_attention_layernorm": self.post_norm,
            "norm": self.norm,
        }
        norms |= {f"fc_norm.{i}": cast(RMSNorm, norm) for i, norm in enumerate(self.fc_norms)}
        places = {f"{name}.weight": whole(norm.weight) for name, norm in norms.items()}
        if self.embed is not None:
            places["embed_tokens.weight"] = self.embed.place()
        for layer in (self.fc, self.attention, self.mlp, self.head):
            places |= layer.places()
        return places


def attention_layer(config: DrafterConfig) -> SelfAttention | MLA:
    """The draft layer's attention over [embedding, hidden state], 2 * E numbers a row."""
    prefix, hidden = "midlayer.self_attn", config.hidden_size
    if config.mla is not None:
        return MLA(0, prefix, 2 * hidden, hidden, config.num_heads, config.mla)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    return SelfAttention(0, prefix, 2 * hidden, hidden, heads)
