"""Small traces of the engines, written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.traces.writing import Recorder

Save = Callable[[Recorder], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a recorder's trace to a file of its own."""
    count = 0

    def write(recorder: Recorder) -> Path:
        nonlocal count
        count += 1
        return recorder.save(tmp_path / f"trace-{count}.json")

    return write
