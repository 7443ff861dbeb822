"""Rotary tables against transformers' own, every frequency scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.attention.rope import rotate
from eyas.layers.rotary import Rotary
from eyas.model_config import RopeConfig

YARNS: tuple[dict[str, Any], ...] = (
    {},
    {"beta_fast": 2.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"beta_fast": 16.0, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 1.3},
    {"attention_factor": 1.7, "truncate": False},
    {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
    {"factor": 0.5},
)
"""Spelt alike here and in a checkpoint's config."""
ROPES: list[tuple[RopeConfig, dict[str, Any]]] = [
    (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    (
        RopeConfig(theta=500000.0, kind="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
    ),
    (
        RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=256,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    *(
        (
            RopeConfig(
                theta=5e4, kind="yarn", original_max_position=64, **{"factor": 32.0, **yarn}
            ),
            {
                "rope_type": "yarn",
                "rope_theta": 5e4,
                "original_max_position_embeddings": 64,
                "factor": 32.0,
                **yarn,
            },
        )
        for yarn in YARNS
    ),
]
NAMES = ["default", "linear", "llama3", *(f"yarn {i}" for i in range(len(YARNS)))]


@pytest.mark.parametrize(("rope", "parameters"), ROPES, ids=NAMES)
def test_rotary_is_transformers(rope: RopeConfig, parameters: dict[str, Any]) -> None:
    """Fault: positions off by one, wrong halves, wrong frequency scaling."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 63, 64, 200, 511])
    x = torch.randn(7, 4, 16)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = rotate(x, Rotary(rope, 16, 512)(positions))
    assert torch.allclose(ours, theirs[0].transpose(0, 1), atol=1e-5)
