"""Ranks that wait in a collective are told from a collective that is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.report.foreign import analyse
from tests.report.traces import writing as w


def record(tmp_path: Path, recorders: list[w.Recorder]) -> dict[str, Any]:
    files = [r.save(tmp_path / f"rank{i}.json") for i, r in enumerate(recorders)]
    return analyse(files)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_rank_waits_for_nobody(tmp_path: Path, slow: int) -> None:
    found = record(tmp_path, w.tensor_parallel(slow, ranks=3))
    shared = found["collectives"]
    assert shared["aligned"] == 8
    assert shared["transfer_ms"] == pytest.approx(8 * 8e-3)
    waits = {str(rank): 0.0 if rank == slow else 8 * 20e-3 for rank in range(3)}
    assert shared["waiting_ms"] == pytest.approx(waits, abs=1e-9)
    assert shared["last"][str(slow)] == 1.0
    assert [r["rank"] for r in found["ranks"]] == [0, 1, 2]
    assert f"rank {slow} comes last" in found["verdict"]


def test_files_may_come_in_any_order(tmp_path: Path) -> None:
    one = record(tmp_path, w.tensor_parallel(1))
    other = record(tmp_path, w.tensor_parallel(1)[::-1])
    assert one["collectives"] == other["collectives"]


def test_ranks_that_began_in_different_cycles_are_aligned_at_the_end(tmp_path: Path) -> None:
    """Aligned at the start, every collective would be compared with another cycle's."""
    first, second = w.tensor_parallel(1)
    ends = sorted(e["ts"] for e in second.events if e["name"] == "cudaGraphLaunch")
    second.events = [e for e in second.events if e["ts"] >= ends[2]]
    for event in second.events:
        if event["name"] == w.ALL_REDUCE:
            event["dur"] += 0.001 * ends.index(max(t for t in ends if t <= event["ts"]))
    for event in first.events:
        if event["name"] == w.ALL_REDUCE:
            starts = [e for e in first.events if e["name"] == "cudaGraphLaunch"]
            event["dur"] = 20 + 0.001 * sum(s["ts"] <= event["ts"] for s in starts)
    shared = record(tmp_path, [first, second])["collectives"]
    assert shared["cycles"] == 3
    assert shared["waiting_ms"]["1"] == 0.0


def test_a_rank_with_other_collectives_is_not_compared(tmp_path: Path) -> None:
    first, second = w.tensor_parallel(0)
    reduces = [e for e in second.events if e["name"] == w.ALL_REDUCE]
    second.events = [e for e in second.events if e is not reduces[20]]
    shared = record(tmp_path, [first, second])["collectives"]
    assert shared["left_out"] == 1


def test_one_rank_has_no_waiting(tmp_path: Path) -> None:
    found = record(tmp_path, w.tensor_parallel(0)[:1])
    assert found["collectives"] is None
    assert found["components"]["all-reduce"] == pytest.approx(8 * 8e-3)
