"""The `LLM` facade over a tiny checkpoint: order of answers, streaming, siblings, interruption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from eyas import LLM, EngineConfig, SamplingParams, SpeculationConfig
from eyas.errors import ConfigError, RequestError
from eyas.speculate.drafter import NGramDrafter, NoDrafter
from tests.helpers import chain, check, random_prompts, toy_backend

CONFIG = EngineConfig(dtype="float32", device="cpu", page_size=4)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with the toy tokenizer."""
    made = tmp_path_factory.mktemp("llm") / "tiny"
    shutil.copytree(tiny_llama_folder, made)
    toy_backend(128).save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), speculation=chain(3, "NGRAM"), config=CONFIG)


def test_answers_come_in_order(llm: LLM) -> None:
    """Fault: answers exchanged between prompts that share batches."""
    prompts: list[Any] = ["abc", [5, 6, 7], "ba" * 20, "e"]
    params = [
        SamplingParams(max_tokens=n, temperature=1.0, seed=n, ignore_eos=True)
        for n in (9, 3, 15, 6)
    ]
    together = llm.generate(prompts, params)
    one_by_one = [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in one_by_one]
    assert [o.text for o in together] == [o.text for o in one_by_one]
    assert [len(o.token_ids) for o in together] == [9, 3, 15, 6]
    assert together[1].prompt_token_ids == (5, 6, 7)
    assert all(o.finish_reason == "length" for o in together)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    """Fault: pieces that do not add up, or that show a stop string."""
    answer = llm.generate(["abcd"], SAMPLED)[0]
    assert len(answer.text) > 8
    assert "".join(llm.stream("abcd", SAMPLED)) == answer.text
    stop = answer.text[5:8]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, stop=(stop,))
    pieces = list(llm.stream("abcd", params))
    assert all(pieces), "no piece is empty"
    assert "".join(pieces) == answer.text[: answer.text.index(stop)]
    assert llm.generate(["abcd"], params)[0].text == "".join(pieces)


def test_a_closed_stream_gives_its_pages_back(llm: LLM) -> None:
    """Fault: KV leaks when a reader goes away."""
    stream: Any = llm.stream("abcdeabcde", SAMPLED)
    next(stream)
    assert llm.engine.scheduler.has_work
    stream.close()
    assert not llm.engine.scheduler.has_work
    check(llm.engine)
    assert llm.engine.scheduler.allocator.num_free == llm.engine.config.num_pages - 1


def test_two_streams_and_a_batch_share_an_engine(llm: LLM) -> None:
    """Fault: readers that steal each other's text."""
    other = SamplingParams(max_tokens=9, temperature=0.7, seed=1, ignore_eos=True)
    expected = [llm.generate(["abc"], SAMPLED)[0].text, llm.generate(["dd"], other)[0].text]
    first, second = llm.stream("abc", SAMPLED), llm.stream("dd", other)
    shown = ["", ""]
    shown[0] += next(first)
    shown[1] += next(second)
    answer = llm.generate(["abc"], SAMPLED)[0].text
    shown[1] += "".join(second)
    shown[0] += "".join(first)
    assert shown == expected
    assert answer == expected[0]


def test_an_interrupted_batch_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an engine that goes on with the work of a call that has failed."""
    step, left = llm.engine.step, [4]

    def interrupted() -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "de", "abcde" * 9], SAMPLED)
    monkeypatch.undo()
    assert not llm.engine.scheduler.has_work
    check(llm.engine)
    assert llm.engine.scheduler.allocator.num_free == llm.engine.config.num_pages - 1


def test_every_prompt_is_checked_before_the_first_runs(llm: LLM) -> None:
    """Fault: a batch that fails half way."""
    with pytest.raises(RequestError, match="empty prompt"):
        llm.generate(["abc", "", "de"], SAMPLED)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["abc"], [SAMPLED, SAMPLED])
    with pytest.raises(RequestError, match="token id 128"):
        list(llm.stream([128], SAMPLED))
    assert not llm.engine.scheduler.has_work


def test_a_sibling_has_its_own_drafter_and_pools(llm: LLM) -> None:
    """Fault: two engines over one cache, or a sibling that drafts as its parent does."""
    plain = llm.sibling(SpeculationConfig(algorithm="NONE"))
    assert isinstance(plain.engine.runner.parts.drafter, NoDrafter)
    assert isinstance(llm.engine.runner.parts.drafter, NGramDrafter)
    assert plain.target is llm.target
    assert plain.engine.runner.parts.pool is not llm.engine.runner.parts.pool
    texts = [one.generate(["abcab"], SAMPLED)[0].token_ids for one in (plain, llm)]
    assert texts[0] == texts[1]


def test_defaults_without_a_shipped_drafter(folder: Path) -> None:
    """Without a drafter for the target decoding is plain; asking for EAGLE-3 is refused."""
    one = LLM(str(folder), config=CONFIG)
    assert isinstance(one.engine.runner.parts.drafter, NoDrafter)
    assert one.generate([random_prompts([7])[0]])[0].token_ids
    with pytest.raises(ConfigError, match="without a drafter"):
        LLM(str(folder), speculation=chain(2), config=CONFIG)


def test_no_prompts_no_answers(llm: LLM) -> None:
    """An empty batch is no error."""
    assert llm.generate([]) == []
