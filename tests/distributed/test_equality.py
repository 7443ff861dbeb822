"""Two ranks write what one writes: every family, with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.ranks import Ranks
from tests.distributed.worlds import FAMILIES, TinySource, ranked_engine
from tests.helpers import (
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
)

DRAFTED: dict[str, SpeculationConfig] = {
    "none": NONE,
    "chain": chain(3),
    "tree": TREES[1],
    "ngram": chain(3, "NGRAM"),
}
JOBS = [
    Job(prompt=p, params=SamplingParams(max_tokens=10, temperature=t, top_k=k, seed=i), join=i)
    for i, (p, t, k) in enumerate(
        zip(random_prompts([5, 17, 33, 1, 20]), (0, 1, 0.7, 0, 1), (0, 0, 9, 0, 5), strict=True)
    )
]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> Iterator[tuple[TinySource, Ranks]]:
    """A family's source, and two ranks that loaded it."""
    source = FAMILIES[request.param]
    ranks = Ranks(source, 2, "cpu")
    yield source, ranks
    ranks.close()


@pytest.mark.parametrize("drafted", DRAFTED)
def test_two_ranks_write_what_one_writes(world: tuple[TinySource, Ranks], drafted: str) -> None:
    """Fault: a shard in the wrong place, a missing all-reduce, a rank with other tokens."""
    source, ranks = world
    whole, speculation = source.whole(), DRAFTED[drafted]
    for jobs in (JOBS[:1], JOBS):
        alone = run_all(make_engine(whole.target, whole.drafter, speculation), jobs)
        divided = run_all(ranked_engine(ranks, speculation), jobs)
        assert outputs(divided) == outputs(alone)
        for one, other in zip(alone, divided, strict=True):
            assert other.accept_lengths == one.accept_lengths
