"""What each rank is, as it sees itself, and where ranks differ.

Some differences change results: those are refused. Others change speed: those are said aloud.
Knows nothing of models; what a rank will load it is told as `facts`.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.distributed.settings import LibrarySettings
from eyas.fingerprint import code_version, cpu, gpu_driver, package_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrint:
    """One rank's fingerprint; all values are plain text."""

    where: dict[str, str]
    """Host, process and device: may differ."""
    results: dict[str, str]
    """What results depend on: must be equal."""
    speed: dict[str, str]
    """What speed depends on: should be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A value of a rank that differs from rank 0's."""

    rank: int
    key: str
    value: str
    on_rank_0: str
    changes_results: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.key} is {self.value}, on rank 0 it is {self.on_rank_0}"


def rank_print(device: torch.device, facts: Mapping[str, str]) -> RankPrint:
    """This process's fingerprint as a rank on `device` that will load what `facts` say."""
    settings, versions = LibrarySettings.observe(), package_versions()
    results = {
        "torch": torch.__version__,
        "commit": str(code_version(Path(__file__))["commit"]),
        "eyas": str(versions["eyas"]),
        "device kind": device.type,
        "float32 matmul precision": settings.matmul_precision,
        "bfloat16 reduced precision": str(settings.reduced_precision),
        **facts,
    }
    speed = {
        "python": platform.python_version(),
        **{name: str(versions[name]) for name in ("triton", "numpy", "safetensors")},
        "threads": str(settings.threads),
        "interop threads": str(settings.interop_threads),
        "cpu": str(cpu()["model"]),
        **settings.variables,
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        speed |= {
            "gpu": found.name,
            "gpu memory": f"{found.total_memory / 1e9:.1f} GB",
            "driver": str(gpu_driver()),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    where = {"host": socket.gethostname(), "process": str(os.getpid()), "device": str(device)}
    return RankPrint(where=where, results=results, speed=speed)


def mismatches(prints: Sequence[RankPrint]) -> list[Mismatch]:
    """Where ranks differ from rank 0; `prints` in rank order."""
    found = []
    for rank, one in enumerate(prints):
        for changes_results in (True, False):
            own, first = (p.results if changes_results else p.speed for p in (one, prints[0]))
            for key in sorted(own.keys() | first.keys()):
                value, expected = own.get(key, "unset"), first.get(key, "unset")
                if value != expected:
                    found.append(
                        Mismatch(
                            rank=rank,
                            key=key,
                            value=value,
                            on_rank_0=expected,
                            changes_results=changes_results,
                        )
                    )
    return found


def record(prints: Sequence[RankPrint]) -> dict[str, Any]:
    """Fingerprints and mismatches as plain values, for a bench record or `eyas info`."""
    return {
        "fingerprints": [asdict(one) for one in prints],
        "mismatches": [str(one) for one in mismatches(prints)],
    }
