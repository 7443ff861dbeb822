"""The decoder that every target is: pre-norm blocks of attention and an MLP or experts.

The network knows neither pages nor requests: a pass gives it tokens, positions and an `Attend`.
Hidden states for EAGLE-3 are written into a buffer it is handed; capturing changes nothing else.
What kind of attention and MLP a layer has stands in its `ModelConfig`. Names and mathematics follow
transformers' models of the same architectures.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from eyas.attention import Attend
from eyas.attention.rope import Rope
from eyas.config import SPARE_POSITIONS
from eyas.distributed.group import SOLO, Group
from eyas.kernels.rows import put_columns
from eyas.kernels.terms import Delta
from eyas.layers.basic import GatedMLP, RMSNorm, SelfAttention
from eyas.layers.linear import (
    ANY_ROWS,
    ColumnParallel,
    Embedding,
    Places,
    RowTile,
    fix_rows,
    pad_rows,
    whole,
)
from eyas.layers.mla import MLA
from eyas.layers.moe import RoutedMLP
from eyas.layers.rotary import Rotary
from eyas.model_config import ModelConfig


class Block(nn.Module):
    """One decoder layer with pre-norms."""

    def __init__(self, config: ModelConfig, layer: int, group: Group = SOLO) -> None:
        super().__init__()
        prefix = f"{config.prefix}model.layers.{layer}"
        self.prefix = prefix
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps)
        self.attention = attention_layer(config, layer, f"{prefix}.self_attn", group)
        self.post_norm = RMSNorm(hidden, eps)
        self.mlp = feed_forward(config, layer, f"{prefix}.mlp", group)

    def forward(
        self, x: torch.Tensor, delta: Delta | None, rope: Rope, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor, Delta]:
        """Residual stream, [..., E] each: `x + delta`, then the stream, and what to add to it.

        Who comes next adds, together with its own norm, and sums first what comes as terms.
        """
        attended, entered = self.attention.normed(x, self.input_norm.of(delta), rope, attend)
        more, x = self.mlp.normed(entered, self.post_norm.of(attended))
        return entered, x, more

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_norm}
        places = {f"{self.prefix}.{name}.weight": whole(n.weight) for name, n in norms.items()}
        return places | self.attention.places() | self.mlp.places()


def attention_layer(
    config: ModelConfig, layer: int, prefix: str, group: Group, in_features: int | None = None
) -> SelfAttention | MLA:
    """The attention that `config` asks for in `layer`; `in_features`: if it reads other rows."""
    hidden = config.hidden_size
    if config.mla is not None:
        size = in_features or hidden
        return MLA(layer, prefix, size, hidden, config.num_heads, config.mla, group)
    return SelfAttention(
        layer,
        prefix,
        in_features or hidden,
        hidden,
        (config.num_heads, config.num_kv_heads, config.head_dim),
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norm_eps=config.rms_norm_eps if config.qk_norm else None,
        group=group,
    )


def feed_forward(
    config: ModelConfig, layer: int, prefix: str, group: Group
) -> GatedMLP | RoutedMLP:
    """The MLP or the experts that `config` asks for in `layer`."""
    if config.moe is not None and config.moe.sparse_layers[layer]:
        return RoutedMLP(config.moe, config.hidden_size, prefix, group)
    return GatedMLP(config.hidden_size, config.intermediate_size, prefix, config.mlp_bias, group)


class Decoder(nn.Module):
    """Tokens to hidden states, hidden states to logits."""

    def __init__(
        self, config: ModelConfig, row_tile: RowTile = ANY_ROWS, group: Group = SOLO
    ) -> None:
        super().__init__()
        self.config, self.group = config, group
        if row_tile.call and config.moe is not None:  # padded rows would wake experts
            row_tile = RowTile(call=row_tile.call)
        self.row_tile = row_tile
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed = Embedding(vocab, hidden, group)
        self.blocks = nn.ModuleList(Block(config, i, group) for i in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.rope_dim, config.max_position + SPARE_POSITIONS)
        self.head = ColumnParallel({f"{config.prefix}lm_head": vocab}, hidden, group=group)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        fix_rows(self, row_tile.call)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        aux: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """Final hidden states behind the last norm, [T, E], of `tokens` int64[T].

        If given, `aux` [T, len(aux_layers) * E] receives the input of each layer in `aux_layers`
        (L: the output of the last), side by side.
        """
        rows = tokens.shape[0]
        rope = self.rotary(pad_rows(positions, self.row_tile))
        x, delta = pad_rows(self.embed(tokens), self.row_tile), cast(Delta | None, None)
        for boundary, block in enumerate(self._blocks()):
            entered, x, delta = block(x, delta, rope, attend)
            self._capture(boundary, entered[:rows], aux, aux_layers)
        normed, x = self.norm.of(delta)(x)
        self._capture(len(self.blocks), x[:rows], aux, aux_layers)
        return normed[:rows]

    def _capture(
        self, boundary: int, x: torch.Tensor, aux: torch.Tensor | None, aux_layers: tuple[int, ...]
    ) -> None:
        """Write the stream at a boundary to its place in `aux`, if it is wanted."""
        if aux is not None and boundary in aux_layers:
            place = aux_layers.index(boundary) * self.config.hidden_size
            put_columns(x, aux[:, place : place + self.config.hidden_size])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of hidden states [R, E] from `forward`."""
        rows = hidden.shape[0]
        scores = self.head(pad_rows(hidden, self.row_tile))[:rows]
        return self.group.all_gather(scores)

    def _blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this rank's network."""
        prefix = self.config.prefix
        places = {f"{prefix}model.embed_tokens.weight": self.embed.place()}
        places[f"{prefix}model.norm.weight"] = whole(self.norm.weight)
        for block in self._blocks():
            places |= block.places()
        if not self.config.tie_word_embeddings:
            places |= self.head.places()
        return places
