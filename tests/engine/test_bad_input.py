"""Bad input: each a clear error before anything is touched, and the others go on.

Fault of all tests here: one malformed request takes the engine down. Messages give value, rule and
remedy; values of the wrong type would otherwise fail inside a step, with requests half planned.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import Engine
from eyas.errors import ConfigError, EyasError, RequestError
from tests.helpers import (
    Job,
    alone,
    chain,
    check,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)

TARGET, NETWORK = tiny_target(), tiny_drafter()
RUNNING = [
    Job(prompt=p, params=SamplingParams(max_tokens=16, temperature=t, seed=9))
    for p, t in zip(random_prompts([20, 5]), (0.0, 1.0), strict=True)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return alone(TARGET, RUNNING)


def refuse(engine: Engine, prompt: Any, params: SamplingParams) -> str:
    """Add a bad request; returns the message of its error."""
    with pytest.raises(RequestError) as caught:
        engine.add(prompt, params)
    check(engine)
    error = caught.value
    assert all((error.value, error.rule, error.remedy))
    return str(error)


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ((), "empty prompt: a prompt needs at least one token"),
    "negative id": ((3, -1), "token id -1: must lie in 0 .. 63"),
    "id past the vocabulary": ((64,), "token id 64: must lie in 0 .. 63"),
    "as long as the context": (tuple(range(60)) * 4, "prompt of 240 tokens: prompt and answer"),
    "floats": ((1.0, 2.0), "token that is no integer"),
    "text": ("abc", "token that is no integer"),
    "nested": (((1, 2),), "token that is no integer"),
    "nothing": ((None,), "token that is no integer"),
    "too many pages": (tuple(range(60)), "the pool has 25"),
}
FINE = SamplingParams(max_tokens=200)

VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "huge top_k": ({"top_k": 2**63}, "top_k=9223372036854775808: must be below 2"),
    "float top_k": ({"top_k": 2.5}, "top_k=2.5: must be an integer"),
    "float seed": ({"seed": 1.5}, "seed=1.5: must be an integer"),
    "float max_tokens": ({"max_tokens": 3.5}, "max_tokens=3.5: must be an integer"),
    "stop is a text": ({"stop": "END"}, "stop='END': must be a tuple"),
    "stop of bytes": ({"stop": (b"x",)}, "must hold strings"),
    "one stop token": ({"stop_token_ids": 5}, "stop_token_ids=5: must be a tuple"),
    "stop tokens of text": ({"stop_token_ids": ("a",)}, "must hold integers"),
}


@pytest.mark.parametrize("name", [*PROMPTS, *VALUES])
def test_a_bad_request_harms_no_other(name: str, expected: list[list[int]]) -> None:
    """Refused in the middle of a run, by name; the running requests' texts stay theirs."""
    config: dict[str, Any] = {"context_length": 240, "page_size": 8, "num_pages": 26}
    engine = make_engine(TARGET, NETWORK, chain(3), **config)
    if name in PROMPTS:
        prompt, message = PROMPTS[name]
        params = FINE
    else:
        changes, message = VALUES[name]
        prompt, params = (1, 2), SamplingParams(**{"temperature": 1.0, **changes})
    running = [engine.add(job.prompt, job.params) for job in RUNNING]
    while engine.scheduler.has_work:
        assert message in refuse(engine, prompt, params)
        engine.step()
        check(engine)
    assert outputs(running) == expected
    assert engine.scheduler.allocator.num_free == 25


PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"max_tokens": -1}, "max_tokens=-1: must be at least 1"),
    ({"temperature": -1.0}, "temperature=-1.0: must be finite and not negative"),
    ({"temperature": float("nan")}, "temperature=nan: must be finite"),
    ({"temperature": float("inf")}, "temperature=inf: must be finite"),
    ({"top_p": 0.0}, "top_p=0.0: must lie in (0, 1]"),
    ({"top_p": 1.5}, "top_p=1.5: must lie in (0, 1]"),
    ({"top_p": float("nan")}, "top_p=nan: must lie in (0, 1]"),
    ({"top_k": -1}, "top_k=-1: must not be negative"),
    ({"min_p": -0.1}, "min_p=-0.1: must lie in [0, 1]"),
    ({"min_p": 2.0}, "min_p=2.0: must lie in [0, 1]"),
    ({"stop": ("a", "")}, "a stop string must not be empty"),
    ({"seed": -1}, "seed=-1: must lie in 0 .. 2**63 - 1"),
    ({"seed": 2**63}, "must lie in 0 .. 2**63 - 1"),
]


