"""Norm, rotary and MLP against their formulas and transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eyas.attention.rope import rotate
from eyas.layers.basic import GatedMLP, RMSNorm, Rotary
from eyas.model_config import RopeConfig

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
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_is_llamas(dtype: torch.dtype) -> None:
    """Fault: statistics in 16 bits, or the weight multiplied before the cast."""
    torch.manual_seed(0)
    ours, theirs = RMSNorm(64, 1e-5).to(dtype), LlamaRMSNorm(64, 1e-5).to(dtype)
    values = torch.randn(64).to(dtype)
    ours.weight.data.copy_(values)
    theirs.weight.data.copy_(values)
    x = torch.randn(50, 64).to(dtype) * 30
    assert torch.allclose(ours(x), theirs(x), rtol=1e-5 if dtype == torch.float32 else 8e-3)
    alone = torch.cat([ours(row[None]) for row in x])
    assert torch.equal(ours(x), alone), "a row's norm depends on other rows"


@pytest.mark.parametrize(("rope", "parameters"), ROPES, ids=["default", "linear", "llama3"])
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


def test_mlp_is_swiglu() -> None:
    """Fault: gate and up exchanged."""
    torch.manual_seed(0)
    mlp = GatedMLP(8, 12, "mlp")
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 8)
    gate, up = mlp.gate_up.weight[:12], mlp.gate_up.weight[12:]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.weight.T
    assert torch.allclose(mlp(x), expected, rtol=1e-4, atol=1e-4)
    assert list(mlp.gate_up.parts) == ["mlp.gate_proj", "mlp.up_proj"]
