"""EAGLE-3 written out plainly in float64: lists of rows, explicit visibility, recursive trees.

It shares nothing with the engine but the weights, which it reads by their checkpoint names. Rows,
positions and offsets are those of the EAGLE reference (arXiv 2503.01840): row t embeds token t + 1
beside the target's states at t, at rotary position t; a drafted token of depth d stands at position
n - 1 + d, n being the index of the last committed token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from eyas.attention import Attend
from eyas.attention.rope import Rope, rotate
from eyas.config import SpeculationConfig
from eyas.layers.rotary import rope_frequencies
from eyas.model_config import AttentionShape
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.sampling import gumbel_noise


def causal_attend(shape: AttentionShape) -> Attend:
    """An `Attend` without a cache over one whole text."""

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None = None
    ) -> torch.Tensor:
        group, dtype = q.shape[1] // k.shape[1], v.dtype
        q, k = rotate(q, rope), rotate(k, rope)
        k, v = (x.to(q.dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.mT * shape.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if shape.window(layer):
            hidden |= torch.ones_like(hidden).tril(-shape.window(layer))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1).to(dtype)

    return attend


@torch.inference_mode()
def target_states(target: Decoder, tokens: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, len(layers) * E]: the target's states of a text, without a cache."""
    aux = torch.empty(len(tokens), len(layers) * target.config.hidden_size)
    ids = torch.tensor(tokens)
    attend = causal_attend(target.config.attention_shape())
    target(ids, torch.arange(len(tokens)), attend, aux, layers)
    return aux


@torch.inference_mode()
def target_logits(target: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V]: the target's logits of a text, without a cache."""
    ids = torch.tensor(tokens)
    attend = causal_attend(target.config.attention_shape())
    return target.logits(target(ids, torch.arange(len(tokens)), attend))


@dataclass(slots=True, kw_only=True)
class Node:
    """A drafted token, its cumulative score, and the tokens from the root to it."""

    path: tuple[int, ...]
    score: float
    parent: Node | None
    hidden: torch.Tensor
    """What the pass of the node before it fed back."""
    row: int = -1
    """Its row among the keys, once it was run."""


