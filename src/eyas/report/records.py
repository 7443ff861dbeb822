"""Records: the plain dicts that commands write as JSON, each with a schema and a version.

A record's first keys are `schema`, as `eyas.bench`, and `version`, a number that rises when keys
change their meaning or go. New keys do not raise it. What was written by another version is
refused, never guessed at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eyas.config import require
from eyas.errors import RecordError

VERSIONS = {"bench": 1, "trace": 1, "explain": 2, "plan": 1, "starting-case": 1, "diff": 1}
"""Kind of record -> the version that this code writes and reads."""
PREFIX = "eyas."
MOST_BYTES = 1 << 28


def stamped(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` as a record of `kind`."""
    return {"schema": PREFIX + kind, "version": VERSIONS[kind]} | values


def kind_of(record: dict[str, Any]) -> str:
    """The kind of a stamped record."""
    return str(record["schema"]).removeprefix(PREFIX)


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write a record as indented JSON."""
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(file: Path, kinds: Collection[str]) -> dict[str, Any]:
    """The record in `file`, of one of `kinds`.

    Raises `RecordError` for a file that cannot be read, is no record, is one of another kind, or
    was written by another version.
    """
    wanted = " or ".join(kinds)
    remedy = f"give a file that `--json` of eyas {wanted} wrote"
    try:
        require_size(file)
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(str(file), error.strerror or str(error), remedy) from error
    except UnicodeDecodeError as error:
        raise RecordError(str(file), "is no text", remedy) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(str(file), f"is no JSON ({error})", remedy) from error
    if isinstance(record, dict) and "traceEvents" in record:
        raise RecordError(str(file), "is a trace, no record", "give it to eyas trace --json first")
    schema = record.get("schema") if isinstance(record, dict) else None
    if not isinstance(schema, str) or not schema.startswith(PREFIX):
        rule = "has no schema of eyas: another program's, or older than schemas"
        raise RecordError(str(file), rule, f"{remedy}, or run the command again")
    kind, version = kind_of(record), record.get("version")
    if kind not in kinds:
        raise RecordError(str(file), f"is a record of eyas {kind}", remedy)
    if version != VERSIONS[kind]:
        rule = f"has version {version!r}, this eyas reads version {VERSIONS[kind]}"
        raise RecordError(str(file), rule, "run the command again, or use the eyas that wrote it")
    return record


def value_text(value: Any, form: str = "g", ends: bool = False) -> str:
    """A profile's constant in words: a number, points, or members of a family in brackets.

    With `ends` the first and the last member stand for all.
    """
    if not isinstance(value, list | tuple):
        return format(value, form)
    family = isinstance(value[0][1], list | tuple)
    shown = [value[0], value[-1]] if family and ends and len(value) > 1 else value
    texts = [(format(x, form), value_text(y, form, ends)) for x, y in shown]
    return ", ".join(f"{x}: [{y}]" if family else f"{x}: {y}" for x, y in texts)


def require_size(file: Path) -> None:
    """Raise `RecordError` for a file too large to be a record."""
    size = file.stat().st_size
    if size > MOST_BYTES:
        rule = f"has {size / 1e6:.0f} MB, records have at most {MOST_BYTES / 1e6:.0f}"
        raise RecordError(str(file), rule, "give a record; traces go to eyas trace")


def require_writable(*files: str) -> None:
    """Raise `ConfigError` now rather than lose a record after a long run; "" is no file."""
    for file in files:
        place = Path(file)
        writable = os.access(place if place.exists() else place.parent, os.W_OK)
        require(
            not file or (writable and not place.is_dir()),
            f"file {file}",
            "cannot be written",
            "give a file in a folder that exists and is yours",
        )
