"""Ranks that compute otherwise, by a bit or wildly, do as rank 0 decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from eyas.config import SpeculationConfig
from eyas.distributed.group import Group
from eyas.engine.networks import Networks
from eyas.engine.ranks import Ranks
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.distributed.test_equality import DRAFTED, JOBS
from tests.distributed.worlds import LLAMA, TinySource, ranked_engine
from tests.helpers import ScriptedDrafter, chain, make_engine, outputs, run_all

Scores = Callable[..., torch.Tensor]


def pair_up(target: Decoder, drafter: Eagle3) -> None:
    """Give every second token the scores of the one before: each argmax is a tie, won by it."""
    for head in (target.head, drafter.head):
        assert head is not None
        head.weight.data[1::2] = head.weight.data[::2]


def favouring_second(scores: Scores) -> Scores:
    """Scores with the loser of every tie raised by one unit in the last place."""

    def raised(*hidden: Any) -> torch.Tensor:
        y = scores(*hidden).clone()
        y[:, 1::2] = y[:, 1::2].nextafter(torch.tensor(torch.inf))
        return y

    return raised


def backwards(scores: Scores) -> Scores:
    """Scores that prefer the unlikeliest."""
    return lambda x: -scores(x)


def replace(network: Any, method: str, change: Callable[[Scores], Scores]) -> None:
    setattr(network, method, change(getattr(network, method)))


def ties(target: Decoder, drafter: Eagle3, rank: int) -> None:
    """Ties, and ranks that agree."""
    pair_up(target, drafter)


def other_bit(target: Decoder, drafter: Eagle3, rank: int) -> None:
    """Ties that rank 1 breaks the other way, in the target's logits and the drafter's."""
    pair_up(target, drafter)
    if rank == 1:
        replace(target, "logits", favouring_second)
        replace(drafter, "score", favouring_second)


def other_targets(target: Decoder, drafter: Eagle3, rank: int) -> None:
    """Rank 1 would draw the unlikeliest tokens."""
    pair_up(target, drafter)
    if rank == 1:
        replace(target, "logits", backwards)


SPOILT = {"a bit": other_bit, "the target": other_targets}


@pytest.fixture(scope="module", params=SPOILT)
def spoilt(request: pytest.FixtureRequest) -> Iterator[tuple[Networks, Ranks, bool]]:
    """Networks of one rank, and two ranks that part from each other where they may."""
    source: TinySource = dataclasses.replace(LLAMA, spoil=SPOILT[request.param])
    whole = source.whole()
    assert isinstance(whole.drafter, Eagle3)
    pair_up(whole.target, whole.drafter)
    ranks = Ranks(source, 2, "cpu")
    yield whole, ranks, request.param == "the target"
    ranks.close()


@pytest.mark.parametrize("drafted", ["none", "chain", "tree"])
def test_one_rank_decides(spoilt: tuple[Networks, Ranks, bool], drafted: str) -> None:
    """Fault: greedy verify not agreed between ranks, so that they part and hang (s#31071).

    Where draws are not shared, rank 1 embeds other tokens, and the texts are soon others.
    """
    whole, ranks, same_drafts = spoilt
    speculation: SpeculationConfig = DRAFTED[drafted]
    alone = run_all(make_engine(whole.target, whole.drafter, speculation), JOBS)
    divided = run_all(ranked_engine(ranks, speculation), JOBS)
    assert outputs(divided) == outputs(alone)
    if same_drafts:
        for one, other in zip(alone, divided, strict=True):
            assert other.accept_lengths == one.accept_lengths


@dataclass(frozen=True, kw_only=True)
class Scripted(TinySource):
    """Drafters that know the texts; rank 1 drafts each token wrongly."""

    texts: tuple[tuple[int, ...], ...]
    speculation: SpeculationConfig

    def load(self, device: torch.device, group: Group) -> Networks:
        """A rank's share of the target, and its drafter."""
        networks = super().load(device, group)
        right = group.rank == 0
        drafter = ScriptedDrafter(self.texts, self.speculation, lambda _: right)
        return dataclasses.replace(networks, drafter=drafter)


@pytest.mark.parametrize(
    "speculation",
    [chain(3), SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=7)],
    ids=["chain", "tree"],
)
def test_one_ranks_drafts_are_verified(speculation: SpeculationConfig) -> None:
    """Fault: drafts that ranks do not share. Then they verify different trees, and accept
    different paths; here rank 0's are right to the last token and rank 1's never.
    """
    alone = outputs(run_all(make_engine(LLAMA.whole().target), JOBS))
    texts = tuple((*job.prompt, *text) for job, text in zip(JOBS, alone, strict=True))
    source = Scripted(
        target=LLAMA.target, drafter=LLAMA.drafter, texts=texts, speculation=speculation
    )
    ranks = Ranks(source, 2, "cpu")
    try:
        requests = run_all(ranked_engine(ranks, speculation), JOBS)
    finally:
        ranks.close()
    assert outputs(requests) == alone
    for request in requests:
        assert set(request.accept_lengths[:-1]) == {4}


def test_the_ties_are_there() -> None:
    """The perturbation above can change a token: most greedy tokens win a tie."""
    whole = LLAMA.whole()
    assert isinstance(whole.drafter, Eagle3)
    pair_up(whole.target, whole.drafter)
    [request] = run_all(make_engine(whole.target), JOBS[:1])
    assert all(token % 2 == 0 for token in request.output)
