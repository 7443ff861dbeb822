"""Records are read back as they were written, and whatever is none is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import RecordError
from eyas.report import records
from eyas.report.records import VERSIONS, kind_of, read_record, stamped, write_record
from tests.report.samples import bench_record


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    write_record(file, bench_record())
    assert read_record(file, ["trace", "bench"]) == bench_record()
    assert kind_of(bench_record()) == "bench"
    assert list(bench_record())[:2] == ["schema", "version"]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "is no JSON"),
        ('{"schema": "eyas.bench", "version": 1', "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "has no schema"),
        ('{"plain": {}, "spec": {}}', "has no schema"),
        ('{"schema": "other.bench", "version": 1}', "has no schema"),
        ('{"schema": 3}', "has no schema"),
        ('{"schema": "eyas.plan", "version": 1}', "is a record of eyas plan"),
        ('{"schema": "eyas.bench"}', "has version None, this eyas reads version 1"),
        ('{"schema": "eyas.bench", "version": 2}', "has version 2, this eyas reads version 1"),
        ('{"schema": "eyas.bench", "version": "1"}', "has version '1'"),
        ('{"traceEvents": []}', "is a trace"),
    ],
)
def test_what_is_no_such_record_is_refused(tmp_path: Path, content: str, rule: str) -> None:
    """A record of another version, read as this one's, would be compared wrongly in silence."""
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(RecordError, match=rule) as error:
        read_record(file, ["bench"])
    assert str(file) in error.value.value
    assert error.value.remedy


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00\x01")
    for path, rule in ((tmp_path / "none", "No such file"), (tmp_path / "b", "is no text")):
        with pytest.raises(RecordError, match=rule):
            read_record(path, ["bench"])
    with pytest.raises(RecordError, match="directory"):
        read_record(tmp_path, ["bench"])
    monkeypatch.setattr(records, "MOST_BYTES", 3)
    with pytest.raises(RecordError, match="records have at most"):
        read_record(tmp_path / "b", ["bench"])


def test_every_kind_has_a_version() -> None:
    for kind, version in VERSIONS.items():
        record: dict[str, Any] = stamped(kind, {"a": 1})
        assert json.loads(json.dumps(record)) == record
        assert record["version"] == version
