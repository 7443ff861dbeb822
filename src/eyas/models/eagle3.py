"""EAGLE-3 drafter network, shared by engine and trainer.

One layer whose attention reads the token embedding beside a hidden state: the fused target states
in the first step, its own output afterwards; ordinary decoder layers may follow. Architecture:
arXiv 2503.01840, section 3; the switches are those of `DrafterConfig`, with the meanings that
speculators, SGLang and vLLM give them. It knows neither caches nor trees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from eyas.attention import Attend
from eyas.attention.rope import Rope
from eyas.config import SPARE_POSITIONS
from eyas.distributed.group import SOLO
from eyas.kernels.norm import rms_norm_pair
from eyas.kernels.norm_parts import norm_parts
from eyas.kernels.rows import take_rows
from eyas.kernels.terms import Delta, summed
from eyas.layers.basic import GatedMLP, RMSNorm
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
from eyas.layers.rotary import Rotary
from eyas.model_config import DrafterConfig
from eyas.models.decoder import Block, attention_layer

Head = Callable[[torch.Tensor], torch.Tensor]
"""Normed states [T, E] -> logits [T, V]."""


class Eagle3(nn.Module):
    """Fuse target states, run the draft layers, score the draft vocabulary.

    Without an embedding or a head of its own (`embed`, `head`) the caller brings the target's.
    `target_ids` int64[Vd] maps draft ids to target ids and is strictly ascending.
    """

    target_ids: torch.Tensor

    def __init__(self, config: DrafterConfig, row_tile: RowTile = ANY_ROWS) -> None:
        super().__init__()
        self.config, self.row_tile = config, row_tile
        hidden, eps, layers = config.hidden_size, config.rms_norm_eps, config.layers()
        num_aux, wide = len(config.aux_layers), config.target_hidden_size
        self.embed = Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.fc_norms = nn.ModuleList(RMSNorm(wide, eps) for _ in range(num_aux * config.fc_norm))
        self.states_norm = RMSNorm(num_aux * wide, eps) if config.norm_before_fc else None
        self.fc = Linear({"fc": hidden}, num_aux * wide, config.fc_bias) if config.fused else None
        self.input_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.attention = attention_layer(layers, 0, "midlayer.self_attn", SOLO, 2 * hidden)
        self.post_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size, "midlayer.mlp", config.mlp_bias)
        self.later = nn.ModuleList(Block(layers, i) for i in range(1, config.num_layers))
        self.norm = RMSNorm(hidden, eps) if config.last_norm else None
        self.head = (
            Linear({"lm_head": config.draft_vocab_size}, hidden) if config.own_head else None
        )
        self.rotary = Rotary(config.rope, config.rope_dim, config.max_position + SPARE_POSITIONS)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Target states [..., num_aux * Et] -> hidden input [..., E] of the first step.

        If the drafter fuses none, that is the state itself, which the target's last norm gave.
        """
        if self.config.fc_norm:
            weights = tuple(cast(RMSNorm, norm).weight for norm in self.fc_norms)
            states = aux.unflatten(-1, (len(weights), -1))
            aux = norm_parts(states, weights, 1, self.config.rms_norm_eps).flatten(-2)
        if self.states_norm is not None:
            aux = self.states_norm(aux)
        if self.fc is None:
            return aux
        return self.fc(pad_rows(aux, self.row_tile))[: aux.shape[0]]

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft layers over `embeds` [T, E] of the tokens and `hidden` [T, E].

        Returns their normed output [T, E], which `score` reads, and the state [T, E] to feed back.
        Any leading shape will do where `attend` takes it; rows are padded along the first.
        """
        rows = embeds.shape[0]
        attended, stream, rope = self._attended(embeds, hidden, positions, attend)
        delta, x = self._mlp(attended, stream)
        for block in self._later():
            _, x, delta = block(x, delta, rope, attend)
        normed, x = self._finish(x, delta)
        return normed[:rows], x[:rows]

    def last(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        counts: torch.Tensor,
        few: Eagle3,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `counts[b] - 1` of `forward` for requests of as many rows each; [B, E] both.

        Of one layer only these go through the MLP, that of `few`, this network or its `rounded`:
        of the others nothing but keys and values is read later. `counts` is int64[B].
        """
        step = embeds.shape[0] // counts.shape[0]
        if len(self.later):
            states = self(embeds, hidden, positions, attend)
            normed, fed_back = take_rows(counts, *states, step=step, offset=-1)
            return normed, fed_back
        attended, stream, _ = self._attended(embeds, hidden, positions, attend)
        attended, stream = take_rows(counts, attended, stream, step=step, offset=-1)
        delta, x = few._mlp(attended, stream)
        normed, x = few._finish(x, delta)
        return normed[: counts.shape[0]], x[: counts.shape[0]]

    def _attended(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor, Rope]:
        """What the first layer's attention gives [T', E], rows that end with its residual; rope."""
        rope = self.rotary(pad_rows(positions, self.row_tile))
        embeds, hidden = pad_rows(embeds, self.row_tile), pad_rows(hidden, self.row_tile)
        weights = (self.input_norm.weight, self.hidden_norm.weight)
        both = rms_norm_pair(embeds, hidden, *weights, self.config.rms_norm_eps)
        attended = self.attention(both, rope, attend)
        return attended, both if self.config.norm_before_residual else hidden, rope

    def _mlp(self, attended: torch.Tensor, stream: torch.Tensor) -> tuple[Delta, torch.Tensor]:
        """What the first layer's MLP adds to a residual stream, and that stream."""
        attended, stream = pad_rows(attended, self.row_tile), pad_rows(stream, self.row_tile)
        residual = stream[..., -self.config.hidden_size :]
        return self.mlp.normed(residual, self.post_norm.of(attended))

    def _finish(self, x: torch.Tensor, delta: Delta) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads, and what is fed back, behind the last layer."""
        if self.norm is not None:
            normed, x = self.norm.add(x, delta)
        else:
            normed = x = x + summed(delta)
        return normed, normed if self.config.norm_output else x

    def score(self, normed: torch.Tensor, borrowed: Head | None = None) -> torch.Tensor:
        """Draft logits [T, Vd] of `forward`'s normed output [T, E].

        `borrowed` is the target's head, for a drafter that has none.
        """
        head = borrowed if self.head is None else self.head
        assert head is not None, "a drafter without a head is given the target's"
        logits = head(pad_rows(normed, self.row_tile))[: normed.shape[0]]
        scale = self.config.logit_scale
        return logits if scale == 1.0 else logits * scale

    def rounded(self) -> Eagle3:
        """A copy that drafts with 8-bit weights; on a CPU it must be in bfloat16."""
        quick = copy.deepcopy(self)
        quick.row_tile = ANY_ROWS
        for module in list(quick.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, Int8Linear(child))
        return quick

    def places(self) -> Places:
        """Checkpoint tensor name -> its place.

        The names are EAGLE's and SpecForge's; layers after the first are `layers.1` and so on.
        """
        norms = {
            "midlayer.input_layernorm": self.input_norm,
            "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.post_attention_layernorm": self.post_norm,
            "norm": self.norm,
            "input_norm": self.states_norm,
            **{f"fc_norm.{i}": norm for i, norm in enumerate(self.fc_norms)},
        }
        places = {
            f"{k}.weight": whole(n.weight) for k, n in norms.items() if isinstance(n, RMSNorm)
        }
        if self.embed is not None:
            places["embed_tokens.weight"] = self.embed.place()
        for layer in (self.fc, self.attention, self.mlp, self.head):
            places |= {} if layer is None else layer.places()
        for block in self._later():
            places |= {k.removeprefix("model."): place for k, place in block.places().items()}
        return places

    def _later(self) -> list[Block]:
        return [cast(Block, block) for block in self.later]
