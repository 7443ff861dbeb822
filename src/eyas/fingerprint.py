"""What produced a result: code, versions, machine; a plain dict for records and `eyas info`.

Everything is observed, nothing is assumed: what cannot be found out is None. It reads no
environment variable and knows nothing of models or engines.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("eyas", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""CPU features that decide which matmul a library takes."""


def fingerprint() -> dict[str, Any]:
    """Provenance of a run started now: code, versions, operating system, CPU, threads, GPUs."""
    return {
        "code": code_version(Path(__file__)),
        "versions": {"python": platform.python_version(), **package_versions()},
        "os": platform.platform(),
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "gpus": gpus(),
        "driver": gpu_driver(),
    }


def code_version(file: Path) -> dict[str, Any]:
    """`commit` and `dirty` of the git work tree that tracks `file`; both None outside of one."""
    folder = str(file.resolve().parent)
    tracked = _output("git", "-C", folder, "ls-files", "--error-unmatch", file.name)
    if tracked is None:
        return {"commit": None, "dirty": None}
    changes = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _output("git", "-C", folder, "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that results depend on."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cpu() -> dict[str, Any]:
    """Model, matmul features, cores this process may use, and memory in bytes."""
    values = _cpuinfo()
    known = set((values.get("flags") or values.get("features") or "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": values.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in CPU_FLAGS if flag in known],
        "cores": cores,
        "memory": _memory(),
    }


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability, memory in bytes of each CUDA device, and which one of its kind."""
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "memory": p.total_memory,
            "id": str(p.uuid)[:8],
        }
        for p in found
    ]


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, None where there is none."""
    if not torch.cuda.is_available():
        return None
    query = "--query-gpu=driver_version"
    versions = _output("nvidia-smi", query, "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _cpuinfo() -> dict[str, str]:
    """Values of the first processor in Linux's /proc/cpuinfo; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in lines}


def _memory() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
