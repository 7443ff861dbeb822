"""Llama: grouped-query attention, SwiGLU, optional biases (transformers' `models/llama`)."""

from __future__ import annotations

from typing import Any

from eyas.model_config import ModelConfig
from eyas.models.families.reading import common_fields


def read_llama(config: dict[str, Any]) -> ModelConfig:
    """`LlamaForCausalLM`."""
    biased = bool(config.get("attention_bias", False))
    return ModelConfig(
        **common_fields(config),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
