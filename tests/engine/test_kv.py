"""What the caches hold after a cycle: what a prefill of the same text from scratch would put there.

Compared bit for bit: after chains and trees, at page edges, after chunked prefill and preemption,
for the target's cache, the drafter's cache, and the candidates the next tree grows from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from eyas.batch import PageGrant, PassShape, PrefillChunk, SlotInit, StepPlan
from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.drafters import Network
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Status
from eyas.kv.pool import KVPool, flat_rows
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.speculate.eagle3 import Eagle3Drafter
from eyas.speculate.standalone import StandaloneDrafter
from tests.helpers import (
    LATENT,
    TREES,
    VOCAB,
    Job,
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


def kept(pool: KVPool, pages: list[int], length: int) -> torch.Tensor:
    """Keys and values of a request, one behind the other."""
    rows = flat_rows(torch.tensor([pages]), torch.arange(length)[None], pool.page_size)[0]
    return torch.cat((pool.k[:, :, rows].flatten(), pool.v[:, :, rows].flatten()))


def drafter_of(engine: Engine) -> Eagle3Drafter | StandaloneDrafter:
    drafter = engine.runner.parts.drafter
    assert isinstance(drafter, Eagle3Drafter | StandaloneDrafter)
    return drafter


def network_of(engine: Engine) -> Network:
    drafter = drafter_of(engine)
    return drafter.network if isinstance(drafter, Eagle3Drafter) else drafter.model


Snapshot = dict[str, torch.Tensor]


def snapshot(engine: Engine, pages: list[int], slot: int, length: int) -> Snapshot:
    """All that a cycle leaves behind for one request."""
    drafter = drafter_of(engine)
    ahead = int(isinstance(drafter, StandaloneDrafter))
    return {
        "target": kept(engine.runner.parts.pool, pages, length),
        "drafter": kept(drafter.pool, pages, length + ahead),
        "hidden": drafter.growth.kept.hidden[slot],
        "tokens": drafter.growth.kept.tokens[slot],
        "scores": drafter.growth.kept.scores[slot],
        "history": engine.runner.parts.state.history[slot, : length + 1],
        "root": engine.runner.parts.state.roots[slot],
    }


def from_scratch(engine: Engine, request: Request) -> Snapshot:
    """The same, by one prefill in a fresh engine of the same make, the root given."""
    fresh = make_engine(
        engine.runner.parts.target,
        network_of(engine),
        engine.speculation,
        max_running_requests=1,
        page_size=32,
    )
    length = request.kv_len
    pages = fresh.scheduler.allocator.allocate(fresh.scheduler.pages_for(length))
    params, text = request.params, request.tokens(0, request.length)
    init = SlotInit(
        slot=0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
    )
    shape = PassShape(
        num_requests=1,
        num_new=length,
        max_kv_len=length,
        sampled=params.temperature > 0,
        filtered=params.filtered,
    )
    chunk = PrefillChunk(ticket=0, slot=0, start=0, tokens=text[:length], next_token=text[length])
    plan = StepPlan(
        inits=(init,),
        grants=(PageGrant(slot=0, first=0, pages=tuple(pages)),),
        chunks=(chunk,),
        prefill_shape=shape,
        tickets=(),
        slots=(),
        cycle_shape=None,
    )
    fresh.runner.run(plan)
    return snapshot(fresh, pages, 0, length)


class Watch:
    """Compares every running request with a prefill from scratch after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.compared = engine, 0

    def __call__(self) -> None:
        for request in self.engine.scheduler.active:
            if request.status is not Status.RUNNING:
                continue
            ours = snapshot(self.engine, request.pages, request.slot, request.kv_len)
            theirs = from_scratch(self.engine, request)
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), f"{name} behind {request.length} tokens"
            self.compared += 1


def jobs(*lengths: int, tokens: int = 14) -> list[Job]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
    return [
        Job(prompt=p, params=SamplingParams(max_tokens=tokens, **kinds[i % 2]), join=i % 3)
        for i, p in enumerate(random_prompts(lengths, seed=11))
    ]


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Eagle3]:
    return tiny_target(), tiny_drafter()


SHAPES = [chain(1), chain(4), *TREES]
SMALL = [
    chain(1, "STANDALONE"),
    chain(4, "STANDALONE"),
    dataclasses.replace(TREES[1], algorithm="STANDALONE"),
]
"""A small model's own entry of the root is compared too."""


@pytest.mark.parametrize(
    "shape", [*SHAPES, *SMALL], ids=lambda s: f"{s.algorithm}-{s.num_steps}-{s.eagle_topk}"
)
@pytest.mark.parametrize(
    "config",
    [
        {"page_size": 4},
        {"page_size": 16, "chunked_prefill_size": 5},
        {"page_size": 2, "num_pages": 34, "max_running_requests": 4},
    ],
    ids=["pages", "chunks", "preempted"],
)
def test_caches_equal_a_prefill_from_scratch(
    pair: tuple[Decoder, Eagle3], shape: SpeculationConfig, config: dict[str, Any]
) -> None:
    """Fault: draft KV kept from draft hiddens (v#14649); a chunk's last row without the next token.

    (s PR#26329); acceptance lower after preemption and resume (s PR#28254).
    """
    target, network = pair
    drafter = network if shape.algorithm == "EAGLE3" else tiny_model()
    engine = make_engine(target, drafter, shape, **config)
    watch = Watch(engine)
    requests = run_all(engine, jobs(13, 7, 15), after_step=watch)
    assert watch.compared > 20
    if "num_pages" in config:
        assert any(r.num_preemptions for r in requests), "the pool is too large to preempt"


@pytest.mark.parametrize("shape", [chain(4), TREES[1]], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"own_head": False, "draft_vocab_size": VOCAB},
        {"fused": False, "fc_norm": False, "aux_layers": (4,)},
        {"mla": LATENT},
    ],
    ids=str,
)
def test_caches_of_other_drafters(shape: SpeculationConfig, changes: dict[str, Any]) -> None:
    """Fault: draft entries kept in one layer of several, or states that cycles read otherwise."""
    engine = make_engine(tiny_target(), tiny_drafter(**changes), shape, page_size=4)
    watch = Watch(engine)
    run_all(engine, jobs(13, 7, tokens=10), after_step=watch)
    assert watch.compared > 5


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_edges(pair: tuple[Decoder, Eagle3], page_size: int) -> None:
    """Fault: acceptance lower at page edges (v PR#16370); leaks at page size > 1 (s#13741).

    Prompts of every length from 1 to 3 pages (16 and 64: to a whole page and around the edges);
    texts equal plain decoding, caches a prefill from scratch, the pool is empty at the end.
    """
    target, network = pair
    span = 3 * page_size
    edges = {page_size * i + d for i in (1, 2, 3) for d in range(-6, 3)}
    lengths = sorted(n for n in {*range(1, 17), *edges} if 1 <= n <= span)
    params = SamplingParams(max_tokens=10)
    text = random_prompts([span], seed=12)[0]
    work = [Job(prompt=text[:n], params=params) for n in lengths]
    expected = alone(target, work)
    for shape in (chain(3), TREES[1], SMALL[1]):
        drafter = network if shape.algorithm == "EAGLE3" else tiny_model()
        engine = make_engine(target, drafter, shape, page_size=page_size)
        watch, steps = Watch(engine), iter(range(10_000))

        def sometimes(watch: Watch = watch, steps: Any = steps) -> None:
            if next(steps) % 4 == 3:
                watch()

        assert outputs(run_all(engine, work, after_step=sometimes)) == expected
        assert watch.compared
