"""The record of `eyas trace`: its keys, its totals, its comparison, and what odd files give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.errors import RecordError
from eyas.report.foreign import analyse
from eyas.report.trace_table import show
from tests.report.traces import writing as w

KEYS = {
    "schema", "version", "files", "engine", "gpu", "kind", "cycle_ms", "device_ms", "busy_ms",
    "overlap_ms", "early_ms", "idle_ms", "idle", "components", "stages", "streams", "launches",
    "graph_launches", "kernels", "graph_fraction", "syncs", "copies_to_host", "gaps", "cycles",
    "kernels_by_time", "classified_fraction", "by_place_fraction", "unexplained_fraction",
    "unknown", "totals", "ranks", "collectives", "layers", "batch", "nodes", "accept_length",
    "notes", "beside", "verdict",
}  # fmt: skip
"""Frozen: what reads records relies on them."""


def text_of(record: dict[str, Any]) -> str:
    console = Console(record=True, width=100)
    show(console, record)
    return console.export_text()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    decode = w.sglang_decode().save(tmp_path / "decode.json.gz")
    return decode, w.sglang_cycles(host_gap=1500.0).save(tmp_path / "spec.json")


def test_the_keys_are_frozen(files: tuple[Path, Path]) -> None:
    record = analyse(files)
    assert set(record) == KEYS | {"against_decode"}
    assert set(record["beside"][0]) | {"schema", "version", "beside"} == KEYS
    assert (record["schema"], record["version"]) == ("eyas.trace", 1)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


@pytest.mark.parametrize("engine", [w.sglang_decode, w.sglang_cycles, w.vllm_cycles])
def test_totals_are_the_traces_own(tmp_path: Path, engine: Any) -> None:
    """Prompts and odd cycles are no cycle's, and yet the trace's."""
    recorder = engine()
    recorder.launch(w.K("mystery_kernel", 31.0))
    record = analyse([recorder.save(tmp_path / "t.json")])
    work = [e for e in recorder.events if e["cat"] in ("kernel", "gpu_memcpy")]
    total = sum(e["dur"] for e in work) / 1e3
    assert record["totals"]["kernels"] == len(work)
    assert record["totals"]["device_ms"] == pytest.approx(total)
    assert sum(record["totals"]["components"].values()) == pytest.approx(total)
    [unknown] = record["unknown"]
    assert (unknown["name"], unknown["count"]) == ("mystery_kernel", 1)
    assert unknown["ms"] == pytest.approx(0.031)
    assert record["classified_fraction"] == pytest.approx(1 - 0.031 / total)


def test_engines_are_told(tmp_path: Path) -> None:
    for recorder, name, kind in (
        (w.sglang_decode(), "SGLang", "decode"),
        (w.vllm_cycles(), "vLLM", "speculative"),
        (w.eager_decode(), None, "decode"),
    ):
        record = analyse([recorder.save(tmp_path / "t.json")])
        assert (record["engine"], record["kind"]) == (name, kind)
        assert record["accept_length"] is None


def test_verify_is_compared_with_decode(files: tuple[Path, Path]) -> None:
    """In whatever order the files come."""
    for order in (files, files[::-1]):
        record = analyse(order, accept_length=2.5)
        assert record["kind"] == "speculative"
        assert [r["kind"] for r in record["beside"]] == ["decode"]
        beside = record["against_decode"]
        extra = {part["name"]: part["ms"] for part in beside["extra"]}
        assert beside["extra"][0]["name"] == "attention"
        assert extra["attention"] == pytest.approx(4 * 1.5e-3)
        assert extra["sampling/acceptance"] == pytest.approx(3e-3)
        assert sum(extra.values()) == pytest.approx(beside["verify_ms"] - beside["decode_ms"])
        ratio = record["cycle_ms"] / record["beside"][0]["cycle_ms"]
        assert beside["break_even"] == pytest.approx(ratio)
        assert beside["speedup"] == pytest.approx(2.5 / ratio)
        assert record["accept_length"] == 2.5
        assert "Verify takes" in record["verdict"]
        assert "ms host" in record["verdict"]


def test_two_runs_of_rank_0_are_two_runs(tmp_path: Path) -> None:
    """Two runs of one rank each must not pass for one run of two ranks."""
    paths = [w.sglang_decode().save(tmp_path / f"{i}.json") for i in range(2)]
    record = analyse(paths)
    assert len(record["beside"]) == 1
    assert len(record["ranks"]) == 1


def test_a_trace_without_cycles_still_has_totals(tmp_path: Path) -> None:
    r = w.Recorder()
    r.launch(w.K(w.FLASH, 5.0))
    record = analyse([r.save(tmp_path / "t.json")])
    assert record["cycle_ms"] is None
    assert record["components"] == {}
    assert record["totals"]["components"] == {"attention": pytest.approx(0.005)}
    assert "No repeating cycle" in record["verdict"]
    assert "No repeating cycle" in text_of(record)


def test_a_cut_trace_is_answered_with_a_note(tmp_path: Path) -> None:
    file = w.sglang_decode(steps=20).save(tmp_path / "t.json.gz")
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])
    record = analyse([file])
    assert "ends early" in record["notes"][0]
    assert "ends early" in text_of(record)


def test_one_bad_file_among_good_ones_is_named(tmp_path: Path, files: tuple[Path, Path]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(RecordError, match=r"bad\.json"):
        analyse([*files, bad])


def test_the_tables_show_every_part(files: tuple[Path, Path]) -> None:
    text = text_of(analyse(files))
    for part in (
        "decode.json.gz, SGLang", "spec.json, SGLang", "steady cycles", "spans of the host",
        "attention", "LM head", "idle before", "cudaEventSynchronize 1 x",
        "Idle stretches", "draft and verify", "Verify over decode", "whose component is known",
        "Speculation pays above",
    ):  # fmt: skip
        assert part in text, part
    assert "early launch" not in text
    early = text_of(analyse([w.eyas_cycles(early=2.0).save(files[0].parent / "early.json")]))
    assert "waiting for the kernel before (early launch): 0.167 ms" in early
    assert "overlapped" in early
    odd = w.sglang_decode()
    odd.launch(w.K("mystery_kernel", 31.0))
    assert "mystery_kernel" in text_of(analyse([odd.save(files[0].parent / "odd.json")]))