@dataclass(slots=True)
class PlainEagle3:
    """The network in float64, with every row's key and value of each layer at hand."""

    network: Eagle3
    embedding: torch.Tensor
    """The target's, for a drafter without."""
    head: torch.Tensor | None = None
    """The target's, for a drafter without."""
    keys: list[list[torch.Tensor]] = field(default_factory=lambda: [[] for _ in range(8)])
    values: list[list[torch.Tensor]] = field(default_factory=lambda: [[] for _ in range(8)])
    """For each layer the heads [H, D] of every row, each query head with keys of its own."""

    def weight(self, name: str) -> torch.Tensor:
        """A checkpoint tensor, as a checkpoint keeps it."""
        return self.network.places()[name].give().double()

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        """RMSNorm by a named weight."""
        eps = self.network.config.rms_norm_eps if eps is None else eps
        scale = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale * self.weight(name)

    def linear(self, x: torch.Tensor, name: str, bias: bool = False) -> torch.Tensor:
        """A matrix and perhaps a bias by their name."""
        y = self.weight(f"{name}.weight") @ x
        return y + self.weight(f"{name}.bias") if bias else y

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Target states of one position to the hidden input."""
        aux, config = aux.double(), self.network.config
        if config.fc_norm:
            parts = aux.chunk(len(config.aux_layers), dim=-1)
            aux = torch.cat([self.norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(parts)])
        if config.norm_before_fc:
            aux = self.norm(aux, "input_norm.weight")
        return self.linear(aux, "fc", config.fc_bias) if config.fused else aux

    def angles(self, position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [size / 2] of a position."""
        rope = self.network.config.rope
        angle = position * rope_frequencies(rope, size).double()
        return angle.cos() * rope.table_factor, angle.sin() * rope.table_factor

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Half-split rotary of heads [H, D]."""
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.angles(position, x.shape[-1])
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def rotate_pairs(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotary of heads [H, D] whose pairs lie side by side."""
        a, b = x[:, ::2], x[:, 1::2]
        cos, sin = self.angles(position, x.shape[-1])
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)

    def heads(
        self, x: torch.Tensor, name: str, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [H, D] of one row, a key and a value for every query."""
        config = self.network.config
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj", config.qkv_bias).view(-1, config.head_dim)
            for part in "qkv"
        )
        if config.qk_norm:
            q, k = (self.norm(y, f"{name}.{n}_norm.weight") for y, n in ((q, "q"), (k, "k")))
        q, k = self.rotate(q, position), self.rotate(k, position)
        group = config.num_heads // config.num_kv_heads
        return q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)

    def latent_heads(
        self, x: torch.Tensor, name: str, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for latent attention, with keys and values made for every head."""
        mla, count = self.network.config.mla, self.network.config.num_heads
        assert mla is not None
        if mla.q_lora_rank:
            low = self.linear(x, f"{name}.q_a_proj")
            low = self.norm(low, f"{name}.q_a_layernorm.weight", mla.norm_eps)
            q = self.linear(low, f"{name}.q_b_proj").view(count, -1)
        else:
            q = self.linear(x, f"{name}.q_proj").view(count, -1)
        both = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, turned = both[: mla.kv_lora_rank], both[mla.kv_lora_rank :]
        latent = self.norm(latent, f"{name}.kv_a_layernorm.weight", mla.norm_eps)
        made = self.linear(latent, f"{name}.kv_b_proj").view(count, -1)
        turn = self.rotate_pairs if mla.interleaved else self.rotate
        key = turn(turned[None], position).expand(count, -1)
        turned = turn(q[:, mla.nope_dim :], position)
        q = torch.cat((q[:, : mla.nope_dim], turned), dim=-1)
        return q, torch.cat((made[:, : mla.nope_dim], key), dim=-1), made[:, mla.nope_dim :]

    def attend(
        self, layer: int, x: torch.Tensor, name: str, position: int, seen: Sequence[int]
    ) -> torch.Tensor:
        """One row's attention over rows `seen` and itself, projected."""
        config = self.network.config
        q, k, v = (self.latent_heads if config.mla else self.heads)(x, name, position)
        self.keys[layer].append(k)
        self.values[layer].append(v)
        rows = [*seen, len(self.keys[layer]) - 1]
        if config.windows and config.windows[layer]:
            rows = rows[-config.windows[layer] :]
        keys = torch.stack([self.keys[layer][r] for r in rows], 1)
        values = torch.stack([self.values[layer][r] for r in rows], 1)
        scale = config.mla.scale if config.mla else 1 / math.sqrt(config.head_dim)
        scores = (keys @ q[:, :, None])[..., 0] * scale
        out = (scores.softmax(-1)[:, None] @ values).flatten()
        return self.linear(out, f"{name}.o_proj", config.o_bias)

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """SwiGLU."""
        bias = self.network.config.mlp_bias
        gate, up = (self.linear(x, f"{name}.{part}_proj", bias) for part in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"{name}.down_proj", bias)

    def run(
        self, token: int, hidden: torch.Tensor, position: int, seen: Sequence[int]
    ) -> torch.Tensor:
        """One row's output before the last norm; it sees rows `seen` and itself."""
        config = self.network.config
        own = self.network.embed
        embedding = self.embedding if own is None else own.weight
        e = self.norm(embedding[token].double(), "midlayer.input_layernorm.weight")
        n = self.norm(hidden, "midlayer.hidden_norm.weight")
        x = n if config.norm_before_residual else hidden
        for layer in range(config.num_layers):
            name = f"layers.{layer}" if layer else "midlayer"
            rows = self.norm(x, f"{name}.input_layernorm.weight") if layer else torch.cat((e, n))
            x = x + self.attend(layer, rows, f"{name}.self_attn", position, seen)
            normed = self.norm(x, f"{name}.post_attention_layernorm.weight")
            x = x + self.mlp(normed, f"{name}.mlp")
        return x

    def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft logits and the state that is fed back."""
        config = self.network.config
        normed = self.norm(x, "norm.weight") if config.last_norm else x
        head = self.weight("lm_head.weight") if config.own_head else self.head
        assert head is not None
        logits = head.double() @ normed * config.logit_scale
        return logits, normed if config.norm_output else x

    def read(self, tokens: Sequence[int], aux: torch.Tensor) -> torch.Tensor:
        """Rows 0 .. n - 1 of a text whose last token, at index n, is the root; last output."""
        out = torch.empty(0)
        for t in range(len(tokens) - 1):
            out = self.run(tokens[t + 1], self.fuse(aux[t]), t, range(t))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The shared noise of a sampled request."""

    seed: int
    temperature: float


def candidates(
    logits: torch.Tensor, network: Eagle3, index: int, topk: int, noise: Noise | None
) -> list[tuple[int, float]]:
    """Best (target id, log score) of draft logits for the token at sequence index `index`."""
    if noise is not None:
        seed, at = torch.tensor([noise.seed]), torch.tensor([index])
        logits = logits / noise.temperature + gumbel_noise(seed, at, network.target_ids)[0]
    values, best = logits.log_softmax(-1).topk(topk)
    ids = network.target_ids[best].tolist()
    return list(zip(ids, values.tolist(), strict=True))


@torch.inference_mode()
def draft_paths(
    network: Eagle3,
    target: Decoder,
    tokens: Sequence[int],
    speculation: SpeculationConfig,
    noise: Noise | None = None,
) -> set[tuple[int, ...]]:
    """The paths of the dynamic tree behind `tokens` (EAGLE-2, arXiv 2406.16858), roots left out."""
    plain = PlainEagle3(network, target.embed.weight, target.head.weight)
    states = target_states(target, tokens, network.config.aux_layers)
    last = plain.read(tokens, states if network.config.fused else target.norm(states))
    n, topk = len(tokens) - 1, speculation.eagle_topk

    def children(parent: Node | None, x: torch.Tensor, depth: int) -> list[Node]:
        logits, fed_back = plain.score(x)
        path, score = ((), 0.0) if parent is None else (parent.path, parent.score)
        found = candidates(logits, network, n + depth, topk, noise)
        return [
            Node(path=(*path, token), score=score + s, parent=parent, hidden=fed_back)
            for token, s in found
        ]

    pool = frontier = children(None, last, 1)
    for depth in range(1, speculation.num_steps):
        born: list[Node] = []
        for node in frontier:
            above, up = [], node.parent
            while up is not None:
                above.append(up.row)
                up = up.parent
            node.row = len(plain.keys[0])
            x = plain.run(node.path[-1], node.hidden, n - 1 + depth, [*range(n), *above[::-1]])
            born += children(node, x, depth + 1)
        pool = pool + born
        frontier = sorted(born, key=lambda c: -c.score)[:topk]
    best = sorted(pool, key=lambda c: -c.score)[: speculation.num_draft_tokens - 1]
    return {node.path for node in best}
