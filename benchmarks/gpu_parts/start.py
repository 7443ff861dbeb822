"""Seconds from the start of a process to a first token, kernels compiled by a run before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_parts.builds import Builds, model_of
from gpu_parts.goals import Row, row
from gpu_parts.record import Record

PROBE = Path(__file__).with_name("start_probe.py")
MOST_SECONDS = 240.0


def start(shape: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Two fresh processes, one after the other; the second one's figures count."""
    builds.free()
    model = model_of(shape)
    cold = probe(model, builds.device)
    yield row(f"{shape} first start to first token", cold["start to first token"], "s")
    for what, seconds in probe(model, builds.device).items():
        whole = what == "start to first token"
        yield row(f"{shape} {what}" if whole else f"{shape} start: {what}", seconds, "s")


def probe(model: str, device: str) -> dict[str, float]:
    """What `start_probe.py` finds; raises `RuntimeError` with its words where it fails."""
    command = [sys.executable, str(PROBE), model, device, repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
