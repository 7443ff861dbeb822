"""Storms: random requests, joins, aborts and tiny pools; every text stays the request's own.

Seeds are fixed, so a failure repeats. Integrity is checked after every step.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from eyas.batch import StepResult
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.request import Request, Status
from eyas.engine.scheduler import Scheduler
from eyas.kv.pool import PageAllocator
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.helpers import (
    NONE,
    TREES,
    Job,
    alone,
    chain,
    check,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 20, 35]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        seed=rng.choice([0, 1, 2**50]),
        top_k=rng.choice([0, 0, 7]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        stop_token_ids=tuple(rng.sample(range(64), rng.choice([0, 0, 4]))),
    )


@cache
def pair() -> tuple[Decoder, Eagle3]:
    return tiny_target(), tiny_drafter()


@cache
def reference() -> list[tuple[Job, list[int]]]:
    """Thirty requests with their texts alone."""
    rng = random.Random(99)
    lengths = [rng.choice([1, 2, 8, 15, 16, 17, 40]) for _ in range(30)]
    jobs = [Job(prompt=p, params=random_params(rng)) for p in random_prompts(lengths, seed=99)]
    return list(zip(jobs, alone(pair()[0], jobs), strict=True))


SHAPES: list[SpeculationConfig] = [NONE, chain(4, "NGRAM"), chain(3), chain(7), *TREES[:2]]


@pytest.mark.parametrize("seed", range(12))
def test_storm(seed: int) -> None:
    """Faults: leaks (s#13741), stale output after preemption or abort (v#41190), lost requests."""
    rng = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    target, network = pair()
    page_size = rng.choice([1, 4, 16])
    longest = 40 + 35 + shape.scratch
    config: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": 1 + -(-longest // page_size) * rng.choice([1, 2]) + rng.randrange(3),
        "max_running_requests": rng.choice([1, 3, 8]),
        "chunked_prefill_size": rng.choice([5, 16, 512]),
        "overlap": "on" if seed >= 6 else "off",
    }
    engine = make_engine(target, network, shape, **config)
    waiting = [*reference()]
    rng.shuffle(waiting)
    live: list[tuple[Request, list[int]]] = []
    aborted: set[int] = set()
    steps = 0
    while waiting or engine.scheduler.has_work:
        while waiting and rng.random() < 0.3:
            job, text = waiting.pop()
            live.append((engine.add(job.prompt, job.params), text))
        if live and rng.random() < 0.04:
            victim, _ = rng.choice(live)
            if victim.status is not Status.FINISHED:
                aborted.add(victim.id)
            engine.abort(victim)
            check(engine)
        engine.step()
        check(engine)
        steps += 1
        assert steps < 5000, "the engine makes no progress"
    assert engine.scheduler.allocator.num_free == engine.config.num_pages - 1
    assert len(live) == len(reference())
    for request, text in live:
        assert request.status is Status.FINISHED
        wanted = text[: len(request.output)] if request.id in aborted else text
        assert request.output == wanted, config


def scheduler(**config: int) -> Scheduler:
    """A scheduler alone, for a context of 64."""
    values = {"page_size": 4, "num_pages": 20, "context_length": 64, **config}
    settings = EngineConfig(**values)  # type: ignore[arg-type]
    return Scheduler(settings, chain(3), PageAllocator(settings.num_pages))


def request(ident: int, length: int, max_tokens: int = 8) -> Request:
    return Request(
        id=ident,
        prompt=tuple(range(length)),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_ids=frozenset(),
        max_length=64,
        detokenizer=None,
    )


def step(one: Scheduler, accepted: int = 1) -> list[int]:
    """Plan and commit a step with invented tokens; returns the ids that ran a cycle."""
    plan = one.plan()
    one.check_integrity()
    for grant in plan.grants:
        assert len(grant.pages) > 0
    first = tuple((c.ticket, 7) for c in plan.chunks if c.next_token is None)
    cycle = tuple((i, (7,) * accepted) for i in plan.tickets)
    one.commit(StepResult(first_tokens=first, cycle_tokens=cycle))
    one.check_integrity()
    return list(plan.tickets)


def test_requests_are_served_in_order() -> None:
    """Fault: starvation. Who came first starts first, also where a later one would fit."""
    one = scheduler(num_pages=12, max_running_requests=4)
    for ident, length in enumerate((20, 30, 2)):
        one.add(request(ident, length))
    plan = one.plan()
    assert [c.ticket for c in plan.chunks] == [0]
    assert [r.id for r in one.waiting] == [1, 2]


def test_pages_cover_the_longest_outcome() -> None:
    """Fault: a cycle that writes past its pages. Before it runs they reach KV length + scratch."""
    one = scheduler(num_pages=40)
    one.add(request(0, 9, max_tokens=30))
    for accepted in (1, 4, 2, 4, 4, 1, 3):
        ran = step(one, accepted)
        if ran:
            held = one.active[0].pages
            before = one.active[0].kv_len - accepted
            assert len(held) * 4 >= before + one.speculation.scratch


def test_the_youngest_yields_and_comes_back_first() -> None:
    """Fault: the oldest preempted, or a preempted request that waits behind newcomers."""
    one = scheduler(num_pages=11, max_running_requests=4)
    for ident in range(3):
        one.add(request(ident, 8, max_tokens=20))
    ran: list[list[int]] = []
    while one.has_work:
        ran.append(step(one))
        order = [r.id for r in one.waiting]
        assert order == sorted(order), "preempted requests stand before newcomers"
        assert len(ran) < 300
    assert all(0 in ids for ids in ran[1:20]), "the oldest ran in every step"
    assert len(ran) > 25, "the pool was too large to preempt"


def test_prompt_chunks_share_a_budget() -> None:
    """Fault: a pass whose padded rows exceed its budget, or the last chunk without its neighbour.

    The memory of a pass follows its rows, whatever of them is padding.
    """
    one = scheduler(num_pages=60, chunked_prefill_size=10, max_running_requests=4)
    for ident, length in enumerate((13, 4, 25)):
        one.add(request(ident, length))
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(6):
        plan = one.plan()
        assert len(plan.chunks) * max((len(c.tokens) for c in plan.chunks), default=0) <= 10
        for chunk in plan.chunks:
            assert chunk.start == len(seen[chunk.ticket])
            seen[chunk.ticket] += chunk.tokens
            whole = (13, 4, 25)[chunk.ticket]
            end = chunk.start + len(chunk.tokens)
            assert chunk.next_token == (end if end < whole else None)
        first = tuple((c.ticket, 7) for c in plan.chunks if c.next_token is None)
        cycle = tuple((i, (7,)) for i in plan.tickets)
        one.commit(StepResult(first_tokens=first, cycle_tokens=cycle))
    assert [len(s) for s in seen.values()] == [13, 4, 25]


def test_decoding_goes_on_during_a_long_prefill() -> None:
    """Fault: running requests wait for another's prompt (v#39790)."""
    target, _ = pair()
    long, short = random_prompts([100, 4])
    jobs = [
        Job(prompt=short, params=SamplingParams(max_tokens=15)),
        Job(prompt=long, params=SamplingParams(max_tokens=5), join=2),
    ]
    engine = make_engine(target, None, NONE, chunked_prefill_size=8)
    progress: list[int] = []

    def note() -> None:
        progress.append(sum(len(r.output) for r in engine.scheduler.active if r.id == 0))

    requests = run_all(engine, jobs, after_step=note)
    assert progress[:10] == list(range(1, 11))
    assert [len(r.output) for r in requests] == [15, 5]
