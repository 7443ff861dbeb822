"""Speculation leaves the text of every kind of grouped-query target as plain decoding writes it.

Head norms, biases, sliding windows and experts, alone and in a batch of five, by chains and trees,
with drafts of a random network and with drafts that are mostly right.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine import runner
from eyas.model_config import MoEConfig
from eyas.models.decoder import Decoder
from tests.engine.guard import no_host_reads
from tests.helpers import (
    TREES,
    Job,
    ScriptedDrafter,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)

MOE = MoEConfig(
    num_experts=8, top_k=3, intermediate_size=32, sparse_layers=(True, False, True, True)
)
GROUPED = MoEConfig(
    num_experts=16,
    top_k=4,
    intermediate_size=32,
    shared_size=32,
    scoring="sigmoid",
    float32_router=True,
    correction_bias=True,
    num_groups=4,
    topk_groups=2,
    group_score="top2",
    scaling_factor=2.5,
    sparse_layers=(False, True, True, True),
)
TARGETS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "windows": {"qk_norm": True, "windows": (0, 64, 0, 70)},
    "qwen3-moe": {"qk_norm": True, "moe": MOE},
    "grouped experts": {"moe": GROUPED},
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
JOBS = [
    Job(prompt=prompt, params=SamplingParams(max_tokens=18, temperature=t, seed=i))
    for i, (prompt, t) in enumerate(
        zip(random_prompts([80, 5, 33, 1, 61], seed=2), (0.0, 0.0, 0.0, 0.7, 1.0), strict=True)
    )
]
SCRIPTED = {
    "scripted chain": chain(5),
    "scripted tree": SpeculationConfig(num_steps=4, eagle_topk=3, num_draft_tokens=13),
}
DRAFTED = {"chain": chain(4), "tree": TREES[1], **SCRIPTED}
CASES = [*(("fp32", name) for name in ("chain", "tree")), *(("bf16", name) for name in SCRIPTED)]
"""Bits show best in bfloat16, where a path is long: there drafts are right."""


@cache
def world(name: str, dtype: str) -> tuple[Decoder, list[list[int]]]:
    """A target, and the texts of `JOBS` by plain decoding, each alone."""
    target = tiny_target(TYPES[dtype], **TARGETS[name])
    return target, alone(target, JOBS)


@pytest.mark.parametrize(("dtype", "drafted"), CASES)
@pytest.mark.parametrize("name", TARGETS)
def test_speculation_writes_the_plain_text(name: str, dtype: str, drafted: str) -> None:
    """Fault: verify that differs from decode: other experts, another window, other bits."""
    target, expected = world(name, dtype)
    speculation = DRAFTED[drafted]
    texts = [[*job.prompt, *text] for job, text in zip(JOBS, expected, strict=True)]
    for batch in (1, 5):
        drafter: Any = tiny_drafter(TYPES[dtype])
        if drafted in SCRIPTED:
            drafter = ScriptedDrafter(texts, speculation, lambda index: index % 4 != 1)
        engine = make_engine(target, drafter, speculation, max_running_requests=batch)
        requests = run_all(engine, JOBS)
        assert outputs(requests) == expected, batch
        if drafted in SCRIPTED:
            assert max(max(r.accept_lengths) for r in requests) >= 4, "drafts are accepted"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_the_texts_are_worth_comparing(name: str, dtype: str) -> None:
    """A switch that changed nothing would be compared with itself."""
    _, expected = world(name, dtype)
    plain = tiny_target(TYPES[dtype], **{**TARGETS[name], "windows": ()})
    assert len({tuple(text) for text in expected}) == len(JOBS)
    assert sum(len(set(text)) > 3 for text in expected) >= 3, expected
    if TARGETS[name].get("windows"):
        assert alone(plain, JOBS) != expected, "texts are longer than the window"


@pytest.mark.parametrize("name", ["qwen3-moe", "grouped experts", "windows"])
def test_passes_read_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: experts' rows counted on the host inside the cycle."""
    target, expected = world(name, "fp32")
    calls = []
    for part in ("cycle", "prefill"):
        original = getattr(runner, part)

        def guarded(*args: Any, original: Any = original) -> torch.Tensor:
            calls.append(original)
            with no_host_reads():
                out: torch.Tensor = original(*args)
            return out

        monkeypatch.setattr(runner, part, guarded)
    assert outputs(run_all(make_engine(target, tiny_drafter(), TREES[1]), JOBS)) == expected
    assert len(set(calls)) == 2


def test_chunked_and_preempted_experts_write_the_same() -> None:
    """Fault: routing or windows counted from a chunk's start, or after a restart."""
    for name in ("qwen3-moe", "windows"):
        target, expected = world(name, "fp32")
        late = [dataclasses.replace(job, join=2 * i) for i, job in enumerate(JOBS)]
        config: dict[str, Any] = {"page_size": 4, "num_pages": 40, "chunked_prefill_size": 16}
        requests = run_all(make_engine(target, tiny_drafter(), chain(4), **config), late)
        assert outputs(requests) == expected, name
        assert any(r.num_preemptions for r in requests), "the pool is too large to preempt"
