"""Verify attention over that of one row, by context: the figures of `benchmarks/attention.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention
import torch

from gpu_parts.builds import Builds
from gpu_parts.goals import Row, row
from gpu_parts.record import Record

MODELS = ("8B", "V2-Lite", "V3")
"""Grouped queries; latent attention of 16 and of 128 heads."""
JOBS = 6
MOST_SECONDS = 180.0


def verify_attention(builds: Builds, record: Record) -> Iterator[Row]:
    """Microseconds a layer and ratios, one request."""
    if builds.device != "cuda":
        record.skip("verify attention", "its kernels run on a GPU alone")
        return
    builds.free()
    compile_ahead()
    work = list(attention.standard(list(MODELS), (1,), chains_only=True))
    with torch.inference_mode():
        for found in attention.take(work, record.console):
            yield from attention_rows(found, record)


def attention_rows(found: dict[str, Any], record: Record) -> Iterator[Row]:
    """A figure of `attention.py` as rows."""
    name = "attention {model} N={nodes} B=1 C={context}"
    here = name.format(**found)
    yield row(here, found["us"], "us")
    one = record.value(name.format(**found | {"nodes": 1}))
    if one and found["nodes"] > 1:
        yield row(f"{here} / N=1", found["us"] / one, "x")


def compile_ahead() -> None:
    """Compile the kernels in processes side by side; Triton's cache hands them over."""
    script = str(Path(attention.__file__).resolve())
    command = [sys.executable, script, "--chains", "--batches", "1", "--models", *MODELS]
    jobs = [
        subprocess.Popen([*command, "--jobs", str(JOBS), "--compile", str(i)]) for i in range(JOBS)
    ]
    for job in jobs:
        job.wait(MOST_SECONDS)
