"""The benchmark of equal texts, on a tiny model: what it says of equal and of unequal texts."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import LLM
from tests.chat_model import write_chat_model, write_drafter

FOLDER = Path(__file__).parent.parent / "benchmarks"
FLAGS = ("--tokens", "12", "--prompts", "3", "--batches", "1", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script as a module, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("lossless")
    sys.path.remove(str(FOLDER))
    torch.set_num_threads(before)


@pytest.fixture
def tiny(
    script: Any, tmp_path: Path, save_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The script with a tiny model under a real one's name."""
    (tmp_path / "target").mkdir()
    (tmp_path / "drafter").mkdir()
    target = write_chat_model(tmp_path / "target", save_llama)
    drafter = write_drafter(tmp_path / "drafter")
    model = script.Model(target=str(target), drafter=str(drafter))
    monkeypatch.setitem(script.MODELS, "smollm2", model)
    monkeypatch.setattr(script, "ROOM", 300)
    return script


def test_where_texts_part(script: Any) -> None:
    """Fault: a text that ends early called equal, or a difference at another place."""
    assert script.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert script.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert script.first_difference([1, 2], [1, 2, 3]) == 2
    assert script.first_difference([1, 2, 3], [1, 2]) == 2


def test_equal_texts(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a run left out, or a record without what it is of."""
    file = tmp_path / "record.json"
    assert tiny.main([*FLAGS, "--models", "smollm2", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert [(r["value"], r["goal"], r["holds"]) for r in record["rows"]] == [(3, 3, True)] * 6
    assert {(t["run"], t["batch"]) for t in record["texts"]} == {
        (run, batch) for run in ("plain", "chain", "tree") for batch in (1, 2)
    }
    assert all(t["tokens"] == 12 and t["first_difference"] is None for t in record["texts"])
    assert all((t["accept_length"] is None) == (t["run"] == "plain") for t in record["texts"])
    assert record["flags"]["deterministic"] == "on" and record["provenance"]["code"]
    assert "row tile" in record["row_checks"]["smollm2"]["skipped"]
    assert capsys.readouterr().out.count("equal") == 18


def test_a_difference_is_found(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a text that differs passed over. The second prompt's text is changed on its way."""
    whole = LLM.generate

    def changed(self: LLM, prompts: Any, *rest: Any, **more: Any) -> Any:
        outputs = whole(self, prompts, *rest, **more)
        timed = len(outputs[0].token_ids) == 12
        if self.engine.speculation.algorithm != "NONE" and len(prompts) == 2 and timed:
            outputs[1].token_ids[7] += 1
        return outputs

    monkeypatch.setattr(LLM, "generate", changed)
    assert tiny.main([*FLAGS, "--models", "smollm2", "--runs", "chain", "--json"]) == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    places = [(t["batch"], t["prompt"], t["first_difference"]) for t in record["texts"]]
    assert [p for p in places if p[2] is not None] == [(2, 1, 7)]
    assert [row["holds"] for row in record["rows"]] == [True, True, True, False]
    assert "at 7" in err
