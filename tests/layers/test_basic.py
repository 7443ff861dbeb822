"""Norm and MLP against their formulas and transformers' own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.layers.basic import GatedMLP, RMSNorm


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
