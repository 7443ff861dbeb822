"""What each rank is, as it sees itself; a difference is said before anything is generated."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os

import pytest
import torch

from eyas.distributed.fingerprints import Mismatch, RankPrint, mismatches, rank_print, record
from eyas.distributed.settings import LibrarySettings
from eyas.engine.ranks import Ranks
from eyas.errors import ConfigError
from tests.distributed.worlds import LLAMA, TinySource
from tests.helpers import CPU


def started() -> bool:
    """Whether this is not rank 0."""
    return multiprocessing.parent_process() is not None


class Forgetful(TinySource):
    """A rank other than 0 loses a setting, gains another, and works with more threads."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """Called before a rank looks at itself."""
        if started():
            del os.environ["NCCL_ALGO"]
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            torch.set_num_threads(3)
        return super().facts(device)


class Different(TinySource):
    """A rank other than 0 would load another type."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """As every rank sees it."""
        return {"dtype": "bfloat16" if started() else "float32"}


def test_a_setting_lost_in_one_rank_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: NCCL variables set in the parent and lost in workers, and nobody knows."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    ranks = Ranks(Forgetful(target=LLAMA.target, drafter=LLAMA.drafter), 2, "cpu")
    ranks.close()
    expected = [
        "rank 1: NCCL_ALGO is unset, on rank 0 it is Ring",
        "rank 1: TORCH_NCCL_BLOCKING_WAIT is 1, on rank 0 it is unset",
        "rank 1: threads is 3, on rank 0 it is 1",
    ]
    assert [str(one) for one in ranks.mismatches] == expected
    said = capsys.readouterr().err
    assert all(f"warning: {line}" in said for line in expected)
    kept = json.loads(json.dumps(ranks.record()))
    assert kept["mismatches"] == expected
    assert kept["fingerprints"][0]["speed"]["NCCL_ALGO"] == "Ring"


def test_what_the_parent_set_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: settings of a process, by variable or by call, that its ranks do not get."""
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(2)
    try:
        ranks = Ranks(LLAMA, 2, "cpu")
        ranks.close()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_num_threads(1)
    there = ranks.prints[1]
    assert ranks.mismatches == []
    assert there.speed["NCCL_DEBUG"] == "WARN"
    assert there.speed["OMP_WAIT_POLICY"] == "passive"
    assert there.speed["threads"] == "2"
    assert there.results["float32 matmul precision"] == "high"
    assert there.where["process"] != ranks.prints[0].where["process"]


def test_what_changes_results_is_refused() -> None:
    """Fault: ranks of different types or models that run, and write nonsense."""
    with pytest.raises(ConfigError, match="rank 1: dtype is bfloat16, on rank 0 it is float32: "):
        Ranks(Different(target=LLAMA.target, drafter=LLAMA.drafter), 2, "cpu")
    assert not multiprocessing.active_children()


def test_mismatches_name_rank_key_and_values() -> None:
    """Fault: a key that only one of two ranks has is passed over."""
    one = RankPrint(where={"host": "a"}, results={"torch": "2"}, speed={"threads": "1"})
    same = dataclasses.replace(one, where={"host": "b"})
    other = RankPrint(where={}, results={"torch": "3"}, speed={"NCCL_X": "7"})
    assert mismatches([one, same]) == []
    found = mismatches([one, same, other])
    assert found[0] == Mismatch(rank=2, key="torch", value="3", on_rank_0="2", changes_results=True)
    assert [(m.key, m.value, m.on_rank_0) for m in found[1:]] == [
        ("NCCL_X", "7", "unset"),
        ("threads", "unset", "1"),
    ]
    assert not found[1].changes_results
    assert record([one, same])["mismatches"] == []


def test_a_fingerprint_is_of_this_process() -> None:
    """Fault: a record that does not say what ran."""
    one = rank_print(CPU, {"dtype": "float32"})
    assert one.results["torch"] == torch.__version__
    assert one.results["dtype"] == "float32"
    assert one.where["process"] == str(os.getpid())
    assert one.speed["threads"] == str(torch.get_num_threads())


def test_settings_replace_what_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a variable that the parent does not have stays in a rank, or others are lost too."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    given = LibrarySettings.observe()
    monkeypatch.delenv("NCCL_DEBUG")
    monkeypatch.setenv("GLOO_LEFT", "1")
    monkeypatch.setenv("UNRELATED", "1")
    given.apply()
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert "GLOO_LEFT" not in os.environ
    assert os.environ["UNRELATED"] == "1"
    assert LibrarySettings.observe() == given
