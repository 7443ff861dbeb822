"""Llama decoder, for targets.

The network knows neither pages nor requests: a pass gives it tokens, positions and an `Attend`.
Hidden states for EAGLE-3 are written into a buffer it is handed; capturing changes nothing else.
Names and mathematics follow transformers' `models/llama`.
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.attention import Attend
from eyas.config import MAX_NODES, ModelConfig
from eyas.layers.basic import GatedMLP, RMSNorm, Rotary, SelfAttention
from eyas.layers.linear import ANY_ROWS, Embedding, Linear, RowTile, pad_rows


class LlamaBlock(nn.Module):
    """One decoder layer with pre-norms."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.input_norm = RMSNorm(hidden, eps)
        self.attention = SelfAttention(
            layer, f"{prefix}.self_attn", hidden, hidden, heads, config.attention_bias
        )
        self.post_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size, f"{prefix}.mlp", config.mlp_bias)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """`[..., E] -> [..., E]`: the residual stream after this layer."""
        x = x + self.attention(self.input_norm(x), rope, attend)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Tokens to hidden states, hidden states to logits."""

    def __init__(self, config: ModelConfig, row_tile: RowTile = ANY_ROWS) -> None:
        super().__init__()
        self.config = config
        self.row_tile = row_tile
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position + MAX_NODES)
        self.head = Linear({"lm_head": config.vocab_size}, config.hidden_size)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        aux: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """Final hidden states before the last norm, [T, E], of `tokens` int64[T].

        If given, `aux` [T, len(aux_layers) * E] receives the input of each layer in `aux_layers`
        (L: the output of the last), side by side.
        """
        rows = tokens.shape[0]
        rope = self.rotary(pad_rows(positions, self.row_tile))
        x = pad_rows(self.embed(tokens), self.row_tile)
        for boundary, block in enumerate([*self.blocks, None]):
            if aux is not None and boundary in aux_layers:
                place = aux_layers.index(boundary) * self.config.hidden_size
                aux[:, place : place + self.config.hidden_size] = x[:rows]
            if block is not None:
                x = block(x, rope, attend)
        return x[:rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype of hidden states [R, E] from `forward`."""
        rows = hidden.shape[0]
        return self.head(self.norm(pad_rows(hidden, self.row_tile)))[:rows]

    def checkpoint_names(self) -> dict[str, tuple[nn.Parameter, int]]:
        """Checkpoint tensor name -> (parameter, first row it fills)."""
        names = {"model.embed_tokens.weight": (self.embed.weight, 0)}
        names["model.norm.weight"] = (self.norm.weight, 0)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, LlamaBlock)
            prefix = f"model.layers.{i}"
            names[f"{prefix}.input_layernorm.weight"] = (block.input_norm.weight, 0)
            names[f"{prefix}.post_attention_layernorm.weight"] = (block.post_norm.weight, 0)
        linears = [m for m in self.modules() if isinstance(m, Linear)]
        for linear in linears:
            if linear is not self.head or not self.config.tie_word_embeddings:
                names |= linear.checkpoint_names()
        return names
