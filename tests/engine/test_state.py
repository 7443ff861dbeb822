"""Slot rows: a digest that tells committed tokens apart, and nothing else."""

from __future__ import annotations

from eyas.config import SamplingParams
from tests.helpers import (
    Job,
    chain,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)


def test_a_digest_is_of_what_was_committed() -> None:
    """Fault: ranks whose tokens differ taken for equal, or scratch taken for tokens."""
    engine = make_engine(tiny_target(), tiny_drafter(), chain(3))
    jobs = [Job(prompt=p, params=SamplingParams(max_tokens=9)) for p in random_prompts([5, 8])]
    empty = engine.runner.digests()
    run_all(engine, jobs)
    [before] = engine.runner.digests()
    state = engine.runner.parts.state
    length = int(state.kv_lens[0])
    state.history[0, length + 1] += 1
    state.kv_lens[state.dummy_slot] += 1
    assert engine.runner.digests() == [before] != empty
    for changed, place in ((state.history[0], length), (state.roots, 0), (state.kv_lens, 0)):
        changed[place] += 1
        assert engine.runner.digests() != [before]
        changed[place] -= 1
    assert engine.runner.digests() == [before]
