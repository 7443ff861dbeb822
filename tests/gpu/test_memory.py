"""The predicted memory of a GPU is what its allocator hands out, and what graphs keep besides."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eyas.config import SamplingParams
from eyas.engine.budget import Load, predict
from eyas.engine.memory import free_memory
from tests.helpers import (
    LATENT,
    Job,
    chain,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_target,
)
from tests.measuring import DEEPSEEK, LLAMA, case_of, shapes_of

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "max_position": 4096}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({**LLAMA, **WIDE, "head_dim": 128}, {}),
    "qwen3 moe": ({**LLAMA, **WIDE, "qk_norm": True, "moe": tiny_experts(8)}, {}),
    "deepseek": ({**DEEPSEEK, **WIDE}, {"mla": LATENT}),
}
"""Weights and pools of some hundred megabytes each."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No memory of other tests; the matrix library's workspace is there already, one of it."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    x = torch.ones(64, 64, device=DEVICE, dtype=torch.bfloat16)
    (x @ x).sum()
    torch.cuda.synchronize()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", MODELS)
def test_the_allocator_agrees(name: str, graphs: bool) -> None:
    """Fault: draft weights, logits or graphs missing from the budget (s#6875, v PR#54418)."""
    target_sizes, drafter_sizes = MODELS[name]
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    network = tiny_drafter(
        torch.bfloat16,
        device=DEVICE,
        vocab_size=8192,
        draft_vocab_size=2000,
        hidden_size=1024,
        target_hidden_size=1024,
        intermediate_size=3072,
        max_position=4096,
        **drafter_sizes,
    )
    target = tiny_target(torch.bfloat16, device=DEVICE, **target_sizes)
    engine = make_engine(
        target, network, chain(4), max_running_requests=8, disable_cuda_graph=not graphs
    )
    prefills, cycles = shapes_of(engine)
    params = SamplingParams(max_tokens=16)
    jobs = [Job(prompt=p, params=params) for p in random_prompts((900, 200, 50), vocab=8192)]
    run_all(engine, jobs)
    case = case_of(engine, network)
    largest = Load.largest(case).cycles if graphs else tuple(set(cycles))
    budget = predict(case, Load(prefills=tuple(set(prefills)), cycles=largest))
    peak = torch.cuda.max_memory_allocated() - allocated
    assert abs(budget.peak / peak - 1) < 0.05, f"{budget.peak} predicted, {peak} measured"
    kept = torch.cuda.max_memory_reserved() - reserved
    assert kept < 1.2 * budget.total + 2**28, f"{kept} reserved for {budget.total}"


def test_free_memory_counts_the_cache() -> None:
    """Fault: memory that torch keeps for reuse taken for used."""
    before = free_memory(DEVICE)
    block = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    held = free_memory(DEVICE)
    del block
    after = free_memory(DEVICE)
    assert before is not None
    assert held is not None
    assert after is not None
    assert before - held >= 2**28
    assert after - held >= 2**28
