"""Parts of the GPU benchmark that start processes or read real weights, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_script import SHAPES, part, record, tiny_shapes


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny networks under the names of the real shapes."""
    return tiny_shapes(tmp_path, monkeypatch)


def test_real_weights_lose_nothing_with_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: speculation that changes the text, or figures of one engine told as another's."""
    real, builds = part("real"), part("builds").Builds("cpu")
    every = real.prompts()
    assert len(every) == 12
    monkeypatch.setattr(real, "prompts", lambda: every[:1])
    found = record()
    for row in real.real("small-deepseek", 12, builds, found):
        found.add(row)
    values = {r.name: r.value for r in found.rows}
    assert values["small-deepseek real K=3, texts that differ from plain"] == 0
    assert 1 <= values["small-deepseek real K=3, accept length"] <= 4
    assert abs(values["small-deepseek real 8-bit drafter, accept length lost"]) < 50
    assert values["small-deepseek real K=3 over decode"] > 0
    list(real.real("no such model", 12, builds, found))
    assert list(found.skipped) == ["no such model with real weights"]


def test_a_process_tells_its_start(tiny: Path) -> None:
    """Fault: a probe that does not run, or whose parts do not add up."""
    found = part("start").probe(str(tiny / SHAPES[0]), "cpu")
    whole = found.pop("start to first token")
    assert whole == pytest.approx(sum(found.values()))
    assert set(found) == {"import", "build", "trial of rows", "capture", "first prefill"}
    assert all(seconds >= 0 for seconds in found.values())


def test_ranks_are_timed_and_compared(tiny: Path) -> None:
    """Fault: a part about ranks that hangs, leaves processes, or compares a rank with itself."""
    ranks, builds, found = part("ranks"), part("builds").Builds("cpu"), record()
    for row in ranks.ranks(SHAPES[0], 2, builds, found):
        found.add(row)
    values = {row.name: row for row in found.rows}
    for run in ranks.RUNS:
        name = f"{SHAPES[0]} tp=2 {run} B=1"
        assert values[name].value > 0
        assert values[f"{name} ranks apart"].holds is True
    assert values[f"{SHAPES[0]} tp=2 K=3 B=1 / decode"].value > 0
    off = f"{SHAPES[0]} tp=2 decode B=1 collectives off two a layer and two"
    assert values[off].holds is False, "no NCCL here: none was seen"
    list(ranks.ranks(SHAPES[0], 3, builds, found))
    assert list(found.skipped) == [f"{SHAPES[0]} tp=3"]
