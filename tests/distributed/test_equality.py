"""Two ranks write what one writes: every family, with and without speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eyas.attention import paged_attention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SamplingParams, SpeculationConfig
from eyas.distributed.group import Group
from eyas.engine.ranks import Ranks
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from tests.distributed.worlds import (
    BORROWING,
    DEEPSEEK,
    FAMILIES,
    SMALL,
    UNFUSED,
    TinySource,
    divided,
    on_ranks,
    ranked_engine,
)
from tests.helpers import (
    CPU,
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_target,
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
        engine = ranked_engine(ranks, speculation)
        shared = run_all(engine, jobs)
        assert outputs(shared) == outputs(alone)
        assert len(set(engine.runner.digests())) == 1, "ranks committed different tokens"
        assert len(engine.runner.digests()) == 2
        for one, other in zip(alone, shared, strict=True):
            assert other.accept_lengths == one.accept_lengths


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: source.target for name, source in FAMILIES.items()},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "v2 lite": {"mla": dataclasses.replace(DEEPSEEK.target["mla"], q_lora_rank=0)},
}
AUX_LAYERS = (1, 2, 4)


@torch.inference_mode()
def states(target: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and aux states of one prompt."""
    [prompt] = random_prompts([11])
    pool = KVPool(
        target.config.attention_shape(target.group.size),
        num_pages=3,
        page_size=8,
        dtype=torch.float32,
        device=CPU,
    )
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        tokens=torch.tensor(prompt),
        positions=torch.arange(len(prompt)),
        prefix_lens=torch.tensor([0]),
        page_table=torch.tensor([[1, 2]]),
        num_new=len(prompt),
        max_kv_len=len(prompt),
    )
    aux = torch.full((len(prompt), len(AUX_LAYERS) * target.config.hidden_size), torch.nan)
    attend = paged_attention(pool).begin(batch)
    hidden = target(batch.tokens, batch.positions, attend, aux, AUX_LAYERS)
    return target.logits(hidden), aux


def all_states(group: Group) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of a rank's share of every variant."""
    return {
        name: states(divided(tiny_target(**changes), CPU, group))
        for name, changes in VARIANTS.items()
    }


def test_all_ranks_have_the_whole_networks_states() -> None:
    """Fault: a bias added by every rank, a share of the wrong heads, a drafter fed by one rank.

    Logits and the states that drafters read are the same bits on both ranks.
    """
    first, second = on_ranks(2, all_states)
    for name, changes in VARIANTS.items():
        for here, there, expected in zip(
            first[name], second[name], states(tiny_target(**changes)), strict=True
        ):
            assert torch.equal(here, there), name
            assert torch.allclose(here, expected, atol=1e-4), name


DRAFTERS: dict[str, tuple[TinySource, SpeculationConfig]] = {
    "borrowed head": (BORROWING, chain(3)),
    "borrowed head, tree": (BORROWING, TREES[1]),
    "one state": (UNFUSED, chain(3)),
    "small model": (SMALL, chain(3, "STANDALONE")),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_whole_on_every_rank(name: str) -> None:
    """Fault: a share of the target's head or norm taken for the whole, or a rank that waits."""
    source, speculation = DRAFTERS[name]
    whole, ranks = source.whole(), Ranks(source, 2, "cpu")
    alone = run_all(make_engine(whole.target, whole.drafter, speculation), JOBS)
    shared = run_all(ranked_engine(ranks, speculation), JOBS)
    ranks.close()
    assert outputs(shared) == outputs(alone)
    assert [r.accept_lengths for r in shared] == [r.accept_lengths for r in alone]
