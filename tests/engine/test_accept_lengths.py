"""How many tokens a cycle commits: exactly what the drafts deserve."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from eyas.config import SamplingParams, SpeculationConfig
from eyas.models.decoder import Decoder
from tests.helpers import (
    Job,
    ScriptedDrafter,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_target,
)

TOKENS = 40
FULL_TREES = [
    SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=7),
    SpeculationConfig(num_steps=2, eagle_topk=5, num_draft_tokens=11),
    SpeculationConfig(num_steps=6, eagle_topk=3, num_draft_tokens=19),
]
SHAPES = [*(chain(k) for k in range(1, 9)), chain(63), *FULL_TREES]


def shape_name(shape: SpeculationConfig) -> str:
    return f"{shape.num_steps}-{shape.eagle_topk}-{shape.num_draft_tokens}"


class World:
    """Greedy and sampled requests with the texts that plain decoding writes, and beyond."""

    def __init__(self) -> None:
        self.target: Decoder = tiny_target()
        temperatures = (0.0, 1.0, 0.7, 0.0, 1.0)
        self.jobs = [
            Job(prompt=p, params=SamplingParams(max_tokens=TOKENS, temperature=t, seed=i))
            for i, (p, t) in enumerate(
                zip(random_prompts([3, 17, 16, 40, 1], seed=8), temperatures, strict=True)
            )
        ]
        beyond = [
            Job(
                prompt=j.prompt,
                params=SamplingParams(
                    max_tokens=TOKENS + 70, temperature=j.params.temperature, seed=j.params.seed
                ),
            )
            for j in self.jobs
        ]
        texts = alone(self.target, beyond)
        self.texts = [[*j.prompt, *text] for j, text in zip(self.jobs, texts, strict=True)]
        self.expected = [text[:TOKENS] for text in texts]

    def run(self, shape: SpeculationConfig, right: Callable[[int], bool]) -> list[list[int]]:
        """Accept lengths; the texts are checked."""
        engine = make_engine(self.target, ScriptedDrafter(self.texts, shape, right), shape)
        requests = run_all(engine, self.jobs)
        assert outputs(requests) == self.expected
        return [r.accept_lengths for r in requests]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_a_perfect_drafter_fills_every_cycle(world: World, shape: SpeculationConfig) -> None:
    """Fault: width off by one (s#8228). Every cycle commits depth + 1 tokens, no more, no less."""
    full = shape.depth + 1
    cycles = -(-(TOKENS - 1) // full)
    assert world.run(shape, lambda _: True) == [[full] * cycles] * len(world.jobs)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_a_wrong_drafter_commits_one_token_a_cycle(world: World, shape: SpeculationConfig) -> None:
    """Fault: a wrong draft accepted. Every cycle commits the bonus alone."""
    assert world.run(shape, lambda _: False) == [[1] * (TOKENS - 1)] * len(world.jobs)


@pytest.mark.parametrize("shape", [chain(1), chain(5), FULL_TREES[2]], ids=shape_name)
def test_any_pattern_of_right_and_wrong(world: World, shape: SpeculationConfig) -> None:
    """Fault: acceptance past a miss, or short of it. Lengths follow from the pattern alone."""
    for seed in range(4):
        rng = random.Random(seed)
        pattern = [rng.random() < 0.75 for _ in range(300)]
        lengths = world.run(shape, pattern.__getitem__)
        for job, ours in zip(world.jobs, lengths, strict=True):
            root, expected = len(job.prompt), []
            while root < len(job.prompt) + TOKENS - 1:
                run = 0
                while run < shape.depth and pattern[root + 1 + run]:
                    run += 1
                expected.append(run + 1)
                root += run + 1
            assert ours == expected
