"""Targets and drafters with latent attention: the text is plain decoding's, token for token.

DeepSeek-V3's form: latent pool, experts in all layers but the first, sigmoid routing in groups.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.helpers import (
    LATENT,
    Job,
    ScriptedDrafter,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_target,
)

DIRECT = dataclasses.replace(LATENT, q_lora_rank=0, scale=1.5 * 48**-0.5)
TARGETS: dict[str, dict[str, Any]] = {
    "v3": {"mla": LATENT, "moe": tiny_experts()},
    "dense, direct queries": {"mla": DIRECT},
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {
    "chain": chain(3),
    "tree": SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=12),
}
JOBS = [
    Job(
        prompt=prompt,
        params=SamplingParams(max_tokens=24, temperature=float(i % 2), seed=i, top_p=0.9),
    )
    for i, prompt in enumerate(random_prompts([5, 33, 1, 50, 16]))
]


@cache
def world(name: str, dtype: str) -> tuple[Decoder, list[list[int]]]:
    """A target and the texts of plain decoding, each request alone."""
    target = tiny_target(TYPES[dtype], **TARGETS[name])
    return target, alone(target, JOBS)


@cache
def drafter(kind: str, dtype: str) -> Eagle3:
    return tiny_drafter(TYPES[dtype], mla=LATENT if kind == "latent drafter" else None)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["heads drafter", "latent drafter"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_texts_are_plain_decodings(
    name: str, dtype: str, kind: str, shape: str, batch: int
) -> None:
    """Fault: latent keys moved or masked wrongly in verify, experts that depend on company."""
    target, expected = world(name, dtype)
    assert len({tuple(text) for text in expected}) == len(JOBS), "the texts are worth comparing"
    config: dict[str, Any] = {"max_running_requests": batch, "chunked_prefill_size": 16}
    engine = make_engine(target, drafter(kind, dtype), SHAPES[shape], **config)
    assert outputs(run_all(engine, JOBS)) == expected


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_accepted_paths_read_as_text(name: str, dtype: str) -> None:
    """Fault: accepted nodes whose latents are not moved together. Every draft path is right."""
    target, expected = world(name, dtype)
    texts = [[*job.prompt, *text] for job, text in zip(JOBS, expected, strict=True)]
    shape = SpeculationConfig(num_steps=4, eagle_topk=3, num_draft_tokens=13)
    engine = make_engine(target, ScriptedDrafter(texts, shape), shape, max_running_requests=5)
    requests = run_all(engine, JOBS)
    assert outputs(requests) == expected
    assert all(max(r.accept_lengths) == 5 for r in requests)
