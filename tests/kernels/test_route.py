"""The routing kernel equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.kernels import route as module
from eyas.model_config import MoEConfig
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu

CASES: dict[str, dict[str, Any]] = {
    "qwen": {"num_experts": 128, "top_k": 8},
    "v2-lite": {"num_experts": 64, "top_k": 6, "normalize": False},
    "v2": {
        "num_experts": 160,
        "top_k": 6,
        "num_groups": 8,
        "topk_groups": 3,
        "normalize": False,
        "scaling_factor": 16.0,
    },
    "v3": {
        "num_experts": 256,
        "top_k": 8,
        "num_groups": 8,
        "topk_groups": 4,
        "group_score": "top2",
        "scoring": "sigmoid",
        "correction_bias": True,
        "scaling_factor": 2.5,
    },
    "kimi": {
        "num_experts": 384,
        "top_k": 8,
        "scoring": "sigmoid",
        "correction_bias": True,
        "scaling_factor": 2.827,
    },
}


def run_grid() -> None:
    """Every family's router on random rows, then on rows of ties and of what is not finite."""
    for case, settings in CASES.items():
        config = MoEConfig(intermediate_size=8, **settings)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(12, config.num_experts, generator=generator).to(DEVICE)
        bias = torch.randn(config.num_experts, generator=generator).to(DEVICE) * 0.1
        given = bias if config.correction_bias else None
        ids, weights = module.route_triton(logits, config, given)
        wanted, wanted_weights = module.route_reference(logits, config, given)
        assert torch.equal(ids, wanted), case
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
        alone = module.route_triton(logits[3:4], config, given)
        assert torch.equal(alone[1][0], weights[3]), f"{case}: a row depends on others"
        strange = torch.zeros(4, config.num_experts, device=DEVICE)
        strange[1], strange[2], strange[3, 5] = torch.nan, -torch.inf, torch.inf
        ids, _ = module.route_triton(strange, config)
        assert all(len(set(row)) == config.top_k for row in ids.tolist()), f"{case}: {ids}"
        assert int(ids.min()) >= 0
        assert int(ids.max()) < config.num_experts
        if config.num_groups == 1:
            assert ids[0].tolist() == list(range(config.top_k)), "ties go to the lower expert"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: padded lanes chosen, groups mixed up, bias in the weights, an expert twice."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize("groups", [1, 8])
def test_compiles_for_hopper(groups: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    types = {"logits_ptr": "*bf16", "bias_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
    sizes = {"GROUPS": groups, "MEMBERS": 32, "TOP_K": 8, "TOP_GROUPS": min(groups, 4)}
    blocks = {"GROUP_BLOCK": groups, "MEMBER_BLOCK": 32, "K_BLOCK": 8}
    kind = {"SIGMOID": groups > 1, "BIASED": True, "TOP2": True, "NORMALIZE": True}
    compiles(module._route_kernel, types | {"factor": "fp32"}, sizes | blocks | kind, num_warps=1)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("num_experts", [5, 7, 60, 64])
def test_a_row_of_the_reference_has_its_own_bits(num_experts: int, scoring: str) -> None:
    """Fault: a library that computes the last numbers of a tensor otherwise than the others."""
    config = MoEConfig(num_experts=num_experts, top_k=4, intermediate_size=8, scoring=scoring)
    logits = torch.randn(50, num_experts, generator=torch.Generator().manual_seed(0)) * 3
    _, together = module.route_reference(logits, config)
    alone = [module.route_reference(logits[i : i + 4], config)[1] for i in range(0, 48, 4)]
    assert torch.equal(torch.cat(alone), together[:48])


if __name__ == "__main__":
    run_grid()
