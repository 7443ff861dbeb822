"""`eyas diff` names what was planted first, and says the size of what it cannot explain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eyas.report.compare import compare
from eyas.report.diff_table import show
from eyas.report.foreign import analyse
from tests.report.samples import bench_record, explain_record, ranks_record
from tests.report.traces import writing as w

Record = dict[str, Any]


def grown(record: Record, stage: str, part: str, ms: float) -> None:
    """Let a part of a stage take longer, and with it all sums."""
    one = record["stages"][stage]
    if part == "idle":
        one["idle_ms"] += ms
        record["idle_ms"] += ms
    else:
        one["components"][part] = one["components"].get(part, 0.0) + ms
        one["device_ms"] += ms
        record["components"][part] = record["components"].get(part, 0.0) + ms
        record["device_ms"] += ms
    record["cycle_ms"] += ms


def no_graph(record: Record) -> None:
    record |= {"graph_fraction": 0.1, "launches": 430.0, "graph_launches": 0.0}
    record["graph_reasons"] = ["more requests than cuda_graph_max_bs"]
    grown(record, "verify", "idle", 3.0)
    grown(record, "verify", "attention", 0.1)


def nccl_setting(record: Record) -> None:
    ranks = record["provenance"]["ranks"]
    ranks["fingerprints"][1]["speed"]["NCCL_P2P_DISABLE"] = "1"
    ranks["mismatches"] = ["rank 1: NCCL_P2P_DISABLE is 1, on rank 0 it is unset"]
    record["provenance"]["code"]["commit"] = "def"
    grown(record, "verify", "all-reduce", 1.2)


def host_sleep(record: Record) -> None:
    record["gaps"] = [
        {"from": "draft", "to": "verify", "cause": "host", "ms": 1.0, "count": 1.0},
        {"from": "verify", "to": "accept", "cause": "host", "ms": 0.01, "count": 1.0},
    ]
    grown(record, "verify", "idle", 1.0)


def copy_to_host(record: Record) -> None:
    record |= {"copies_to_host": 2.0, "syncs": {"cudaStreamSynchronize": {"count": 1, "ms": 0.4}}}
    record["gaps"] = [{"from": "verify", "to": "verify", "cause": "host", "ms": 0.4, "count": 1}]
    grown(record, "verify", "idle", 0.4)
    grown(record, "verify", "copies", 0.002)


def prefill_attention(record: Record) -> None:
    record["kernels_by_time"] = [{"name": "prefill_kernel", "component": "attention", "ms": 2.0}]
    grown(record, "verify", "attention", 1.6)
    grown(record, "verify", "all-reduce", 0.05)


def half_accepted(record: Record) -> None:
    record["accept_length"] = 1.2
    record["acceptance"]["acceptance_by_position"] = [0.1, 0.05, 0.05]


def long_context(record: Record) -> None:
    record["context"] = {"median": 16_000, "longest": 60_000}
    grown(record, "verify", "attention", 0.9)


def other_drafter(record: Record) -> None:
    record["flags"]["drafter"] = "/models/other"
    record["accept_length"] = 1.9
    grown(record, "draft", "dense linear", 0.3)


def held(record: Record, clock: int) -> None:
    record["gpu_state"] |= {"clock_mhz": clock, "power_w": 696.0}
    record["gpu_state"]["held_by"] = ["the limit of its power"]


def low_clock(record: Record) -> None:
    held(record, 1530)
    for stage, one in record["stages"].items():
        for part, ms in list(one["components"].items()):
            grown(record, stage, part, ms * (1980 / 1530 - 1))


PLANTED: list[tuple[Callable[[Record], None], str, str]] = [
    (no_graph, "graph coverage", "98% -> 10%"),
    (nccl_setting, "rank 1: NCCL_P2P_DISABLE", "unset -> 1"),
    (host_sleep, "host between draft and verify", "0.000 -> 1.000 ms"),
    (copy_to_host, "waits of the host", "copies to the host 1 -> 2"),
    (prefill_attention, "verify: attention", "most of it in prefill_kernel, was flash_fwd"),
    (
        half_accepted,
        "accept length",
        "2.40 -> 1.20 tokens a cycle, first draft accepted 70% -> 10%",
    ),
    (long_context, "context", "median 2048 -> 16000"),
    (other_drafter, "drafter", "auto -> /models/other"),
    (low_clock, "GPU clock at work", "1,980 -> 1,530 MHz, held by the limit of its power"),
]


@pytest.mark.parametrize(("plant", "name", "evidence"), PLANTED)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_was_planted_is_named_first(
    plant: Callable[[Record], None], name: str, evidence: str, backwards: bool
) -> None:
    before, after = explain_record(), explain_record()
    before["kernels_by_time"] = [{"name": "flash_fwd", "component": "attention", "ms": 0.4}]
    after["kernels_by_time"] = copy.deepcopy(before["kernels_by_time"])
    plant(after)
    if backwards:
        found = compare(after, before)
        assert found["difference_ms"] < 0
    else:
        found = compare(before, after)
        assert evidence in found["causes"][0]["evidence"]
        assert found["difference_ms"] > 0
    first = found["causes"][0]
    assert first["name"] == name, found["causes"]
    assert first["ms"] == pytest.approx(found["difference_ms"], rel=0.2)
    assert found["unexplained_ms"] == pytest.approx(0, abs=1e-9)
    assert name in found["verdict"]
    told = sum(cause["ms"] for cause in found["causes"]) + found["smaller_ms"]
    assert told == pytest.approx(found["difference_ms"])


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Waiting in an all-reduce must not pass for a slow all-reduce."""
    records = []
    for name, waits in (("quick", False), ("slow", True)):
        recorders = w.tensor_parallel(1, layers=8)
        for event in (e for r in recorders for e in r.events):
            if event["name"] == w.ALL_REDUCE and not waits:
                event["dur"] = 8.0
        (tmp_path / name).mkdir()
        files = [r.save(tmp_path / name / f"{i}.json") for i, r in enumerate(recorders)]
        records.append(analyse(files))
    found = compare(*records)
    assert found["causes"][0]["name"] == "rank 1 comes last"
    assert found["causes"][0]["ms"] == pytest.approx(16 * 20e-3)
    assert "in 100% of collectives" in found["causes"][0]["evidence"]


