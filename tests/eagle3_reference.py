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

from eyas.attention.rope import Rope, rotate
from eyas.config import SpeculationConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.sampling import gumbel_noise


def causal_attend(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None = None
) -> torch.Tensor:
    """An `Attend` without a cache over one whole text."""
    del layer
    group, dtype = q.shape[1] // k.shape[1], v.dtype
    q, k = rotate(q, rope), rotate(k, rope)
    k, v = (x.to(q.dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1).to(dtype)


@torch.inference_mode()
def target_states(target: Decoder, tokens: Sequence[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, len(layers) * E]: the target's states of a text, without a cache."""
    aux = torch.empty(len(tokens), len(layers) * target.config.hidden_size)
    ids = torch.tensor(tokens)
    target(ids, torch.arange(len(tokens)), causal_attend, aux, layers)
    return aux


@torch.inference_mode()
def target_logits(target: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V]: the target's logits of a text, without a cache."""
    ids = torch.tensor(tokens)
    return target.logits(target(ids, torch.arange(len(tokens)), causal_attend))


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
    """The network in float64, with every row's key and value at hand."""

    network: Eagle3
    embedding: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def weight(self, name: str) -> torch.Tensor:
        """A checkpoint tensor."""
        return self.network.places()[name].into.double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm by a named weight."""
        scale = (x.pow(2).mean(-1, keepdim=True) + self.network.config.rms_norm_eps).rsqrt()
        return x * scale * self.weight(name)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Target states of one position to the hidden input."""
        aux = aux.double()
        if self.network.config.fc_norm:
            parts = aux.chunk(len(self.network.config.aux_layers), dim=-1)
            aux = torch.cat([self.norm(p, f"fc_norm.{i}.weight") for i, p in enumerate(parts)])
        return self.weight("fc.weight") @ aux

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Half-split rotary of heads [H, D]."""
        half = x.shape[-1] // 2
        theta = self.network.config.rope.theta
        angle = position * theta ** (-torch.arange(half).double() / half)
        a, b = x[:, :half], x[:, half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def run(
        self, token: int, hidden: torch.Tensor, position: int, seen: Sequence[int]
    ) -> torch.Tensor:
        """One row's output before the last norm; it sees rows `seen` and itself."""
        config, layer = self.network.config, "midlayer"
        own = self.network.embed
        embedding = self.embedding if own is None else own.weight
        e = self.norm(embedding[token].double(), f"{layer}.input_layernorm.weight")
        n = self.norm(hidden, f"{layer}.hidden_norm.weight")
        x = n if config.norm_before_residual else hidden
        both = torch.cat((e, n))
        q, k, v = (
            (self.weight(f"{layer}.self_attn.{name}_proj.weight") @ both).view(-1, config.head_dim)
            for name in "qkv"
        )
        self.keys.append(self.rotate(k, position))
        self.values.append(v)
        rows = [*seen, len(self.keys) - 1]
        group = config.num_heads // config.num_kv_heads
        keys = torch.stack([self.keys[r] for r in rows], 1).repeat_interleave(group, 0)
        values = torch.stack([self.values[r] for r in rows], 1).repeat_interleave(group, 0)
        scores = (keys @ self.rotate(q, position)[:, :, None])[..., 0] / math.sqrt(config.head_dim)
        out = (scores.softmax(-1)[:, None] @ values).flatten()
        x = x + self.weight(f"{layer}.self_attn.o_proj.weight") @ out
        normed = self.norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = self.weight(f"{layer}.mlp.gate_proj.weight") @ normed
        up = self.weight(f"{layer}.mlp.up_proj.weight") @ normed
        return x + self.weight(f"{layer}.mlp.down_proj.weight") @ (F.silu(gate) * up)

    def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft logits and the state that is fed back."""
        normed = self.norm(x, "norm.weight")
        return self.weight("lm_head.weight") @ normed, (
            normed if self.network.config.norm_output else x
        )

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
    plain = PlainEagle3(network, target.embed.weight)
    last = plain.read(tokens, target_states(target, tokens, network.config.aux_layers))
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
            node.row = len(plain.keys)
            x = plain.run(node.path[-1], node.hidden, n - 1 + depth, [*range(n), *above[::-1]])
            born += children(node, x, depth + 1)
        pool = pool + born
        frontier = sorted(born, key=lambda c: -c.score)[:topk]
    best = sorted(pool, key=lambda c: -c.score)[: speculation.num_draft_tokens - 1]
    return {node.path for node in best}
