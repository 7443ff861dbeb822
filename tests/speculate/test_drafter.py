"""Drafters inside a running engine, against drafting written out plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.sampling import SamplingRows
from eyas.speculate.drafter import DraftContext, NGramDrafter
from eyas.speculate.eagle3 import Eagle3Drafter
from tests.eagle3_reference import Noise, draft_paths
from tests.helpers import (
    LATENT,
    TREES,
    VOCAB,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)
from tests.speculate.recording import paths, record

SHAPES = [chain(1), chain(4), chain(8), *TREES]
KINDS: dict[str, dict[str, Any]] = {
    "3.1": {},
    "3": {"fc_norm": False, "norm_output": False},
    "speculators": {"norm_before_residual": True, "own_embedding": True, "seed": 9},
    "borrowed head": {"own_head": False, "draft_vocab_size": VOCAB, "logit_scale": 0.5},
    "one state": {"fused": False, "fc_norm": False, "aux_layers": (4,), "last_norm": False},
    "two layers": {"num_layers": 2, "qk_norm": True, "qkv_bias": True, "windows": (0, 64)},
    "latent": {"mla": LATENT, "fc_norm": False, "norm_before_fc": True, "fc_bias": True},
}
NETWORKS = {name: tiny_drafter(**changes) for name, changes in KINDS.items()}


def shape_name(case: object) -> str:
    """Steps, top-k and nodes; of a network, its name."""
    if isinstance(case, SpeculationConfig):
        return f"{case.num_steps}-{case.eagle_topk}-{case.num_draft_tokens}"
    return next(name for name, network in NETWORKS.items() if network is case)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_target()


CASES = [
    *((shape, NETWORKS["3.1"]) for shape in SHAPES),
    *((shape, NETWORKS["3"]) for shape in (chain(4), TREES[1])),
    *((shape, NETWORKS["speculators"]) for shape in (chain(4), TREES[1])),
    *(
        (shape, NETWORKS[name])
        for name in ("borrowed head", "one state", "two layers", "latent")
        for shape in (chain(3), TREES[1])
    ),
]


@pytest.mark.parametrize(("shape", "network"), CASES, ids=shape_name)
def test_eagle3_drafts_what_the_reference_drafts(
    shape: SpeculationConfig, network: Eagle3, target: Decoder
) -> None:
    """Fault: draft positions off by one (s PR#25015), wrong token beside a state, stale draft KV.

    Greedy and sampled requests; drafts after the prompt, after chunks and after cycles.
    """
    params = [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3),
        SamplingParams(max_tokens=8, temperature=0.7, seed=2**40 + 1, top_k=9),
    ]
    prompts = random_prompts([15, 4, 24], seed=2)
    jobs = [Job(prompt=p, params=q) for p, q in zip(prompts, params, strict=True)]
    engine = make_engine(target, network, shape, chunked_prefill_size=11, page_size=4)
    recorder = record(engine)
    run_all(engine, jobs)
    assert recorder.drafts
    for known, draft, row in recorder.drafts:
        job = next(j for j in jobs if known[: len(j.prompt)] == j.prompt)
        assert draft.tokens.shape[1] == shape.num_draft_tokens
        noise = None
        if job.params.temperature > 0:
            assert job.params.seed is not None
            noise = Noise(seed=job.params.seed, temperature=job.params.temperature)
        expected = draft_paths(network, target, known, shape, noise)
        assert paths(draft, row) == expected, f"behind {len(known)} tokens"


def test_without_shared_noise_the_likeliest_are_drafted(target: Decoder) -> None:
    """Fault: an option that does nothing. Then a sampled request's drafts are plain top-k."""
    shape = chain(3, shared_noise=False)
    network = NETWORKS["3.1"]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
    engine = make_engine(target, network, shape)
    recorder = record(engine)
    run_all(engine, [Job(prompt=random_prompts([9])[0], params=params)])
    for known, draft, row in recorder.drafts:
        assert paths(draft, row) == draft_paths(network, target, known, shape)


def ngram(text: list[int], drafts: int, most: int) -> list[int]:
    """Prompt lookup in plain python: longest suffix up to `most`, then the latest place."""
    last = len(text) - 1
    best, longest = 0, 0
    for end in range(last):
        size = 0
        while size < most and end >= size and text[end - size] == text[last - size]:
            size += 1
        if size and size >= longest:
            best, longest = end, size
    if not longest:
        return []
    run = text[best + 1 :]
    return [run[i % len(run)] for i in range(drafts)]


@pytest.mark.parametrize("vocab", [2, 3, 10, 1000])
def test_ngram_equals_plain_lookup(vocab: int) -> None:
    """Fault: lookup past the text, into another request's leftovers, or at a shorter match."""
    generator = torch.Generator().manual_seed(vocab)
    width, slots = 90, torch.tensor([4, 0, 2, 3, 1])
    history = torch.randint(0, vocab, (6, width), generator=generator)
    rows = torch.zeros(5)
    for round_ in range(20):
        kv_lens = torch.randint(1, 80, (5,), generator=generator)
        if round_ == 0:
            kv_lens[:] = 1
        context = DraftContext(
            slots=slots,
            roots=history[slots, kv_lens],
            kv_lens=kv_lens,
            page_table=torch.zeros(5, 1).long(),
            history=history,
            rows=SamplingRows(temperature=rows, top_k=rows, top_p=rows, min_p=rows, seed=rows),
            sampled=False,
            max_kv_len=int(kv_lens.max()) + 8,
        )
        draft = NGramDrafter(7, max_match=4).propose(context)
        assert draft.parents is None
        for row in range(5):
            text = history[slots[row], : kv_lens[row] + 1].tolist()
            assert int(draft.tokens[row, 0]) == text[-1]
            expected = ngram(text, 7, 4)
            if expected:
                assert draft.tokens[row, 1:].tolist() == expected


def test_a_broken_drafter_changes_nothing(target: Decoder) -> None:
    """Fault: losses through the drafter. Weights that are all NaN cost speed only."""
    prompts = random_prompts([5, 20, 9], seed=6)
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=15, temperature=t, seed=1))
        for p, t in zip(prompts, (0.0, 1.0, 0.0), strict=True)
    ]
    plain = outputs(run_all(make_engine(target), jobs))
    broken = tiny_drafter()
    for parameter in broken.parameters():
        parameter.data.fill_(torch.nan)
    for shape in (chain(3), *TREES):
        assert outputs(run_all(make_engine(target, broken, shape), jobs)) == plain


@pytest.mark.parametrize("name", KINDS)
def test_rounded_drafters_change_no_text(name: str) -> None:
    """Fault: a pass with 8-bit weights that leaves out a bias, a layer or the borrowed head."""
    target, network = tiny_target(torch.bfloat16), tiny_drafter(torch.bfloat16, **KINDS[name])
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=12, temperature=t, seed=1))
        for p, t in zip(random_prompts([5, 20], seed=6), (0.0, 1.0), strict=True)
    ]
    plain = outputs(run_all(make_engine(target), jobs))
    engine = make_engine(target, network, chain(3), draft_weights="int8")
    drafter = engine.runner.parts.drafter
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.quick is not None
    assert outputs(run_all(engine, jobs)) == plain
