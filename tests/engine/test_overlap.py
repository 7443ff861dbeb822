"""Results read one cycle late: the same texts, with stale results dropped and pages in order."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.batch import StepResult
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.graphs import Reason, buckets
from eyas.engine.request import Request, Status
from eyas.engine.scheduler import Scheduler
from eyas.kv.pool import PageAllocator
from tests.helpers import (
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)

JOBS = [
    Job(
        prompt=prompt,
        params=SamplingParams(max_tokens=tokens, temperature=heat, seed=3),
        join=2 * i,
    )
    for i, (prompt, tokens, heat) in enumerate(
        zip(random_prompts([5, 40, 1, 17]), (1, 30, 2, 23), (0.0, 1.0, 0.0, 0.7), strict=True)
    )
]


@pytest.mark.parametrize("shape", [NONE, chain(3), chain(4, "NGRAM"), TREES[1]], ids=str)
def test_texts_are_those_without_overlap(shape: SpeculationConfig) -> None:
    """Fault: a step planned too early reads or writes something else. Ends of all kinds."""
    target, network = tiny_target(), tiny_drafter()
    texts = []
    for overlap in ("off", "on"):
        engine = make_engine(
            target, network, shape, overlap=overlap, page_size=4, chunked_prefill_size=16
        )
        texts.append(outputs(run_all(engine, JOBS)))
    assert texts[0] == texts[1]


def test_a_request_at_the_end_of_the_context_stays_in_its_pages() -> None:
    """Fault: the cycle that is already under way writes past a request's last page."""
    target, network = tiny_target(), tiny_drafter()
    config: dict[str, Any] = {"page_size": 4, "context_length": 48, "max_running_requests": 2}
    jobs = [Job(prompt=p, params=SamplingParams(max_tokens=99)) for p in random_prompts([40, 44])]
    texts = [
        outputs(run_all(make_engine(target, network, chain(7), overlap=o, **config), jobs))
        for o in ("off", "on")
    ]
    assert texts[0] == texts[1]
    assert [len(t) for t in texts[0]] == [8, 4]


def test_results_of_an_earlier_stay_are_dropped() -> None:
    """Fault: stale output after preemption (v#41190). The ticket of the stay tells."""
    settings = EngineConfig(page_size=4, num_pages=30, context_length=64)
    one = Scheduler(settings, chain(3), PageAllocator(30))
    request = Request(
        id=0,
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=20),
        seed=0,
        stop_ids=frozenset(),
        max_length=64,
        detokenizer=None,
    )
    one.add(request)
    first = one.plan()
    late = one.plan()
    assert late.tickets == (first.chunks[0].ticket,), "a cycle is planned before its first token"
    one.commit(StepResult(first_tokens=((first.chunks[0].ticket, 7),), cycle_tokens=()))
    one._preempt(request)
    again = one.plan()
    assert again.chunks[0].ticket != late.tickets[0]
    one.commit(StepResult(first_tokens=(), cycle_tokens=((late.tickets[0], (8, 9)),)))
    assert request.output == [7]
    assert request.status is Status.RUNNING


def test_a_stop_inside_the_late_cycle_is_cut() -> None:
    """Fault: tokens of the cycle after the end are shown."""
    target, network = tiny_target(), tiny_drafter()
    prompt = random_prompts([9])[0]
    plain = outputs(
        run_all(make_engine(target), [Job(prompt=prompt, params=SamplingParams(max_tokens=20))])
    )[0]
    stop = SamplingParams(max_tokens=20, stop_token_ids=(plain[10],))
    engine = make_engine(target, network, chain(3), overlap="on")
    found = outputs(run_all(engine, [Job(prompt=prompt, params=stop)]))[0]
    assert found == plain[: plain.index(plain[10]) + 1]


def test_buckets_reach_every_batch() -> None:
    """Fault: a batch between the captured sizes, or past the last, falls out of the graphs."""
    for most in (1, 2, 3, 8, 9, 64, 70, 128, 200):
        sizes = buckets(EngineConfig(max_running_requests=most))
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == most
    assert buckets(EngineConfig(max_running_requests=32, cuda_graph_max_bs=6)) == [1, 2, 4, 6]


def test_an_eager_cycle_has_its_reason() -> None:
    """Fault: silent eager cycles (v#40608)."""
    engine = make_engine(tiny_target(), tiny_drafter(), chain(3))
    run_all(engine, [JOBS[0], Job(prompt=(1, 2), params=SamplingParams(max_tokens=9))])
    counts = engine.runner.graphs.counts
    assert set(counts) == {Reason.NO_GPU}
    assert counts[Reason.NO_GPU] > 0
