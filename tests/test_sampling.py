"""Sampling against numpy: noise, filters and their order, and what may not run at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from eyas import sampling
from eyas.config import SamplingParams
from eyas.sampling import SamplingRows, draw, filter_logits, gumbel_noise, perturb, scale

ODDS = 1e-6
"""Chance that a correct generator with other constants fails one statistical test here."""


def rows_of(params: list[SamplingParams], seeds: list[int] | None = None) -> SamplingRows:
    """Rows as the engine fills them."""
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        seed=torch.tensor(seeds or list(range(len(params)))),
    )


def numpy_kept(logits: np.ndarray[Any, Any], params: SamplingParams) -> set[int]:
    """Tokens that survive temperature, top-k, top-p, min-p in this order; plain float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    probs = weights / weights.sum()
    kept: list[int] = []
    mass = 0.0
    for token, p in zip(order, probs, strict=True):
        if kept and params.top_p < 1 and mass >= params.top_p:
            break
        kept.append(token)
        mass += p
    best = probs[0]
    return {t for t, p in zip(order, probs, strict=True) if t in kept and p >= params.min_p * best}


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.05},
    {"top_p": 0.7, "min_p": 0.2},
    {},
]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
def test_filters_keep_what_numpy_keeps(temperature: float) -> None:
    """Fault: min_p ignored, filters out of order, top-p over the wrong mass."""
    params = [SamplingParams(temperature=temperature, **f) for f in FILTERS]
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        logits = torch.randn(len(params), 200, generator=generator) * 3
        filtered = filter_logits(scale(logits, rows_of(params)), rows_of(params))
        for row, one in enumerate(params):
            kept = set(filtered[row].isfinite().nonzero().flatten().tolist())
            on_edge = kept ^ numpy_kept(logits[row].numpy(), one)
            assert not on_edge or (one.top_p == 0.999 and len(on_edge) == 1), one
        assert torch.equal(filtered[-1], scale(logits, rows_of(params))[-1]), "no filter, no change"


def test_top_p_works_on_the_mass_that_top_k_left() -> None:
    """Fault: order of filters. After top-k 2, the first of (.4, .3, .3) has mass 4/7 > 0.5."""
    logits = torch.tensor([[0.4, 0.3, 0.3]]).log()
    both = [SamplingParams(temperature=1, top_k=2, top_p=0.5)]
    assert filter_logits(logits, rows_of(both)).isfinite().tolist() == [[True, False, False]]
    only_p = [SamplingParams(temperature=1, top_p=0.5)]
    assert filter_logits(logits, rows_of(only_p)).isfinite().tolist() == [[True, True, False]]


def test_ties_go_to_the_lower_id() -> None:
    """Fault: filters that depend on a sort's whims. Equal logits fall in order of their ids."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    params = [SamplingParams(temperature=1, top_k=2)]
    kept = filter_logits(logits, rows_of(params)).isfinite()
    assert kept.nonzero()[:, 1].tolist() == [1, 2]
    greedy = rows_of([SamplingParams(temperature=0)])
    for sampled in (False, True):
        for filtered in (False, True):
            token = draw(logits, greedy, torch.tensor([3]), sampled=sampled, filtered=filtered)
            assert token.tolist() == [1]


def test_the_likeliest_token_survives_every_filter() -> None:
    """Fault: an empty distribution. The strictest filters leave the likeliest token."""
    logits = torch.tensor([[0.0, 5.0, 1.0]] * 4)
    strict: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 1e-30},
    ]
    params = [SamplingParams(temperature=1, **one) for one in strict]
    for index in range(50):
        at = torch.full((4,), index)
        assert draw(logits, rows_of(params), at, sampled=True, filtered=True).tolist() == [1] * 4


def test_greedy_rows_are_untouched_in_a_mixed_batch() -> None:
    """Fault: settings leak between requests. Greedy beside sampled and filtered is argmax."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5),
        SamplingParams(temperature=1, top_k=3, top_p=0.5),
    ]
    for index in range(100):
        at = torch.full((3,), index)
        drawn = draw(logits, rows_of(params), at, sampled=True, filtered=True)
        assert drawn[:2].tolist() == logits[:2].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Fault: overflow. Logits over a tiny temperature must not all be infinite."""
    logits = torch.tensor([[1.0, 3.0, 9.0, 8.0, -4.0]])
    rows = rows_of([SamplingParams(temperature=temperature, top_p=0.9)])
    for filtered in (False, True):
        token = draw(logits, rows, torch.tensor([1]), sampled=True, filtered=filtered)
        assert token.tolist() == [2]


def test_filters_that_are_off_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: no-op filters cost a sort of the vocabulary (s#6949)."""

    def fail(*_: object) -> torch.Tensor:
        raise AssertionError("filters ran")

    monkeypatch.setattr(sampling, "filter_logits", fail)
    rows = rows_of([SamplingParams(temperature=1), SamplingParams()])
    draw(torch.randn(2, 9), rows, torch.zeros(2).long(), sampled=True, filtered=False)
    monkeypatch.setattr(sampling, "gumbel_noise", fail)
    draw(torch.randn(2, 9), rows, torch.zeros(2).long(), sampled=False, filtered=False)


