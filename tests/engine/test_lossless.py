"""A request's text is its own: the same with any drafter, tree, batch, chunking or preemption.

The reference is plain decoding, each request alone in a fresh engine. No tolerance: token for
token, in float32 and in bfloat16, greedy and sampled, with and without filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.drafters import Network
from eyas.engine.engine import Engine
from eyas.models.decoder import Decoder
from eyas.speculate.drafter import NGramDrafter, NoDrafter
from eyas.speculate.eagle3 import Eagle3Drafter
from eyas.speculate.standalone import StandaloneDrafter
from tests.helpers import (
    NONE,
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
    tiny_model,
    tiny_target,
)

PARAMS = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=24, temperature=0.7, seed=1),
    SamplingParams(max_tokens=30, temperature=1.0, seed=2),
    SamplingParams(max_tokens=17, temperature=1.0, seed=3, top_k=5),
    SamplingParams(max_tokens=30, temperature=0.7, seed=2**62 + 7, top_p=0.8),
    SamplingParams(max_tokens=25, temperature=1.0, seed=5, min_p=0.1),
    SamplingParams(max_tokens=30, temperature=0.7, seed=6, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=1, temperature=1.0, seed=7),
    SamplingParams(max_tokens=29, top_k=3, top_p=0.1),
]
JOINS = [0, 0, 3, 5, 1, 0, 9, 2, 14]
JOBS = [
    Job(prompt=prompt, params=params)
    for prompt, params in zip(
        random_prompts([5, 17, 33, 1, 50, 16, 2, 31, 15]), PARAMS, strict=True
    )
]
LATE = [
    Job(prompt=job.prompt, params=job.params, join=join)
    for job, join in zip(JOBS, JOINS, strict=True)
]

CONFIGS: dict[str, tuple[list[Job], dict[str, Any]]] = {
    "together": (JOBS, {"max_running_requests": 16}),
    "three, late, chunked": (
        LATE,
        {"max_running_requests": 3, "page_size": 1, "chunked_prefill_size": 7},
    ),
    "preempted": (LATE, {"page_size": 4, "num_pages": 38, "chunked_prefill_size": 16}),
    "one by one": (JOBS, {"max_running_requests": 1, "page_size": 64}),
}


def often_right(index: int) -> bool:
    return index % 4 != 1


DRAFTED: dict[str, SpeculationConfig] = {
    "none": NONE,
    **{f"ngram {k}": chain(k, "NGRAM") for k in (1, 4, 8)},
    **{f"eagle {k}": chain(k) for k in range(1, 9)},
    **{f"tree {t.num_steps}-{t.eagle_topk}-{t.num_draft_tokens}": t for t in TREES},
    "eagle 4, as prefill": chain(4, attention_mode="prefill"),
    "eagle 4, plain top-k": chain(4, shared_noise=False),
    **{f"standalone {k}": chain(k, "STANDALONE") for k in (1, 4)},
    "standalone tree": dataclasses.replace(TREES[1], algorithm="STANDALONE"),
    "scripted 5": chain(5),
    "scripted tree": SpeculationConfig(num_steps=4, eagle_topk=3, num_draft_tokens=13),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


IN_BF16 = ("none", "ngram 4", "eagle 4", "tree 3-3-12", "scripted tree", "standalone tree")
KINDS = {
    "NONE": NoDrafter,
    "NGRAM": NGramDrafter,
    "EAGLE3": Eagle3Drafter,
    "STANDALONE": StandaloneDrafter,
}


class World:
    """A target with its drafters and the reference texts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.target: Decoder = tiny_target(dtype)
        self.networks: dict[str, Network] = {
            "EAGLE3": tiny_drafter(dtype),
            "STANDALONE": tiny_model(dtype),
        }
        self.expected = alone(self.target, JOBS)

    def engine(self, name: str, **config: Any) -> Engine:
        speculation = DRAFTED[name]
        if not name.startswith("scripted"):
            network = self.networks.get(speculation.algorithm, self.networks["EAGLE3"])
            engine = make_engine(self.target, network, speculation, **config)
            assert type(engine.runner.parts.drafter) is KINDS[speculation.algorithm]
            return engine
        texts = [[*j.prompt, *out] for j, out in zip(JOBS, self.expected, strict=True)]
        drafter = ScriptedDrafter(texts, speculation, often_right)
        return make_engine(self.target, drafter, speculation, **config)


@cache
def world(dtype: str) -> World:
    return World(TYPES[dtype])


CASES = [*(("fp32", name) for name in DRAFTED), *(("bf16", name) for name in IN_BF16)]


