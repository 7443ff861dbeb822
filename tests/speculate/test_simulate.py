"""Acceptance by decree: rates that hold, on chains and trees, and nothing else accepted."""

from __future__ import annotations

import pytest
import torch

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.errors import ConfigError
from eyas.sampling import SamplingRows
from eyas.speculate.simulate import decree, rates_for
from eyas.speculate.tree import Draft, chain_draft, tree_draft
from tests.helpers import (
    NONE,
    TREES,
    Job,
    accepted_of,
    chain,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)


def rows(count: int) -> SamplingRows:
    return SamplingRows(
        temperature=torch.zeros(count),
        top_k=torch.zeros(count).long(),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seed=torch.arange(count),
    )


def drafts(lens: torch.Tensor, kind: str) -> Draft:
    count = len(lens)
    tokens = torch.randint(0, 9, (count, 5), generator=torch.Generator().manual_seed(0))
    if kind == "chain":
        return chain_draft(tokens[:, 0], lens, tokens[:, 1:])
    parents = torch.tensor([[0, 0, 1, 3]]).expand(count, -1)
    return tree_draft(tokens[:, 0], lens, tokens[:, 1:], parents, depth=3)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_rates_hold(kind: str) -> None:
    """Fault: another acceptance than asked for. 4,000 requests: a false alarm in 10,000 runs."""
    count = 4000
    lens = torch.full((count,), 77)
    draft = drafts(lens, kind)
    drawn = torch.randint(0, 9, (count, 5), generator=torch.Generator().manual_seed(1))
    rates = torch.tensor([0.9, 0.5, 0.7, 0.2][: draft.depth])
    changed = decree(draft, drawn, rows(count), lens, rates)
    counts = accepted_of(draft, changed).counts
    reached = torch.stack([(counts > i).float().mean() for i in range(1, draft.depth + 1)])
    wanted = rates.cumprod(0)
    spread = (wanted * (1 - wanted) / count).sqrt()
    assert ((reached - wanted).abs() < 4.5 * spread).all(), (reached, wanted)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize(("rate", "length"), [(0.0, 1), (1.0, None)])
def test_all_or_nothing(kind: str, rate: float, length: int | None) -> None:
    """Fault: a refused draft accepted since the target draws it, or a deep one lost."""
    draft = drafts(torch.arange(50), kind)
    drawn = draft.tokens.roll(-1, 1)
    rates = torch.full((draft.depth,), rate)
    counts = accepted_of(draft, decree(draft, drawn, rows(50), torch.arange(50), rates)).counts
    assert (counts == (length or draft.depth + 1)).all()


def test_rates_of_a_length() -> None:
    """Fault: a wrong mean. The sum of the chances to reach each position is the length."""
    for length, depth in ((1.0, 3), (2.05, 3), (4.0, 3), (3.3, 7)):
        rate = rates_for(length, depth)[0]
        assert sum(rate**i for i in range(depth + 1)) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize("shape", [chain(3), TREES[1]], ids=["chain", "tree"])
def test_the_engine_accepts_as_told(shape: SpeculationConfig) -> None:
    """Fault: a decree that never reaches the cycle."""
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=150, seed=i))
        for i, p in enumerate(random_prompts([5, 9, 4, 7]))
    ]
    engine = make_engine(tiny_target(), tiny_drafter(), shape, simulate_accept_length=2.5)
    lengths = [n for r in run_all(engine, jobs) for n in r.accept_lengths]
    assert abs(sum(lengths) / len(lengths) - 2.5) < 0.4
    assert engine.config.simulated == "acceptance by decree"


def test_bad_decrees_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"commits 1 .. 4"):
        make_engine(tiny_target(), tiny_drafter(), chain(3), simulate_accept_length=5.0)
    with pytest.raises(ConfigError, match="3 deep"):
        make_engine(tiny_target(), tiny_drafter(), chain(3), simulate_acceptance=(0.5,))
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(simulate_accept_length=2.0, simulate_acceptance=(0.5,))
    assert make_engine(tiny_target(), speculation=NONE, simulate_accept_length=3.0) is not None
