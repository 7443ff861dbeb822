"""A small language model as drafter: what it drafts, how much is accepted, what it may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.errors import CheckpointError, ConfigError
from eyas.models.decoder import Decoder
from eyas.sampling import gumbel_noise
from eyas.speculate.checkpoints import same_vocabulary
from eyas.tokenizer import Tokenizer
from tests.eagle3_reference import Noise, target_logits
from tests.helpers import (
    TREES,
    VOCAB,
    Job,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    randomise,
    run_all,
    tiny_drafter,
    tiny_model,
    tiny_target,
)
from tests.speculate.recording import paths, record

PARAMS = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, temperature=1.0, seed=3),
    SamplingParams(max_tokens=20, temperature=0.7, seed=2**40 + 1),
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, temperature=1.0, seed=9),
]
JOBS = [
    Job(prompt=prompt, params=params, join=join)
    for prompt, params, join in zip(
        random_prompts([15, 4, 24, 1, 40], seed=2), PARAMS, (0, 0, 3, 1, 2), strict=True
    )
]
TREE = dataclasses.replace(TREES[1], algorithm="STANDALONE")
CONFIGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"chunked_prefill_size": 7, "page_size": 1, "max_running_requests": 3},
    "preempted": {"page_size": 4, "num_pages": 30, "chunked_prefill_size": 16},
    "one by one": {"max_running_requests": 1, "page_size": 64},
    "one cycle late": {"overlap": "on"},
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_target()


@pytest.fixture(scope="module")
def expected(target: Decoder) -> list[list[int]]:
    return alone(target, JOBS)


def best(
    logits: torch.Tensor, index: int, topk: int, noise: Noise | None
) -> list[tuple[int, float]]:
    """The best (token, log score) of logits float64[V] that draw the token at `index`."""
    if noise is not None:
        seed, ids = torch.tensor([noise.seed]), torch.arange(len(logits))
        perturbation = gumbel_noise(seed, torch.tensor([index]), ids)[0]
        logits = logits / noise.temperature + perturbation
    values, tokens = logits.log_softmax(-1).topk(topk)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


def expected_paths(
    model: Decoder, text: tuple[int, ...], shape: SpeculationConfig, noise: Noise | None
) -> set[tuple[int, ...]]:
    """The tree behind `text`, every node's logits from the whole text before it, without caches."""
    topk = shape.eagle_topk

    def children(path: tuple[int, ...], score: float) -> list[tuple[tuple[int, ...], float]]:
        logits = target_logits(model, [*text, *path])[-1].double()
        found = best(logits, len(text) + len(path), topk, noise)
        return [((*path, token), score + s) for token, s in found]

    pool = frontier = children((), 0.0)
    for _ in range(1, shape.num_steps):
        born = [child for node in frontier for child in children(*node)]
        pool = pool + born
        frontier = sorted(born, key=lambda node: -node[1])[:topk]
    chosen = sorted(pool, key=lambda node: -node[1])[: shape.num_draft_tokens - 1]
    return {path for path, _ in chosen}


@pytest.mark.parametrize("shape", [chain(1, "STANDALONE"), chain(5, "STANDALONE"), TREE], ids=str)
def test_drafts_are_the_models_own_texts(shape: SpeculationConfig, target: Decoder) -> None:
    """Fault: a shift by one between tokens and positions, or a root read twice or not at all."""
    model = tiny_model()
    engine = make_engine(target, model, shape, chunked_prefill_size=11, page_size=4)
    recorder = record(engine)
    run_all(engine, JOBS)
    assert len(recorder.drafts) > 20
    for known, draft, row in recorder.drafts:
        job = next(j for j in JOBS if known[: len(j.prompt)] == j.prompt)
        noise = None
        if job.params.temperature > 0:
            assert job.params.seed is not None
            noise = Noise(seed=job.params.seed, temperature=job.params.temperature)
        assert paths(draft, row) == expected_paths(model, known, shape, noise)


CYCLES = [*((k, name) for k in (1, 3, 8) for name in CONFIGS), (62, "together")]


@pytest.mark.parametrize(("drafts", "config"), CYCLES)
def test_the_target_itself_is_always_right(
    target: Decoder, expected: list[list[int]], drafts: int, config: str
) -> None:
    """Fault: width off by one (s#8228), a stale or missing entry. Exactly K + 1 tokens a cycle."""
    engine = make_engine(target, target, chain(drafts, "STANDALONE"), **CONFIGS[config])
    requests = run_all(engine, JOBS)
    assert outputs(requests) == expected
    assert {n for r in requests for n in r.accept_lengths} == {drafts + 1}
    if config == "preempted":
        assert any(r.num_preemptions for r in requests), "the pool is too large to preempt"


