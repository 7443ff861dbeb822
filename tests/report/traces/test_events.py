"""A trace file is read as a stream: whole, in pieces, broken, cut off, or no trace at all."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import RecordError
from eyas.report.traces import events as module
from eyas.report.traces.events import TraceEvents

EVENTS: list[dict[str, Any]] = [
    {"ph": "X", "cat": "kernel", "name": 'a "q" \\ {[, ]}', "ts": 1.5, "args": {"grid": [1, 2]}},
    {"ph": "M", "name": "ünïcode \u2028", "args": {"name": None}},
    {"ph": "X", "cat": "cpu_op", "name": "", "ts": 12345678901.125, "dur": 1e-3, "args": {}},
]
WHOLE = {
    "base": 1790857026000000000,
    "ok": True,
    "info": {"a": [1, {}]},
    "traceEvents": EVENTS,
    "traceName": "x.json",
}


def read(path: Path) -> tuple[list[dict[str, Any]], TraceEvents]:
    events = TraceEvents(path)
    return list(events), events


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_what_json_reads_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, name: str, indent: int | None
) -> None:
    """A token cut by the border of two chunks would be lost, or read as a shorter number."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    file = write(tmp_path / name, json.dumps(WHOLE, indent=indent, ensure_ascii=False))
    found, events = read(file)
    assert found == EVENTS
    assert events.header == {k: v for k, v in WHOLE.items() if k != "traceEvents"}
    assert (events.num_broken, events.ended) == (0, None)


def test_an_array_alone_is_a_trace(tmp_path: Path) -> None:
    """Chrome's other format, whose closing bracket may be missing."""
    assert read(write(tmp_path / "a.json", json.dumps(EVENTS)))[0] == EVENTS
    found, events = read(write(tmp_path / "b.json", json.dumps(EVENTS)[:-1]))
    assert found == EVENTS
    assert events.ended


def test_gzip_is_told_by_content_and_may_have_members(tmp_path: Path) -> None:
    text = json.dumps(WHOLE).encode()
    file = tmp_path / "t.json"
    file.write_bytes(gzip.compress(text[:50], mtime=0) + gzip.compress(text[50:]))
    assert read(file)[0] == EVENTS


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_file_cut_anywhere_gives_what_came_before(tmp_path: Path, name: str) -> None:
    """Neither an error in the middle of good data, nor an answer that hides the loss."""
    many = [dict(EVENTS[0], ts=i) for i in range(40)]
    text = json.dumps({"schemaVersion": 1, "traceEvents": many})
    whole = write(tmp_path / name, text).read_bytes()
    lengths = set()
    for end in range(len(whole) // 3, len(whole) - 2, 19):
        (tmp_path / name).write_bytes(whole[:end])
        events = TraceEvents(tmp_path / name)
        try:
            found = list(events)
        except RecordError:
            continue  # nothing of the array was there
        assert events.ended or len(found) == 40, end
        assert found == many[: len(found)]
        lengths.add(len(found))
    assert len(lengths) > 2


def test_damaged_compression_ends_the_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 1 << 12)
    many = {"traceEvents": [dict(EVENTS[0], ts=i * 1.37) for i in range(4000)]}
    data = bytearray(gzip.compress(json.dumps(many).encode()))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    file = tmp_path / "t.json.gz"
    file.write_bytes(bytes(data))
    found, events = read(file)
    assert 0 < len(found) < 4000
    assert events.ended


def test_a_broken_event_is_skipped_and_counted(tmp_path: Path) -> None:
    """Profilers have written unescaped quotes and bare words."""
    texts = [json.dumps(e) for e in EVENTS]
    texts.insert(1, '{"ph": "X", "name": "C:\\"oops" quote", "ts": nope}')
    texts.insert(3, "17")
    file = write(tmp_path / "t.json", '{"traceEvents": [' + ",\n".join(texts) + "]}")
    found, events = read(file)
    assert found == EVENTS
    assert events.num_broken == 2
    assert events.ended is None


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"kernel,us\n1,2\n", "is no JSON"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is no JSON"),
        (b"17", "is no JSON"),
        (b"{}", "without traceEvents"),
        (b'{"a": [1, 2]}', "without traceEvents"),
        (b'{"traceEvents": 3}', "without traceEvents"),
        (b'{"a": tru', "without traceEvents"),
        (b"{1: 2}", "without traceEvents"),
        (b'{"a" "b"}', "without traceEvents"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\x1f\x8b", "is empty"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, rule: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(RecordError, match=rule):
        read(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(RecordError, match=str(path)):
            read(path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A trace of gigabytes, most of it host code, must not be held as a whole."""
    one = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 300, "ts": 1, "dur": 1})
    with gzip.open(tmp_path / "t.json.gz", "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        for _ in range(60):
            file.write((one + ",\n") * 1000)
        file.write(one + "]}")
    events = TraceEvents(tmp_path / "t.json.gz")
    tracemalloc.start()
    count = sum(1 for _ in events)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 60001
    assert peak < 12e6, f"{peak / 1e6:.0f} MB for a file of 23 MB"
