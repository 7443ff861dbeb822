"""Routing and the routed layer against transformers' modules of DeepSeek-V2, V3 and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from eyas.distributed.group import SOLO, Group
from eyas.errors import ConfigError
from eyas.kernels.route import route
from eyas.layers.moe import RoutedMLP
from eyas.model_config import MoEConfig
from eyas.models.registry import allocate, fill
from tests.kernels.running import on_gpu

CPU = torch.device("cpu")
HIDDEN, SIZE, EXPERTS = 64, 48, 16
PREFIX = "model.layers.3.mlp"
SIZES = {"num_experts": EXPERTS, "intermediate_size": SIZE}
DEEPSEEK: dict[str, Any] = {"float32_router": True, "shared_size": 2 * SIZE, **SIZES}
V2_GROUPS = {"num_groups": 4, "topk_groups": 2}
V3: dict[str, Any] = {
    **DEEPSEEK,
    "scoring": "sigmoid",
    "correction_bias": True,
    "group_score": "top2",
    "top_k": 4,
    "scaling_factor": 2.5,
}

CASES: dict[str, dict[str, Any]] = {
    "qwen": {**SIZES, "top_k": 4},
    "qwen, not normalised": {**SIZES, "top_k": 3, "normalize": False},
    "qwen, all": {**SIZES, "top_k": 16},
    "v2": {**DEEPSEEK, "top_k": 6, "normalize": False, "scaling_factor": 16.0},
    "v2, groups": {**DEEPSEEK, "top_k": 6, "normalize": False, **V2_GROUPS},
    "v3": {**V3, "num_groups": 4, "topk_groups": 2},
    "v3, eight groups": {**V3, "num_groups": 8, "topk_groups": 3},
    "v3, not normalised": {**V3, "num_groups": 4, "topk_groups": 2, "normalize": False},
    "kimi": {**V3, "scaling_factor": 2.827},
}


def theirs(config: MoEConfig) -> nn.Module:
    """transformers' layer of the same dimensions."""
    common: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": SIZE,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.normalize,
    }
    if not config.shared_size:
        shape = transformers.Qwen3MoeConfig(num_experts=EXPERTS, **common)
        return qwen.Qwen3MoeSparseMoeBlock(shape)
    common |= {"n_shared_experts": 2, "routed_scaling_factor": config.scaling_factor}
    common |= {"n_group": config.num_groups, "topk_group": config.topk_groups}
    common |= {"n_routed_experts": EXPERTS}
    if config.correction_bias:
        return v3.DeepseekV3MoE(transformers.DeepseekV3Config(**common))
    method = "greedy" if config.num_groups == 1 else "group_limited_greedy"
    return v2.DeepseekV2Moe(transformers.DeepseekV2Config(topk_method=method, **common))


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors of transformers' `layer`: one of each projection an expert."""
    tensors = {}
    for name, tensor in layer.state_dict().items():
        if name == "experts.gate_up_proj":
            for number, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                tensors[f"experts.{number}.gate_proj.weight"] = gate
                tensors[f"experts.{number}.up_proj.weight"] = up
        elif name == "experts.down_proj":
            for number, down in enumerate(tensor):
                tensors[f"experts.{number}.down_proj.weight"] = down
        else:
            tensors[name] = tensor
    return {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}


def make(
    config: MoEConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, group: Group = SOLO
) -> RoutedMLP:
    """Ours, filled."""
    layer = RoutedMLP(config, HIDDEN, PREFIX, group)
    allocate(layer, dtype, CPU)
    fill(layer.places(), tensors.items())
    return layer


def both(case: str, dtype: torch.dtype) -> tuple[RoutedMLP, nn.Module]:
    """Our layer and theirs with the same random weights, ours by way of a checkpoint's names."""
    config = MoEConfig(**CASES[case])
    torch.manual_seed(0)
    other = theirs(config)
    for name, tensor in other.state_dict().items():
        tensor.normal_(0.0, 0.3 if name.endswith("bias") else 0.15)
    return make(config, tensors_of(other), dtype), other


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_the_layer_is_transformers(case: str) -> None:
    """Fault: wrong scores, groups, normalisation, scale or shared part; experts misplaced."""
    ours, other = both(case, torch.float32)
    x = rows(200)
    expected = other(x[None])[0]
    assert expected.abs().max() > 0.1, "the layer says something"
    assert torch.allclose(ours(x), expected, atol=1e-4)