@pytest.mark.parametrize("chunk", [512, 100])
def test_the_root_sees_itself_at_an_edge(chunk: int) -> None:
    """Fault: the root's row, one past a prompt chunk, beyond what attention was told to read."""
    target = tiny_target(max_position=512)
    randomise(target, 0, 0.5)
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=5))
        for p in random_prompts([255, 256, 256, 256, 256, 257], seed=4)
    ]
    config: dict[str, Any] = {"max_running_requests": 1, "chunked_prefill_size": chunk}
    requests = run_all(make_engine(target, target, chain(3, "STANDALONE"), **config), jobs)
    assert {n for r in requests for n in r.accept_lengths} == {4}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", [chain(4, "STANDALONE"), TREE], ids=["chain", "tree"])
def test_another_model_changes_no_text(
    target: Decoder, expected: list[list[int]], shape: SpeculationConfig, config: str
) -> None:
    """Fault: losses through the drafter; batch of 1 and 5, chunks, preemption, late results."""
    engine = make_engine(target, tiny_model(), shape, **CONFIGS[config])
    assert outputs(run_all(engine, JOBS)) == expected


@pytest.mark.parametrize("size", [50, 96])
def test_padded_vocabularies(target: Decoder, expected: list[list[int]], size: int) -> None:
    """Fault: an id past the embedding's end, or a draft that the target does not have.

    A model with fewer ids than the target reads unknown ones as its last; one with more drafts
    only the target's. Nothing else changes: with the target's ids it drafts as before.
    """
    model = tiny_model(vocab_size=size)
    for shape in (chain(4, "STANDALONE"), TREE):
        engine = make_engine(target, model, shape)
        recorder = record(engine)
        assert outputs(run_all(engine, JOBS)) == expected
        drafted = torch.cat([draft.tokens[row, 1:] for _, draft, row in recorder.drafts])
        assert int(drafted.max()) < min(size, VOCAB)


REFUSED: list[tuple[dict[str, Any], SpeculationConfig, str]] = [
    ({"max_position": 100}, chain(2, "STANDALONE"), "drafter of 100 positions"),
    ({"vocab_size": 2}, TREE, "the drafter knows 2 tokens"),
    ({}, chain(2), "algorithm EAGLE3 with a drafter that is a language model"),
]


@pytest.mark.parametrize(("changes", "shape", "message"), REFUSED, ids=str)
def test_a_model_that_cannot_draft_is_refused(
    target: Decoder, changes: dict[str, Any], shape: SpeculationConfig, message: str
) -> None:
    """It would fail inside a cycle, or not be what was asked for."""
    with pytest.raises(ConfigError, match=message):
        make_engine(target, tiny_model(**changes), shape)


def test_other_drafters_are_refused(target: Decoder) -> None:
    """An algorithm and a drafter that do not belong together; 8-bit weights are EAGLE-3's."""
    shape = chain(2, "STANDALONE")
    with pytest.raises(ConfigError, match="STANDALONE with a drafter that is an EAGLE-3 network"):
        make_engine(target, tiny_drafter(), shape)
    with pytest.raises(ConfigError, match="STANDALONE without a drafter: it needs a small model"):
        make_engine(target, None, shape)
    with pytest.raises(ConfigError, match="draft_weights int8 with STANDALONE"):
        make_engine(target, tiny_model(), shape, draft_weights="int8")
    with pytest.raises(ConfigError, match="writes 65 positions ahead, at most 64"):
        chain(63, "STANDALONE")


def save_tokens(
    folder: Path, pieces: list[str], special: tuple[str, ...] = ("<end>",)
) -> Tokenizer:
    """A tokenizer of these pieces."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=pieces[0]))
    backend.add_special_tokens(list(special))
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_vocabularies_are_compared(tmp_path: Path) -> None:
    """Fault: a model of another tokenizer, whose ids mean other tokens: it only accepts less."""
    target = save_tokens(tmp_path / "target", ["a", "b", "c"])
    same_vocabulary(target, save_tokens(tmp_path / "same", ["a", "b", "c"]))
    same_vocabulary(target, save_tokens(tmp_path / "bare", ["a", "b", "c"], ()))
    wrong = {
        "moved": (["a", "c", "b"], "token 'b' is 2: the target's tokenizer has it as 1"),
        "fewer": (["a", "b"], "token 'c': is in the target's tokenizer only"),
        "more": (["a", "b", "c", "d"], "token '<end>' is 4: the target's tokenizer has it as 3"),
    }
    for name, (pieces, message) in wrong.items():
        special = ("<end>",) if name == "more" else ()
        with pytest.raises(CheckpointError, match=message):
            same_vocabulary(target, save_tokens(tmp_path / name, pieces, special))
    odd = save_tokens(tmp_path / "odd", ["a", "b", "c", "d"], ())
    with pytest.raises(CheckpointError, match="token 'd': is in the drafter's tokenizer only"):
        same_vocabulary(target, odd)