def test_a_difference_that_no_part_holds_is_unexplained() -> None:
    """A verdict that always names something would name the wrong thing."""
    before, after = explain_record(), explain_record()
    after["cycle_ms"] += 2.0
    after["accept_length"] = before["accept_length"] = None
    found = compare(before, after)
    assert found["unit"] == "ms a cycle"
    assert found["unexplained_ms"] == pytest.approx(2.0)
    assert found["verdict"].endswith("unexplained, 2.000 of 2.000 ms.")


def test_equal_runs_are_alike(tmp_path: Path) -> None:
    for record in (explain_record(), bench_record(), ranks_record(tmp_path)):
        found = compare(record, copy.deepcopy(record))
        assert found["causes"] == []
        assert "alike within 2%" in found["verdict"]


def test_benches_are_compared_by_stage_and_token() -> None:
    before, after = bench_record(), bench_record()
    after["spec"] |= {"step_ms": 46.3}
    after["stages_ms"]["spec"]["verify"] = 39.0
    after["flags"]["engine"]["dtype"] = "float32"
    found = compare(before, after)
    assert found["unit"] == "ms a token"
    assert found["difference_ms"] == pytest.approx(10 / 2.45)
    assert found["causes"][0]["name"] == "engine.dtype"
    assert found["causes"][0]["ms"] == pytest.approx(8 / 2.45)
    assert found["unexplained_ms"] == pytest.approx(2 / 2.45)
    assert "Unexplained are" in found["verdict"]


def test_a_commit_and_another_gpu_of_a_kind_are_said_and_not_blamed() -> None:
    before, after = explain_record(), explain_record()
    after["provenance"]["code"]["commit"] = "def"
    before["provenance"]["gpus"] = [{"name": "H200", "id": "11111111"}]
    after["provenance"]["gpus"] = [{"name": "H200", "id": "22222222"}]
    grown(after, "verify", "dense linear", 1.0)
    found = compare(before, after)
    assert found["causes"][0]["name"] == "verify: dense linear"
    assert {"name": "code.commit", "ms": 0, "evidence": "abc -> def"} in found["causes"]
    told = {"name": "gpus.0.id", "ms": 0, "evidence": "11111111 -> 22222222"}
    assert told in found["causes"]


@pytest.mark.parametrize(("clock", "most"), [(1881, 0.055), (2079, 0.0)])
def test_a_clock_explains_no_more_than_it_can(clock: int, most: float) -> None:
    """Faults: 5 % of the clock blamed for attention that takes twice as long; a higher one too."""
    before, after = explain_record(), explain_record()
    attention = before["stages"]["verify"]["components"]["attention"]
    held(after, clock)
    grown(after, "verify", "attention", attention)
    found = compare(before, after)
    causes = {cause["name"]: cause["ms"] for cause in found["causes"]}
    assert found["causes"][0]["name"] == "verify: attention"
    assert 0 <= causes["GPU clock at work"] <= most * sum(causes.values())
    told = sum(causes.values()) + found["smaller_ms"]
    assert told == pytest.approx(found["difference_ms"])


def test_records_without_cycles_or_stages() -> None:
    empty: Record = {"schema": "eyas.explain", "version": 2}
    found = compare(empty, dict(empty))
    assert found["difference_ms"] is None
    assert "no cycle time" in found["verdict"]
    flat = explain_record()
    flat["stages"] = {}
    other = copy.deepcopy(flat)
    other["components"]["attention"] += 1.0
    other["cycle_ms"] += 1.0
    assert compare(flat, other)["causes"][0]["name"] == "attention"


def test_the_table_shows_causes_and_rest() -> None:
    before, after = explain_record(), explain_record()
    no_graph(after)
    console = Console(record=True, width=110)
    show(console, compare(before, after))
    text = console.export_text()
    for part in ("graph coverage", "unexplained", "smaller differences", "difference", "B takes"):
        assert part in text