@pytest.mark.parametrize(("dtype", "drafted"), CASES)
def test_texts_do_not_depend_on_how_they_are_made(dtype: str, drafted: str) -> None:
    """Fault: speculation that changes the text; seeds that depend on the batch (s PR#30822).

    Also stale output or wrong noise after preemption (v#41190, s PR#28254) and chunked prefill.
    """
    names: Sequence[str] = list(CONFIGS) if drafted in ("none", "eagle 4") else list(CONFIGS)[:3]
    for name in names:
        jobs, config = CONFIGS[name]
        requests = run_all(world(dtype).engine(drafted, **config), jobs)
        assert outputs(requests) == world(dtype).expected, name
        if name == "preempted":
            assert any(r.num_preemptions for r in requests), "the pool is too large to preempt"


@pytest.mark.parametrize("dtype", TYPES)
def test_the_references_are_worth_comparing(dtype: str) -> None:
    """The texts above differ from each other and do not fall into a single token."""
    expected = world(dtype).expected
    assert len({tuple(text) for text in expected}) == len(JOBS)
    assert all(len(set(text)) > 3 for text in expected if len(text) > 1)
    assert [len(t) for t in expected] == [p.max_tokens for p in PARAMS]


def test_trees_are_lossless_to_the_bit() -> None:
    """Fault: a tree verified with other rounding than plain decoding; bfloat16 shows it first.

    Texts of 16 requests follow the scattered path of a tree for 200 tokens. Before attention took
    a path's keys in their order, 1 of 16 texts differed.
    """
    target = tiny_target(torch.bfloat16, vocab_size=2048)
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=200, temperature=float(i % 2), seed=i))
        for i, p in enumerate(random_prompts([10] * 16, seed=3, vocab=2048))
    ]
    expected = outputs(run_all(make_engine(target, max_running_requests=16), jobs))
    texts = [[*j.prompt, *text] for j, text in zip(jobs, expected, strict=True)]
    shape = SpeculationConfig(num_steps=6, eagle_topk=3, num_draft_tokens=19)
    drafter = ScriptedDrafter(texts, shape, vocab=2048)
    requests = run_all(make_engine(target, drafter, shape, max_running_requests=16), jobs)
    assert outputs(requests) == expected
    assert all(set(r.accept_lengths[:-1]) == {7} for r in requests)


def test_other_seeds_and_temperatures_give_other_texts() -> None:
    """Fault: sampling silently greedy (s#39253), or a seed that is not read."""
    prompt = JOBS[0].prompt
    params = [SamplingParams(max_tokens=20)]
    params += [
        SamplingParams(max_tokens=20, temperature=t, seed=s) for t in (0.7, 1.0) for s in (1, 2)
    ]
    texts = outputs(
        run_all(world("fp32").engine("eagle 3"), [Job(prompt=prompt, params=p) for p in params])
    )
    assert len({tuple(text) for text in texts}) == len(params)


def test_a_request_without_seed_takes_the_engines() -> None:
    """Fault: a text that cannot be repeated. The engine's seed is the request's."""
    target, prompt = tiny_target(), JOBS[0].prompt
    without = Job(prompt=prompt, params=SamplingParams(max_tokens=9, temperature=1.0))
    given = Job(prompt=prompt, params=SamplingParams(max_tokens=9, temperature=1.0, seed=77))
    first = outputs(run_all(make_engine(target, seed=77), [without]))
    assert first == outputs(run_all(make_engine(target), [given]))
    assert first != outputs(run_all(make_engine(target), [without]))


def test_a_long_generation_fills_the_context() -> None:
    """Fault: overrun at the end of the context, where drafts would pass it."""
    target, network = tiny_target(max_position=96), tiny_drafter(max_position=96)
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=1000, temperature=t, seed=4))
        for p, t in zip(random_prompts([1, 60, 95]), (0.0, 1.0, 1.0), strict=True)
    ]
    expected = alone(target, jobs)
    assert [len(text) for text in expected] == [95, 36, 1]
    model = tiny_model(max_position=96)
    for speculation in (chain(8), TREES[2], chain(8, "NGRAM"), chain(8, "STANDALONE")):
        drafter = model if speculation.algorithm == "STANDALONE" else network
        engine = make_engine(target, drafter, speculation, page_size=16)
        requests = run_all(engine, jobs)
        assert outputs(requests) == expected
        assert all(r.finish_reason is not None for r in requests)
        assert {r.finish_reason.value for r in requests if r.finish_reason} == {"length"}
