"""Which architectures run here, and how each one's config is read: one file a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas.errors import CheckpointError
from eyas.model_config import ModelConfig
from eyas.models.families.deepseek import read_deepseek_v2, read_deepseek_v3, read_kimi
from eyas.models.families.llama import read_llama
from eyas.models.families.mistral import read_mistral
from eyas.models.families.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from eyas.models.families.reading import refuse_unknown_arithmetic, understood

READERS: dict[str, Callable[[dict[str, Any]], ModelConfig]] = {
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "KimiK25ForConditionalGeneration": read_kimi,
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
}
"""Architecture -> reader of its config."""

REFUSED = {
    "GptOssForCausalLM": "attention sinks, experts with clamps and biases, and MXFP4 weights are "
    "not implemented",
}
"""Architecture -> why it does not run here."""


def model_config(config: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a Hugging Face config dict (`checkpoint.read_config`).

    Raises `CheckpointError` for other architectures and for arithmetic that is not implemented.
    """
    given = config.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    known = next((name for name in names if name in READERS), None)
    if known is None:
        reason = next((REFUSED[name] for name in names if name in REFUSED), "not implemented")
        raise CheckpointError(
            f"architecture {', '.join(names) or config.get('model_type')!r}",
            reason,
            f"use a checkpoint of {', '.join(READERS)}",
        )
    with understood():
        refuse_unknown_arithmetic(config)
        return READERS[known](config)
