"""Sampled text has the target's own law, whoever drafts; and shared noise makes drafts agree.

A target of 8 tokens; thousands of requests that differ in their seeds run in one batch. The joint
law of the first three tokens is known exactly. Odds of a false alarm: 1e-6 for each chi-square,
should other seeds be drawn; the seeds are fixed.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from eyas.config import SamplingParams, SpeculationConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.eagle3_reference import PlainEagle3, target_logits, target_states
from tests.helpers import (
    NONE,
    Job,
    ScriptedDrafter,
    chain,
    make_engine,
    outputs,
    run_all,
    tiny_drafter,
    tiny_target,
)

ODDS = 1e-6
TOKENS, COUNT = 8, 2048
PROMPT = (1, 2, 3, 4)


@cache
def pair() -> tuple[Decoder, Eagle3]:
    """A target of 8 tokens with a lively distribution, and a drafter that knows all of them."""
    target = tiny_target(vocab_size=TOKENS, seed=4)
    target.head.weight.data *= 0.5
    network = tiny_drafter(vocab_size=TOKENS, draft_vocab_size=TOKENS, seed=5)
    assert network.head is not None
    network.head.weight.data *= 0.5
    return target, network


def filtered(logits: torch.Tensor, params: SamplingParams) -> np.ndarray[Any, Any]:
    """Probabilities in float64 after temperature, top-k, top-p, min-p."""
    p = (logits.double() / params.temperature).softmax(-1).numpy()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    kept = p[order] / p[order].sum()
    before = np.cumsum(kept) - kept
    kept = kept[(before < params.top_p) & (kept >= params.min_p * kept[0])]
    out = np.zeros_like(p)
    out[order[: len(kept)]] = kept / kept.sum()
    return out


def joint(params: SamplingParams, length: int = 3) -> dict[tuple[int, ...], float]:
    """The exact law of the first tokens."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for written, mass in law.items():
            p = filtered(target_logits(pair()[0], [*PROMPT, *written])[-1], params)
            longer |= {(*written, t): mass * p[t] for t in range(TOKENS) if p[t] > 0}
        law = longer
    return law


def chi_square(texts: list[list[int]], law: dict[tuple[int, ...], float]) -> float:
    """p-value of the first tokens of `texts` against `law`; rare outcomes go together."""
    length = len(next(iter(law)))
    seen = dict.fromkeys(law, 0)
    for text in texts:
        assert tuple(text[:length]) in seen, "a filtered token was drawn"
        seen[tuple(text[:length])] += 1
    common = [t for t, mass in law.items() if mass * len(texts) >= 8]
    observed = [seen[t] for t in common]
    expected = [law[t] * len(texts) for t in common]
    rest = sum(law.values()) * len(texts) - sum(expected)
    if rest > 1e-6 * len(texts):
        observed.append(len(texts) - sum(observed))
        expected.append(rest)
    assert len(common) > 3
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


LAWS = {
    "T 1": SamplingParams(temperature=1.0, max_tokens=4),
    "T 0.7": SamplingParams(temperature=0.7, max_tokens=4),
    "filters": SamplingParams(temperature=1.0, top_k=6, top_p=0.9, min_p=0.05, max_tokens=4),
}
DRAFTED = {"T 1": ("chain", "tree"), "T 0.7": ("tree",), "filters": ("chain", "ngram")}
SHAPES: dict[str, SpeculationConfig] = {
    "none": NONE,
    "chain": chain(3),
    "chain, plain top-k": chain(3, shared_noise=False),
    "tree": SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=9),
    "ngram": chain(3, "NGRAM"),
}