@torch.inference_mode()
def test_the_bias_chooses_but_does_not_weigh() -> None:
    """Fault: correction bias in the weights, or lost: both change the choice or the sum."""
    config = MoEConfig(**{**CASES["kimi"], "scaling_factor": 1.0})
    bias = torch.zeros(EXPERTS)
    bias[5] = 10.0
    logits = torch.zeros(1, EXPERTS)
    logits[0, :3] = torch.tensor([3.0, 2.0, 1.0])
    ids, weights = route(logits, config, bias)
    assert ids[0].tolist() == [5, 0, 1, 2]
    scores = torch.tensor([0.0, 3.0, 2.0, 1.0]).sigmoid()
    assert torch.allclose(weights[0], scores / scores.sum())


def test_a_router_keeps_float32_in_a_bfloat16_network() -> None:
    """Fault: DeepSeek's bias and router weights rounded to 16 bits move tokens to other experts."""
    ours, other = both("v3", torch.bfloat16)
    router = ours.router
    assert router.bias is not None
    assert torch.equal(router.bias, other.state_dict()["gate.e_score_correction_bias"])
    assert torch.equal(router.weight, other.state_dict()["gate.weight"])
    assert ours.experts.down.dtype == torch.bfloat16
    assert both("qwen", torch.bfloat16)[0].router.weight.dtype == torch.bfloat16


@on_gpu
@torch.inference_mode()
def test_a_router_of_16_bits_is_kept_in_16_bits_on_a_gpu() -> None:
    """Fault: rounding where it loses something, or another result where it loses nothing."""
    x = rows(5, torch.bfloat16).cuda()
    for lost in (0.0, 1e-4):
        router = both("v3", torch.bfloat16)[0].router.cuda()
        router.weight.copy_(router.weight.bfloat16().float() + lost)
        before = router(x)
        router.settle()
        assert router.weight.dtype == (torch.float32 if lost else torch.bfloat16)
        assert torch.equal(router(x).weights, before.weights)
        assert torch.equal(router(x).ids, before.ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["qwen", "v2, groups", "v3", "kimi"])
@torch.inference_mode()
def test_a_row_alone_is_the_row_in_company(case: str, dtype: torch.dtype) -> None:
    """Fault: routing or experts that depend on the other rows of a pass (v#54506).

    Rows come padded as the decoder pads them, to 4 in float32 and 2 in bfloat16.
    """
    ours, _ = both(case, dtype)
    least = 4 if dtype == torch.float32 else 2
    x = rows(64, dtype)

    def padded(start: int, count: int) -> torch.Tensor:
        size = max(least, -(-count // 4) * 4 if dtype == torch.float32 else count)
        some = torch.zeros(size, HIDDEN, dtype=dtype)
        some[:count] = x[start : start + count]
        out = ours(some)
        assert not out[count:].any(), "padding stays zero"
        return out[:count]

    single = torch.cat([padded(i, 1) for i in range(64)])
    for count in (2, 3, 5, 8, 17, 33):
        for start in (0, 1, 7):
            assert torch.equal(padded(start, count), single[start : start + count]), (start, count)


class HalfGroup(Group):
    """One of two ranks, whose sums are left to the test."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x


@pytest.mark.parametrize("case", ["qwen", "v3"])
@torch.inference_mode()
def test_ranks_add_up_in_one_sum(case: str) -> None:
    """Fault: shares of gate and up taken from the wrong rows, shared experts added twice."""
    ours, other = both(case, torch.float32)
    x, total = rows(9), torch.zeros(9, HIDDEN)
    for rank in range(2):
        group = HalfGroup(rank)
        share = make(ours.router.config, tensors_of(other), torch.float32, group)
        assert share.experts.down.shape == (EXPERTS, HIDDEN, SIZE // 2)
        total += share(x)
        assert group.sums == 1
    assert torch.allclose(total, ours(x), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_groups": 3}, "groups are of one size"),
        ({"num_groups": 4, "topk_groups": 5}, "no more are chosen than there are"),
        ({"num_groups": 8, "topk_groups": 1}, "4 experts a token of 2"),
        ({"num_groups": 16, "topk_groups": 8, "group_score": "top2"}, "two experts at least"),
        ({"scoring": "tanh"}, "scored by tanh"),
    ],
)
def test_impossible_routing_is_refused(changes: dict[str, Any], message: str) -> None:
    """Fault: a config that fails deep inside a pass, or routes nowhere."""
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**{**SIZES, "top_k": 4, **changes})
