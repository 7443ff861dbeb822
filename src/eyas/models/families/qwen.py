"""Qwen2, Qwen3 and Qwen3-MoE (transformers' `models/qwen2`, `qwen3`, `qwen3_moe`).

Llama's decoder with biased queries, keys and values (Qwen2), or with a norm over each head (Qwen3).
"""

from __future__ import annotations

from typing import Any

from eyas.errors import CheckpointError
from eyas.model_config import ModelConfig, MoEConfig
from eyas.models.families.reading import WINDOW, common_fields, dimension, windows


def read_qwen2(config: dict[str, Any]) -> ModelConfig:
    """`Qwen2ForCausalLM`."""
    fields = common_fields(config)
    sliding = _sliding_layers(config, fields["num_layers"])
    return ModelConfig(**fields, qkv_bias=True, windows=windows(config, sliding))


def read_qwen3(config: dict[str, Any]) -> ModelConfig:
    """`Qwen3ForCausalLM`."""
    fields = common_fields({"head_dim": 128, **config})
    sliding = _sliding_layers(config, fields["num_layers"])
    return ModelConfig(**fields, **_normed(config), windows=windows(config, sliding))


def read_qwen3_moe(config: dict[str, Any]) -> ModelConfig:
    """`Qwen3MoeForCausalLM`.

    Raises `CheckpointError` for a window that starts at some layer: readers differ over which.
    """
    fields = common_fields(config)
    num_layers = fields["num_layers"]
    slides = _slides(config)
    if slides and config.get("max_window_layers"):
        raise CheckpointError(
            f"max_window_layers={config['max_window_layers']!r} with use_sliding_window",
            "transformers gives every layer of a Qwen3-MoE the window, others some",
            "remove max_window_layers if every layer has it",
        )
    return ModelConfig(
        **fields,
        **_normed(config),
        windows=windows(config, [slides] * num_layers),
        moe=_experts(config, num_layers),
    )


def _normed(config: dict[str, Any]) -> dict[str, Any]:
    biased = bool(config.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": biased, "o_bias": biased}


def _slides(config: dict[str, Any]) -> bool:
    """Whether there is a window at all."""
    wanted = bool(config.get("use_sliding_window", False))
    return wanted and config.get("sliding_window", WINDOW) is not None


def _sliding_layers(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Which layers have the window: `layer_types`, or those from `max_window_layers` on."""
    slides = _slides(config)
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        return [slides and layer >= first for layer in range(num_layers)]
    known = {"full_attention": False, "sliding_attention": True}
    if len(types) != num_layers or any(kind not in known for kind in types):
        raise CheckpointError(
            f"layer_types {types!r}",
            f"must be full_attention or sliding_attention, once for each of {num_layers} layers",
            "mend config.json",
        )
    sliding = [known[kind] for kind in types]
    if any(sliding) and not slides:
        raise CheckpointError(
            "layer_types with sliding_attention",
            "needs use_sliding_window and a sliding_window",
            "mend config.json",
        )
    return sliding


def _experts(config: dict[str, Any], num_layers: int) -> MoEConfig:
    """Experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`.

    transformers 5 writes `num_experts` as `num_local_experts`.
    """
    written = "num_experts" if "num_experts" in config else "num_local_experts"
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return MoEConfig(
        num_experts=dimension(config, written),
        top_k=dimension(config, "num_experts_per_tok"),
        intermediate_size=dimension(config, "moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob", False)),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