def jobs(params: SamplingParams, count: int = COUNT) -> list[Job]:
    values = {
        name: getattr(params, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    }
    return [Job(prompt=PROMPT, params=SamplingParams(seed=s, **values)) for s in range(count)]


def sample(params: SamplingParams, shape: str) -> tuple[list[list[int]], list[list[int]]]:
    """Texts and accept lengths."""
    target, network = pair()
    config: dict[str, Any] = {"max_running_requests": 512, "context_length": 32}
    engine = make_engine(target, network, SHAPES[shape], chunked_prefill_size=4 * 512, **config)
    requests = [engine.add(j.prompt, j.params) for j in jobs(params)]
    while engine.scheduler.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    return outputs(requests), [r.accept_lengths for r in requests]


@pytest.mark.parametrize("name", LAWS)
def test_texts_have_the_targets_law(name: str) -> None:
    """Fault: sampling silently greedy (s#39253), biased by drafts, or filtered wrongly.

    Chi-square over 2048 seeds for plain decoding, odds 1e-6; then chain, tree and n-gram give the
    same texts seed by seed, so that their law is this one too.
    """
    plain, _ = sample(LAWS[name], "none")
    assert chi_square(plain, joint(LAWS[name])) > ODDS
    for shape in DRAFTED[name]:
        texts, lengths = sample(LAWS[name], shape)
        assert texts == plain, shape
        assert chi_square(texts, joint(LAWS[name])) > ODDS
        accepted = np.mean([sum(n) / len(n) for n in lengths])
        assert accepted > 1.2, f"{shape}: hardly a draft was accepted, the test shows little"


def draft_law(network: Eagle3, target: Decoder, text: list[int]) -> np.ndarray[Any, Any]:
    """The drafter's own law of the token behind `text` at temperature 1, in float64."""
    plain = PlainEagle3(network, target.embed.weight)
    last = plain.read(text, target_states(target, text, network.config.aux_layers))
    return plain.score(last)[0].softmax(-1).numpy()


def test_acceptance_under_shared_noise() -> None:
    """Fault: temperature > 0 accepts too strictly (v#40551).

    First drafts behind 2048 sampled first tokens. With shared noise they are accepted at least
    (1 - TV) / (1 + TV) of the time (arXiv 2408.07978) and at most 1 - TV; plain top-1 drafts with
    the target's probability of the drafter's favourite. Each within 5 sigma: odds 6e-7.
    """
    target, network = pair()
    params = SamplingParams(temperature=1.0, max_tokens=4)
    first = filtered(target_logits(target, PROMPT)[-1], params)
    lower = upper = plain = 0.0
    with torch.inference_mode():
        for token in range(TOKENS):
            text = [*PROMPT, token]
            p = filtered(target_logits(target, text)[-1], params)
            q = draft_law(network, target, text)
            distance = 0.5 * np.abs(p - q).sum()
            lower += first[token] * (1 - distance) / (1 + distance)
            upper += first[token] * (1 - distance)
            plain += first[token] * p[np.argmax(q)]
    sigma = 0.5 / COUNT**0.5
    rates = {}
    for shape in ("chain", "chain, plain top-k"):
        _, lengths = sample(params, shape)
        rates[shape] = float(np.mean([n[0] > 1 for n in lengths]))
    assert lower - 5 * sigma <= rates["chain"] <= upper + 5 * sigma
    assert abs(rates["chain, plain top-k"] - plain) <= 5 * sigma


def test_a_draft_that_is_always_offered_biases_nothing() -> None:
    """Fault: acceptance that favours what is drafted. Every pair of tokens drafted, same law."""
    target, _ = pair()
    params = SamplingParams(temperature=1.0, max_tokens=4)
    plain, _ = sample(params, "none")
    shape = SpeculationConfig(num_steps=2, eagle_topk=5, num_draft_tokens=11)
    for path in itertools.islice(itertools.permutations(range(TOKENS), 2), 0, 56, 11):
        drafter = ScriptedDrafter([[*PROMPT, t, *path] for t in range(TOKENS)], shape, vocab=TOKENS)
        engine = make_engine(target, drafter, shape, max_running_requests=128, context_length=32)
        requests = run_all(engine, jobs(params, 128))
        assert outputs(requests) == plain[:128]
