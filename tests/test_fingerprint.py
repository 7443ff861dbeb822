"""Provenance is complete, plain and honest about what it cannot know."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from eyas.fingerprint import code_version, fingerprint


def test_it_is_json_with_every_part() -> None:
    record = json.loads(json.dumps(fingerprint()))
    assert set(record) == {"code", "versions", "os", "cpu", "threads", "gpus", "driver"}
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert record["cpu"]["cores"] >= 1
    assert record["threads"] == torch.get_num_threads()
    assert len(record["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ("git", "-C", str(folder), *identity, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_told_only_for_tracked_code(tmp_path: Path) -> None:
    """A package installed inside somebody's repository must not report that repository."""
    file = tmp_path / "code.py"
    file.write_text("a = 1\n")
    assert code_version(file) == {"commit": None, "dirty": None}
    git(tmp_path, "init")
    assert code_version(file) == {"commit": None, "dirty": None}
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert code_version(file) == {"commit": head, "dirty": False}
    file.write_text("a = 2\n")
    assert code_version(file) == {"commit": head, "dirty": True}