@pytest.mark.parametrize(("changes", "message"), PARAMS, ids=str)
def test_sampling_parameters_are_checked(changes: dict[str, Any], message: str) -> None:
    """A value outside its range."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("config", [EngineConfig, SpeculationConfig, SamplingParams])
def test_unknown_keys_are_refused(config: Any) -> None:
    """A misspelt key would otherwise be silently dropped; the error lists the known ones."""
    with pytest.raises(ConfigError, match=r"unknown key 'max_token' for .*use one of "):
        config.from_dict({"max_token": 3})


ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int8"}, "dtype 'int8'"),
    ({"max_running_requests": 0}, "max_running_requests=0"),
    ({"page_size": 0}, "page_size=0"),
    ({"page_size": 2.5}, "page_size=2.5: must be an integer"),
    ({"chunked_prefill_size": 0}, "chunked_prefill_size=0"),
    ({"num_pages": -1}, "num_pages=-1"),
    ({"context_length": -1}, "context_length=-1"),
    ({"context_length": 257}, "context_length=257: the model's positions end at 256"),
    ({"seed": 2**63}, "seed=9223372036854775808"),
]


@pytest.mark.parametrize(("changes", "message"), ENGINES, ids=str)
def test_engine_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    """A setting that could not work, refused when the engine is made."""
    with pytest.raises(ConfigError) as caught:
        make_engine(TARGET, **changes)
    assert message in str(caught.value)


SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "MEDUSA"}, "algorithm 'MEDUSA'"),
    ({"num_steps": 0, "num_draft_tokens": 1}, "num_steps=0"),
    ({"num_steps": 3, "num_draft_tokens": 3}, "give num_draft_tokens=4"),
    ({"num_steps": 64, "num_draft_tokens": 65}, "64 bits"),
    ({"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 8}, "2..7 for 2 steps of top 2"),
    ({"num_steps": 20, "eagle_topk": 4, "num_draft_tokens": 8}, "(steps - 1) * topk <= 64"),
    ({"algorithm": "NGRAM", "eagle_topk": 2, "num_draft_tokens": 8}, "n-gram lookup drafts"),
]


@pytest.mark.parametrize(("changes", "message"), SHAPES, ids=str)
def test_tree_shapes_are_checked(changes: dict[str, Any], message: str) -> None:
    """A tree that cannot be drafted or verified."""
    with pytest.raises(ConfigError) as caught:
        SpeculationConfig(**changes)
    assert message in str(caught.value)


DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 128}, "vocab_size 128: is 64 here"),
    ({"target_hidden_size": 32, "own_embedding": True}, "hidden_size 32: is 64 here"),
    ({"aux_layers": (1, 2, 5)}, "boundaries (1, 2, 5): must be different ones in 0..4"),
    ({"aux_layers": (1, 1, 2)}, "boundaries (1, 1, 2): must be different"),
    ({"fused": False, "fc_norm": False, "aux_layers": (2,)}, "reads boundaries (2,) as they are"),
    ({"max_position": 100}, "drafter of 100 positions"),
    ({"draft_vocab_size": 2}, "the drafter knows 2 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), DRAFTERS, ids=str)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    """It would fail inside a cycle, or read states that nobody wrote."""
    shape = SpeculationConfig(num_steps=2, eagle_topk=3, num_draft_tokens=5)
    with pytest.raises(ConfigError) as caught:
        make_engine(TARGET, tiny_drafter(**changes), shape)
    assert message in str(caught.value)


def test_eagle_without_a_drafter_is_refused() -> None:
    """The remedy names what works without weights."""
    with pytest.raises(ConfigError, match="NGRAM or NONE"):
        make_engine(TARGET, None, chain(2))


@pytest.mark.parametrize(
    "prompt",
    [np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [1, 2, 3]],
    ids=["numpy", "torch", "list"],
)
def test_any_integers_make_a_prompt(prompt: Sequence[int]) -> None:
    """What is well meant is served."""
    job = Job(prompt=(1, 2, 3), params=SamplingParams(max_tokens=5))
    engine = make_engine(TARGET)
    request = engine.add(prompt, job.params)
    while engine.scheduler.has_work:
        engine.step()
    assert request.output == outputs(run_all(make_engine(TARGET), [job]))[0]
    assert request.prompt == (1, 2, 3)


def test_random_settings_never_fail_inside_a_step() -> None:
    """Whatever the constructors accept runs to its end: 40 random requests in random engines."""
    rng = random.Random(0)
    for _ in range(8):
        config: dict[str, Any] = {
            "page_size": rng.choice([1, 3, 16, 300]),
            "max_running_requests": rng.choice([1, 2, 5]),
            "chunked_prefill_size": rng.choice([1, 7, 512]),
            "context_length": rng.choice([12, 40]),
        }
        shape = rng.choice(
            [
                chain(1),
                chain(7),
                chain(20),
                SpeculationConfig(num_steps=3, eagle_topk=8, num_draft_tokens=40),
            ]
        )
        engine = make_engine(TARGET, NETWORK, shape, **config)
        served = 0
        for _ in range(5):
            params = SamplingParams(
                temperature=rng.choice([0.0, 1e-30, 0.5, 1.0, 1e30]),
                top_k=rng.choice([0, 1, 64, 2**31 - 1]),
                top_p=rng.choice([1e-40, 0.5, 1.0]),
                min_p=rng.choice([0.0, 0.3, 1.0]),
                seed=rng.choice([None, 0, 2**63 - 1]),
                max_tokens=rng.choice([1, 2, 9, 10**12]),
            )
            try:
                engine.add(random_prompts([rng.choice([1, 5, 11, 12, 39])])[0], params)
                served += 1
            except EyasError:
                continue
        steps = 0
        while engine.scheduler.has_work:
            engine.step()
            check(engine)
            steps += 1
        assert steps or not served
