"""Mistral: Llama's decoder with a window in every layer (transformers' `models/mistral`)."""

from __future__ import annotations

from typing import Any

from eyas.model_config import ModelConfig
from eyas.models.families.reading import WINDOW, common_fields, windows


def read_mistral(config: dict[str, Any]) -> ModelConfig:
    """`MistralForCausalLM`; a null `sliding_window` is none."""
    fields = common_fields(config)
    slides = config.get("sliding_window", WINDOW) is not None
    return ModelConfig(**fields, windows=windows(config, [slides] * fields["num_layers"]))
