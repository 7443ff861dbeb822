"""What is kept of a file: work, calls and spans, each with its launch, whatever its order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eyas.errors import RecordError
from eyas.report.foreign import analyse
from eyas.report.traces.reading import read_trace
from tests.report.traces.conftest import Save
from tests.report.traces.writing import (
    ALL_REDUCE,
    FLASH,
    K,
    Recorder,
    sglang_decode,
    tensor_parallel,
)


def test_work_is_in_order_and_knows_its_launch(save: Save) -> None:
    """Files list kernels in the order of their buffers, not in that of time."""
    r = Recorder()
    r.launch(K(FLASH, 5.0))
    r.graph([K(FLASH, 3.0), K("b", 2.0)])
    r.to_host()
    r.wait()
    r.events.reverse()
    [trace] = read_trace(save(r))
    names = [trace.kinds[k].name for k in trace.work.kind]
    assert names[:3] == [FLASH, FLASH, "b"]
    assert np.all(np.diff(trace.work.start) >= 0)
    assert trace.calls.graph[trace.work.call].tolist() == [False, True, True, False]
    assert trace.work.call[1] == trace.work.call[2] != trace.work.call[0]
    assert trace.calls.sync.sum() == 1
    assert trace.work.dur.tolist() == [5.0, 3.0, 2.0, 2.0]
    assert trace.gpu == "NVIDIA H200"
    assert trace.process == "python"
    assert trace.notes == []


def test_devices_of_one_process_are_ranks(save: Save) -> None:
    r = Recorder()
    r.launch(K(FLASH, 5.0))
    other = Recorder(device=3)
    other.launch(K(FLASH, 6.0))
    r.events += other.events
    traces = read_trace(save(r))
    assert [t.rank for t in traces] == [0, 3]
    assert [t.work.dur.tolist() for t in traces] == [[5.0], [6.0]]


def test_processes_merged_into_one_file_are_ranks(save: Save) -> None:
    """Their numbers of launches are the same, and must not be taken for each other's."""
    first, second = tensor_parallel(1)
    for mark, recorder in (("[TP00]", first), ("[TP01]", second)):
        for event in recorder.events:
            event["pid"] = f"{mark} {event['pid']}"
    for event in second.events:
        if "stream" in event["args"]:
            event["args"]["device"] = 0
        event["ts"] += 3.0
    first.events += second.events
    traces = read_trace(save(first))
    assert [t.rank for t in traces] == [0, 1]
    assert len(traces[0].work.start) == len(traces[1].work.start)
    for trace in traces:
        asked = trace.calls.start[trace.work.call]
        assert np.all(asked < trace.work.start)
        assert trace.calls.graph[trace.work.call].all()
    shared = analyse([save(first)])["collectives"]
    assert shared["waiting_ms"] == pytest.approx({"0": 8 * 20e-3, "1": 0.0}, abs=1e-9)


@pytest.mark.parametrize(
    ("header", "name", "rank"),
    [
        ({"distributedInfo": {"rank": 3, "world_size": 8}}, "t.json", 3),
        ({"distributedInfo": {"rank": 0, "world_size": 1}}, "x-TP-5-DECODE.json", 5),
        ({}, "rank_2.json", 2),
        ({"distributedInfo": None}, "t.json", 0),
    ],
)
def test_the_rank_is_told_by_file_or_name(
    tmp_path: Path, header: dict[str, object], name: str, rank: int
) -> None:
    r = Recorder()
    r.launch(K(FLASH, 5.0))
    r.header |= header
    [trace] = read_trace(r.save(tmp_path / name))
    assert trace.rank == rank


def test_collectives_keep_their_size(save: Save) -> None:
    r = Recorder()
    r.launch(K(ALL_REDUCE, 5.0))
    r.events[-1]["args"] |= {"In msg nelems": 4096, "dtype": "BFloat16"}
    [trace] = read_trace(save(r))
    assert trace.kinds[0].bytes == 8192


def test_events_without_sense_are_counted(save: Save) -> None:
    """A kernel without a duration must not end the reading, nor be lost in silence."""
    r = sglang_decode()
    for key, value in (("dur", None), ("ts", "soon"), ("dur", -1.0), ("dur", float("nan"))):
        r.events.append(dict(r.events[1], cat="kernel", **{key: value}))
    [trace] = read_trace(save(r))
    assert any("4 events could not be read" in note for note in trace.notes)


def test_a_trace_of_a_cpu_is_refused(tmp_path: Path) -> None:
    r = Recorder()
    with r.span("forward"):
        r.rest(10.0)
    with pytest.raises(RecordError, match="holds 2 events and none is of a GPU"):
        read_trace(r.save(tmp_path / "t.json"))


def test_a_record_is_told_from_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"schema": "eyas.bench", "traceEvents": []}))
    with pytest.raises(RecordError, match=r"is a record of eyas\.bench"):
        read_trace(file)
