"""Qwen2, Qwen3, Qwen3-MoE and Mistral against transformers' on tiny random checkpoints.

The checks are in `beside.py`. Windows are of 70 positions, and texts are longer than that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.checkpoint import read_config
from eyas.errors import CheckpointError
from eyas.model_config import ModelConfig
from eyas.models.families import model_config
from eyas.models.registry import load_target
from tests.models.beside import (
    CPU,
    Pair,
    check_both_conventions,
    check_boundaries,
    check_chunks,
    check_prefill,
    check_single_tokens,
    check_tree,
)

WINDOW = {"use_sliding_window": True, "sliding_window": 70}
TYPES = ["sliding_attention", "full_attention"] * 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "norm_topk_prob": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("Qwen2", {**WINDOW, "max_window_layers": 2}),
    "qwen2, window nowhere": ("Qwen2", {**WINDOW, "max_window_layers": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "qwen3, layer types": ("Qwen3", {"head_dim": 32, **WINDOW, "layer_types": TYPES}),
    "qwen3, one kv head": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "moe": ("Qwen3Moe", MOE),
    "moe, not normalised": ("Qwen3Moe", {**MOE, "norm_topk_prob": False}),
    "moe, every second layer": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2}),
    "moe, dense layers": ("Qwen3Moe", {**MOE, "mlp_only_layers": [0, 3]}),
    "moe, one expert": ("Qwen3Moe", {**MOE, "num_experts_per_tok": 1}),
    "moe, window": ("Qwen3Moe", {**MOE, **WINDOW}),
    "moe, biases": ("Qwen3Moe", {**MOE, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 70, "head_dim": 32}),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    save_model: Callable[..., Any],
) -> Pair:
    """Ours and transformers' network of one tiny checkpoint."""
    folder: Path = tmp_path_factory.mktemp("model")
    family, changes = VARIANTS[request.param]
    reference = save_model(folder, family=family, **changes)
    return load_target(folder, torch.float32, CPU), reference


def test_one_shot_prefill(pair: Pair) -> None:
    """Fault: a head norm, a bias or the routing wrong or left out; a window off by one."""
    check_prefill(pair)


@pytest.mark.parametrize("page_size", [7, 64])
def test_chunked_prefill(pair: Pair, page_size: int) -> None:
    """Fault: windows counted from a chunk's start."""
    check_chunks(pair, page_size)


def test_token_by_token(pair: Pair) -> None:
    """Fault: decode differs from prefill."""
    check_single_tokens(pair, 90)


@pytest.mark.parametrize("count", [5, 24])
def test_verify_pass_over_a_random_tree(pair: Pair, count: int) -> None:
    """Fault: windows counted from a node's place instead of its position."""
    check_tree(pair, count, 100)


def test_aux_states_are_the_boundaries(pair: Pair) -> None:
    """Fault: aux layer ids off by one (v#43671)."""
    check_boundaries(pair)


def test_outputs_are_the_next_boundaries(pair: Pair) -> None:
    """Fault: ids of outputs read as boundaries."""
    check_both_conventions(pair)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def read(architecture: str, **changes: Any) -> ModelConfig:
    """The config of a Qwen or Mistral as its checkpoint writes it."""
    return model_config({**QWEN3, "architectures": [architecture], **changes})


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    """Fault: a head dim or window of another family; MoE switches taken for granted."""
    assert read("Qwen3ForCausalLM").head_dim == 128
    assert read("Qwen2ForCausalLM").head_dim == 16
    assert read("Qwen2ForCausalLM", sliding_window=100).windows == ()
    assert read("Qwen2ForCausalLM", use_sliding_window=True).windows == ()
    assert read("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=None).windows == ()
    assert read("MistralForCausalLM").windows == (4096,) * 4
    moe = read("Qwen3MoeForCausalLM", **EXPERTS).moe
    assert moe is not None
    assert not moe.normalize
    assert moe.sparse_layers == (True,) * 4
    named = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert read("Qwen3MoeForCausalLM", **named).moe == moe


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MistralForCausalLM", {"sliding_window": 63}, "must hold the 64 nodes"),
        ("MistralForCausalLM", {"sliding_window": "wide"}, "must be a positive integer"),
        ("Qwen3ForCausalLM", {"layer_types": TYPES}, "needs use_sliding_window"),
        ("Qwen3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "full_attention or"),
        ("Qwen2ForCausalLM", {"layer_types": TYPES[:2]}, "once for each of 4 layers"),
        ("Qwen3MoeForCausalLM", {}, "num_local_experts=None: must be a positive integer"),
        (
            "Qwen3MoeForCausalLM",
            {**EXPERTS, "use_sliding_window": True, "max_window_layers": 2},
            "max_window_layers=2",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    """Fault: an ambiguous or impossible config runs with other arithmetic."""
    with pytest.raises(CheckpointError, match=message):
        read(architecture, **changes)


def test_a_missing_expert_is_named(tmp_path: Path, save_model: Callable[..., Any]) -> None:
    """Fault: a checkpoint with fewer experts than its config runs with empty memory."""
    save_model(tmp_path, family="Qwen3Moe", **MOE)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 9}))
    assert model_config(read_config(tmp_path)).moe is not None
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight.*\[8, 64\]|experts\.8\."):
        load_target(tmp_path, torch.float32, CPU)