@pytest.mark.parametrize(
    ("changes", "filtered"),
    [
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7, "top_p": 0.99}, True),
        ({"temperature": 0.7, "min_p": 0.01}, True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, False),
    ],
)
def test_params_know_whether_they_filter(changes: dict[str, Any], filtered: bool) -> None:
    """Fault: no-op filters run. What is off, or pointless when greedy, is not counted."""
    assert SamplingParams(**changes).filtered is filtered


def test_noise_is_a_pure_function() -> None:
    """Fault: seeds that depend on the batch (s PR#30822). Alone, batched, for some ids."""
    seeds = torch.tensor([0, 1, 5, 2**33 + 5, 2**63 - 1])
    index = torch.tensor([0, 3, 1000, 7, 4095])
    ids = torch.arange(1001)
    full = gumbel_noise(seeds, index, ids)
    some = torch.tensor([999, 3, 4, 500])
    for row in range(5):
        one = gumbel_noise(seeds[row : row + 1], index[row : row + 1], ids)
        assert torch.equal(one[0], full[row])
    assert torch.equal(gumbel_noise(seeds, index, some), full[:, some])
    assert torch.equal(gumbel_noise(seeds, index, some.expand(5, -1)), full[:, some])
    assert full.isfinite().all()
    assert len({tuple(row.tolist()) for row in full}) == 5


def uniform_of(noise: torch.Tensor) -> np.ndarray[Any, Any]:
    """Gumbel noise back to what should be uniform on [0, 1]."""
    return np.exp(-np.exp(-noise.double().numpy())).ravel()


def test_noise_is_gumbel_along_every_axis() -> None:
    """Fault: a poor hash. Uniform over ids, indices and seeds; odds of a false alarm 1e-6 each."""
    one, many = torch.zeros(1).long(), torch.arange(200_000)
    draws = {
        "ids": gumbel_noise(one + 12345, one + 17, many),
        "index": gumbel_noise(one.expand(200_000), many, one + 42),
        "seed": gumbel_noise(many, one.expand(200_000), one + 42),
        "high seed": gumbel_noise(many << 32, one.expand(200_000), one + 42),
    }
    for name, noise in draws.items():
        assert stats.kstest(uniform_of(noise), "uniform").pvalue > ODDS, name


@pytest.mark.parametrize("step", [1, 2, 64, 1024, 65536])
def test_noise_of_neighbours_is_independent(step: int) -> None:
    """Fault: correlated draws. Neighbouring ids, indices and seeds; 1e-6 odds for each of 3."""
    count = 16384
    base = torch.arange(count)
    fixed = torch.full((1,), 3)
    ids = (
        uniform_of(gumbel_noise(fixed, fixed, base)),
        uniform_of(gumbel_noise(fixed, fixed, base + step)),
    )
    index = tuple(
        uniform_of(gumbel_noise(fixed.expand(count), base + shift, fixed)) for shift in (0, step)
    )
    seed = tuple(
        uniform_of(gumbel_noise(base + shift, fixed.expand(count), fixed)) for shift in (0, step)
    )
    for a, b in (ids, index, seed):
        cells = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > ODDS


def test_draws_follow_the_softmax() -> None:
    """Fault: sampling silently greedy (s#39253). Chi-square over 40 000 seeds; odds 1e-6."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 40_000
    for temperature in (0.7, 1.0):
        params = [SamplingParams(temperature=temperature)] * count
        drawn = draw(
            logits.expand(count, -1),
            rows_of(params, list(range(count))),
            torch.full((count,), 9),
            sampled=True,
            filtered=False,
        )
        expected = (logits[0].double() / temperature).softmax(-1).numpy() * count
        seen = np.bincount(drawn.numpy(), minlength=12)
        assert stats.chisquare(seen, expected).pvalue > ODDS


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_shared_noise_makes_two_laws_agree(spread: float) -> None:
    """Fault: temperature > 0 accepts too strictly (v#40551).

    Draws of p and q under the same noise agree at least (1 - TV) / (1 + TV) of the time (Daliri,
    Musco, Suresh, arXiv 2408.07978) and never more than 1 - TV; 5 sigma, odds 6e-7.
    """
    generator = torch.Generator().manual_seed(7)
    count, vocab = 40_000, 30
    first = torch.randn(1, vocab, generator=generator) * 2
    second = first + torch.randn(1, vocab, generator=generator) * spread
    rows = rows_of([SamplingParams(temperature=1)] * count, list(range(count)))
    index, ids = torch.zeros(count).long(), torch.arange(vocab)
    a, b = (perturb(x.expand(count, -1), rows, index, ids).argmax(-1) for x in (first, second))
    agreed = (a == b).double().mean().item()
    distance = 0.5 * (first.softmax(-1) - second.softmax(-1)).abs().sum().item()
    slack = 5 * 0.5 / count**0.5
    assert agreed >= (1 - distance) / (1 + distance) - slack
    assert agreed <= 1 - distance + slack
    independent = (first.softmax(-1) * second.softmax(-1)).sum().item()
    assert agreed > independent + slack, "the noise is not shared"
