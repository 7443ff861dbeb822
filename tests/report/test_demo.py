"""The demo on a tiny model: it shows both sides, checks every text and tells the truth."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.engine import LLM
from eyas.errors import ConfigError
from eyas.report import demo as module
from eyas.report.demo import Column, demo, side_by_side
from tests.chat_model import write_chat_model, write_drafter
from tests.helpers import make_engine, random_prompts, tiny_target


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable[..., Any]) -> LLM:
    folder = tmp_path_factory.mktemp("demo")
    model = write_chat_model(folder / "model", save_llama, max_position_embeddings=1024)
    drafter = write_drafter(folder / "drafter", max_position=1024)
    return LLM(str(model), drafter=str(drafter), config=EngineConfig(dtype="float32"))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_whole_demo(llm: LLM, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN_TOKENS", 8)
    monkeypatch.setattr(module, "CHECKED_TOKENS", 6)
    monkeypatch.setattr(module, "BENCHED_TOKENS", 6)
    file = io.StringIO()
    assert demo(llm, Console(file=file, force_terminal=terminal, width=100, highlight=False))
    text = file.getvalue()
    assert text.count("plain decoding") >= len(module.SHOWN)
    assert "greedy: 4 of 4 texts equal" in text
    assert "sampled at temperature 0.8: 4 of 4 texts equal" in text
    assert "verify of 5 nodes" in text
    assert ("\x1b[" in text) == terminal


def test_a_column_loses_no_text(llm: LLM) -> None:
    prompt = llm.tokenizer.chat([{"role": "user", "content": "hello"}])
    column = Column("x", llm.engine, prompt, 16)
    while not column.answering.done:
        column.step()
    assert "".join(column.pieces) == column.answering.requests[0].text
    assert "1.0 a pass" in column.summary()


def test_unequal_texts_are_noticed() -> None:
    console = Console(file=io.StringIO(), width=100)
    prompt = random_prompts((5,))[0]
    first, other = make_engine(tiny_target()), make_engine(tiny_target(seed=7))
    assert side_by_side(first, make_engine(tiny_target()), "?", prompt, console)
    assert not side_by_side(first, other, "?", prompt, console)


def test_without_a_drafter_it_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no drafter was found"):
        demo(llm.sibling(SpeculationConfig(algorithm="NONE")), Console(file=io.StringIO()))
