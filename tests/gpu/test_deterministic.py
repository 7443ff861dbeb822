"""Rows that depend on no others, on a GPU: the trial at start, and texts in bfloat16 under graphs.

`benchmarks/lossless.py` compares long texts of real models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch

from eyas.attention.triton import TritonAttention
from eyas.checkpoint import read_config, resolve
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM
from eyas.engine.graphs import GraphKey
from eyas.engine.row_check import check_rows
from eyas.errors import ConfigError
from eyas.model_config import ModelConfig
from eyas.models.dummy import dummy_target
from eyas.models.families import model_config
from eyas.speculate.eagle3 import Eagle3Drafter
from tests.helpers import NONE, TREES, chain, make_engine, random_prompts, tiny_drafter, tiny_target

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
ASSETS = Path(__file__).parents[2] / "assets" / "small-deepseek"
SHAPES = ("llama-3.1-8b", "smollm2-135m", "qwen3-30b-a3b", "deepseek-v2-lite")
COUNTS = (1, 2, 3, 4, 8, 16, 17, 32, 33, 64, 65, 128, 200)
"""Rows of a pass, at the edges of tiles and calls, and past what kernels of few rows take."""
RUNS: dict[str, SpeculationConfig] = {
    "chain": chain(4),
    "tree": TREES[2],
    "ngram": chain(4, "NGRAM"),
    "chain, as prefill": chain(4, attention_mode="prefill"),
    "tree, as prefill": dataclasses.replace(TREES[2], attention_mode="prefill"),
}
TOKENS = 64


def two_layers(shape: str) -> ModelConfig:
    """A real shape cut to its first and its last kind of layer."""
    config = model_config(read_config(resolve(f"shape:{shape}")))
    moe = config.moe
    if moe is not None:
        ends = (moe.sparse_layers[0], moe.sparse_layers[-1])
        moe = dataclasses.replace(moe, sparse_layers=ends)
    windows = config.windows[:2] if config.windows else config.windows
    return dataclasses.replace(config, num_layers=2, moe=moe, windows=windows)


@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_rows_are_independent(shape: str) -> None:
    """Fault: a product left to the library, or a call whose rows are not alike."""
    target = dummy_target(two_layers(shape), torch.bfloat16, DEVICE, deterministic=True)
    found = check_rows(target, COUNTS)
    assert found.products >= 4
    assert not found.dependent, "; ".join(map(str, found.dependent))


def test_the_trial_takes_less_than_a_second() -> None:
    """Fault: a start that got slow. The 8B shape, with kernels compiled and the library awake."""
    target = dummy_target(two_layers(SHAPES[0]), torch.bfloat16, DEVICE)
    check_rows(target, (1, 32))
    assert check_rows(target, (1, 2, 4, 8, 16, 32, 64, 128)).seconds < 1


def test_engines_try_rows_before_graphs() -> None:
    """Fault: a GPU on which nothing was tried."""
    engine = make_engine(tiny_target(torch.bfloat16, device=DEVICE))
    found = engine.runner.row_check
    assert not found.skipped and found.counts == (1, 2, 4, 8) and found.products


def test_the_switch_reaches_what_it_is_of() -> None:
    """Fault: a switch that nobody reads, or one that promises what the network does not keep."""
    target, drafter = tiny_target(device=DEVICE), tiny_drafter(device=DEVICE)
    for word, orders in (("auto", True), ("off", False)):
        engine = make_engine(target, drafter, TREES[0], deterministic=word)
        parts = engine.runner.parts
        assert isinstance(parts.drafter, Eagle3Drafter)
        for attention in (parts.attention, parts.drafter.attention):
            assert isinstance(attention, TritonAttention) and attention.deterministic is orders
    with pytest.raises(ConfigError, match="row_tile"):
        make_engine(target, deterministic="on")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer for prompts that are ids: the small DeepSeek's own is a package."""
    folder = tmp_path_factory.mktemp("words")
    vocab = {str(i): i for i in range(read_config(ASSETS / "target")["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "0")).save(
        str(folder / "tokenizer.json")
    )
    return str(folder)


@pytest.fixture(scope="module", params=["shape:smollm2-135m", str(ASSETS / "target")])
def llm(request: pytest.FixtureRequest, words: str) -> Iterator[LLM]:
    """A deterministic model with its drafter: random weights, or the real small DeepSeek."""
    dummy = request.param.startswith("shape:")
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        deterministic="on",
        context_length=512,
        max_running_requests=8,
        tokenizer="" if dummy else words,
        load_format="dummy" if dummy else "auto",
        draft_weights="int8",
    )
    drafter = "auto" if dummy else str(ASSETS / "drafter")
    yield LLM(request.param, drafter=drafter, speculation=chain(4), config=config, engines=3)
    torch.cuda.empty_cache()


def write(llm: LLM, batch: int) -> list[list[int]]:
    """Eight greedy answers, so many at a time."""
    prompts = random_prompts([5, 17, 33, 1, 50, 64, 100, 7], vocab=40_000)
    params, texts = SamplingParams(max_tokens=TOKENS, ignore_eos=True), []
    for first in range(0, len(prompts), batch):
        texts += llm.generate(prompts[first : first + batch], params)
    return [text.token_ids for text in texts]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """What plain decoding writes, one prompt at a time."""
    return write(llm.sibling(NONE), 1)


@pytest.mark.parametrize("run", ["none", *RUNS])
def test_texts_are_those_of_plain_decoding(llm: LLM, plain: list[list[int]], run: str) -> None:
    """Fault: verify rows, or rows in a batch, whose bits are not those of decoding alone."""
    side = llm.sibling(RUNS.get(run, NONE))
    assert side.engine.runner.row_check.dependent == ()
    for batch in (1, 8):
        assert write(side, batch) == plain, f"{run}, batch {batch}"
    keys = side.engine.runner.graphs.counts
    assert all(isinstance(key, GraphKey) for key in keys), f"eager cycles: {keys}"
    attention = side.engine.runner.parts.attention
    assert isinstance(attention, TritonAttention)
    assert attention.whole is ("as prefill" in run)
