"""What a network is, in words and numbers, from its config alone: plain values for people and JSON.

Knows neither files nor devices.
"""

from __future__ import annotations

from typing import Any

from eyas.model_config import DrafterConfig, ModelConfig, RopeConfig

Facts = dict[str, Any]


def target_facts(config: ModelConfig) -> Facts:
    """Dimensions, attention, experts and positions of a target."""
    return {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "attention": attention(config),
        "feed forward": feed_forward(config),
        "vocabulary": config.vocab_size,
        "head": "the embedding" if config.tie_word_embeddings else "of its own",
        "context": config.max_position,
        "positions": positions(config.rope),
    }


def drafter_facts(config: DrafterConfig) -> Facts:
    """Dimensions of an EAGLE-3 drafter, and what it takes from its target."""
    return {
        "hidden": config.hidden_size,
        "attention": attention(config),
        "draft tokens": config.draft_vocab_size,
        "embedding": "of its own" if config.own_embedding else "the target's",
        "positions": positions(config.rope),
    }


def attention(config: ModelConfig | DrafterConfig) -> str:
    """The kind of attention with its sizes."""
    if config.mla is not None:
        mla = config.mla
        queries = f", queries through {mla.q_lora_rank}" if mla.q_lora_rank else ""
        return (
            f"multi-head latent: {config.num_heads} heads over one latent of {mla.kv_lora_rank} "
            f"and a rotary key of {mla.rope_dim}{queries}"
        )
    heads, kv = config.num_heads, config.num_kv_heads
    kind = "multi-head" if heads == kv else "multi-query" if kv == 1 else "grouped-query"
    words = f"{kind}: {heads} query and {kv} KV heads of {config.head_dim}"
    if getattr(config, "qk_norm", False):
        words += ", queries and keys normed"
    sliding = [window for window in getattr(config, "windows", ()) if window]
    if sliding:
        words += f", {len(sliding)} layers with a sliding window of {max(sliding)}"
    return words


def feed_forward(config: ModelConfig) -> str:
    """The MLP, and the experts if there are any."""
    dense = f"SwiGLU of {config.intermediate_size}"
    moe = config.moe
    if moe is None or not any(moe.sparse_layers):
        return dense
    sparse = sum(moe.sparse_layers)
    words = f"{moe.num_experts} experts of {moe.intermediate_size}, {moe.top_k} a token"
    if moe.num_groups > 1:
        words += f" from {moe.topk_groups} of {moe.num_groups} groups"
    if moe.shared_size:
        words += f", shared ones of {moe.shared_size}"
    words += f", {moe.scoring} routing"
    if sparse < config.num_layers:
        words += f"; in {sparse} layers, the others {dense}"
    return words


def positions(rope: RopeConfig) -> str:
    """The rotary embedding."""
    words = f"rotary, base {rope.theta:g}"
    if rope.kind == "default":
        return words
    return f"{words}, {rope.kind} scaling by {rope.factor:g}"


def active_parameters(config: ModelConfig, total: int) -> int:
    """Of `total` parameters those that one token meets."""
    if config.moe is None:
        return total
    each = 3 * config.hidden_size * config.moe.intermediate_size
    idle = config.moe.num_experts - config.moe.top_k
    return total - sum(config.moe.sparse_layers) * idle * each


def count(number: int) -> str:
    """A number of parameters for people."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return str(number)
