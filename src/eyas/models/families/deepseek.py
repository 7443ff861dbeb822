"""DeepSeek-V2 and V3 and Kimi: latent attention, routed experts behind a few dense layers.

Kimi-K2 is V3's graph with other numbers; the text part of Kimi-K2.5 and K2.6 is that network under
a prefix, beside a vision tower that is passed over, as are the layers for multi-token prediction.
Follows transformers' `models/deepseek_v2` and `models/deepseek_v3`; keys that only the authors'
code knows (`topk_method`, `scoring_func`, `moe_layer_freq`) mean what they mean there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eyas.errors import CheckpointError
from eyas.model_config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from eyas.models.families.reading import (
    common_fields,
    dimension,
    refuse_others,
    refuse_unknown_arithmetic,
    rope_config,
)

_BOTH: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "ep_size": (None, 1),
}
_V2: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "topk_method": ("greedy", "group_limited_greedy"),
    "scoring_func": (None, "softmax"),
    "norm_topk_prob": (None, False),
}
_V3: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "topk_method": (None, "noaux_tc"),
    "scoring_func": (None, "sigmoid"),
}
"""Config keys that change the arithmetic -> the values that are implemented."""

_KIMI = "language_model."
_VISION = ("vision_tower.", "mm_projector.")


def read_deepseek_v2(config: dict[str, Any]) -> ModelConfig:
    """`DeepseekV2ForCausalLM`, V2-Lite included.

    With `norm_topk_prob` the authors' code leaves out the scaling factor and transformers the
    norming, so that is refused.
    """
    refuse_others(config, _V2)
    grouped = config.get("topk_method") == "group_limited_greedy"
    moe = None
    if _has_experts(config):
        moe = _experts(config, grouped, scoring="softmax", normalize=False, group_score="max")
    return _model(config, moe, interleaved=True)


def read_deepseek_v3(config: dict[str, Any]) -> ModelConfig:
    """`DeepseekV3ForCausalLM`, which Kimi-K2 is too."""
    refuse_others(config, _V3)
    moe = None
    if _has_experts(config):
        moe = _experts(
            config,
            grouped=True,
            scoring="sigmoid",
            normalize=bool(config.get("norm_topk_prob", True)),
            group_score="top2",
            correction_bias=True,
        )
    model = _model(config, moe, interleaved=bool(config.get("rope_interleave", True)))
    first = model.num_layers
    heads = _count(config, "num_nextn_predict_layers", _count(config, "num_mtp_layers", 1))
    names = tuple(f"model.layers.{i}." for i in range(first, first + heads))
    return dataclasses.replace(model, passed_over=names)


def read_kimi(config: dict[str, Any]) -> ModelConfig:
    """The text part of `KimiK25ForConditionalGeneration`."""
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in ("kimi_k2", "deepseek_v3"):
        raise CheckpointError(
            "text_config",
            "must describe a network of model_type kimi_k2 or deepseek_v3",
            "use a checkpoint of Kimi-K2.5 or K2.6",
        )
    refuse_unknown_arithmetic(text)
    own = text.get("eos_token_id")
    own = [] if own is None else own if isinstance(own, list) else [own]
    outer = {"eos_token_id": list(dict.fromkeys([*(config.get("eos_token_id") or ()), *own]))}
    if "tie_word_embeddings" in config:
        outer["tie_word_embeddings"] = config["tie_word_embeddings"]
    model = read_deepseek_v3({**text, **outer})
    inner = tuple(_KIMI + name for name in model.passed_over)
    return dataclasses.replace(model, prefix=_KIMI, passed_over=(*inner, *_VISION))


def _model(config: dict[str, Any], moe: MoEConfig | None, interleaved: bool) -> ModelConfig:
    """What all of the family share."""
    rope = rope_config(config)
    mla = mla_config(config, rope, interleaved)
    fields = common_fields(config)
    fields |= {"num_kv_heads": fields["num_heads"], "head_dim": mla.nope_dim + mla.rope_dim}
    return ModelConfig(**fields, mla=mla, moe=moe)


def mla_config(config: dict[str, Any], rope: RopeConfig, interleaved: bool = True) -> MLAConfig:
    """Latent attention of a config with DeepSeek's keys, target's or drafter's.

    Raises `CheckpointError` for a dimension that is missing or no positive integer.
    """
    nope, turned = dimension(config, "qk_nope_head_dim"), dimension(config, "qk_rope_head_dim")
    return MLAConfig(
        q_lora_rank=_count(config, "q_lora_rank", 0),
        kv_lora_rank=dimension(config, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=dimension(config, "v_head_dim"),
        interleaved=interleaved,
        scale=(nope + turned) ** -0.5 * rope.score_factor,
    )


def _has_experts(config: dict[str, Any]) -> bool:
    return any(_sparse_layers(config))


def _sparse_layers(config: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers have experts, as the authors' code says."""
    layers = dimension(config, "num_hidden_layers")
    if not config.get("n_routed_experts"):
        return (False,) * layers
    first, every = _count(config, "first_k_dense_replace"), dimension(config, "moe_layer_freq", 1)
    return tuple(i >= first and i % every == 0 for i in range(layers))


def _experts(config: dict[str, Any], grouped: bool, **routing: Any) -> MoEConfig:
    size = dimension(config, "moe_intermediate_size")
    if grouped:
        groups = {
            "num_groups": dimension(config, "n_group"),
            "topk_groups": dimension(config, "topk_group"),
        }
        routing |= groups
    return MoEConfig(
        num_experts=dimension(config, "n_routed_experts"),
        top_k=dimension(config, "num_experts_per_tok"),
        intermediate_size=size,
        shared_size=size * _count(config, "n_shared_experts", 0),
        scaling_factor=_number(config, "routed_scaling_factor"),
        sparse_layers=_sparse_layers(config),
        float32_router=True,
        **routing,
    )


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(
            f"config.json: {key}={value!r}", "must be a number", "mend config.json"
        )
    return float(value)


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The integer `config[key]` from 0 on; null and absent are `default`."""
    value = config.get(key)
    value = default if value is None else value
    if value == 0 and not isinstance(value, bool):
        return 0
    return dimension({key: value}, key)
