"""`eyas explain` of two ranks under graphs: transfer and waiting apart; a lost interconnect named.

NCCL reads its variables once in a process, so each run has its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.report.compare import compare

if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)

from tests.gpu.test_explain import check, told
from tests.processes import ROOT, environment

SCRIPT = """
import json, sys
from pathlib import Path
from tests.gpu.test_explain import explained, load
record = explained(load("shape:llama-3.1-8b", tp=2), cycles=16)
Path(sys.argv[1]).write_text(json.dumps(record))
"""
QUIET = {"NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast is not everywhere, and where it is half there NCCL fails."""


def run(file: Path, **variables: str) -> dict[str, Any]:
    """The record of a run whose ranks see `variables`."""
    command, seen = [sys.executable, "-c", SCRIPT, str(file)], environment(**QUIET | variables)
    done = subprocess.run(command, cwd=ROOT, env=seen, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    record: dict[str, Any] = json.loads(file.read_text())
    return record


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("two") / "healthy.json")


def test_transfer_and_waiting_are_apart(healthy: dict[str, Any]) -> None:
    """Faults: a rank's waiting taken for the interconnect; twins captured at different steps."""
    check(healthy)
    shared = healthy["collectives"]
    assert shared is not None, told(healthy)
    assert shared["aligned"] >= 2 * healthy["layers"], shared
    assert shared["waiting_ms"].keys() == {"0", "1"}, shared
    assert min(shared["waiting_ms"].values()) < shared["transfer_ms"], shared
    own = healthy["components"]["all-reduce"]
    assert shared["transfer_ms"] + shared["waiting_ms"]["0"] == pytest.approx(own, rel=0.2), shared
    assert [rank["rank"] for rank in healthy["ranks"]] == [0, 1]
    assert healthy["mismatches"] == []


def test_ranks_without_peer_access_are_named(healthy: dict[str, Any], tmp_path: Path) -> None:
    """Fault: collectives through host memory that only the clock knows."""
    slow = run(tmp_path / "slow.json", NCCL_P2P_DISABLE="1")
    shares = [r["components"]["all-reduce"] / r["cycle_ms"] for r in (healthy, slow)]
    assert shares[1] > 1.2 * shares[0], shares
    found = compare(healthy, slow)
    first = found["causes"][0]
    assert "NCCL_P2P_DISABLE" in first["name"] or "all-reduce" in first["name"], found["causes"]
    evidence = {cause["name"]: cause["evidence"] for cause in found["causes"]}
    assert evidence["rank 0: NCCL_P2P_DISABLE"] == "unset -> 1", evidence
