"""How much memory a device can still give. Knows nothing of models.

On a CPU the least of what the machine and the control groups of this process leave; cached files
count as free, since the kernel drops them. On a GPU what the driver and torch's own cache hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path("/")
CGROUP_FILES = {
    "unified": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}
"""Of version 2 and version 1: limit, usage, and what of the usage are cached files."""


def free_memory(device: torch.device, root: Path = ROOT) -> int | None:
    """Bytes that can be allocated on `device`; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    found = [_available(root), *_cgroup_rooms(root)]
    known = [room for room in found if room is not None]
    return max(0, min(known)) if known else None


def _available(root: Path) -> int | None:
    """What the machine leaves, by the kernel's own estimate where there is one."""
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What every control group above this process leaves, where it has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = "memory" if "memory" in controllers.split(",") else "unified"
        if controllers and version == "unified":
            continue
        mount = root / "sys/fs/cgroup" / (version if version == "memory" else "")
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                yield from _room(folder, *CGROUP_FILES[version])


def _room(folder: Path, limit: str, usage: str, cached: tuple[str, ...]) -> Iterator[int]:
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if most.isdigit() and used.isdigit():
        stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines())
        yield int(most) - int(used) + sum(int(stat.get(name, 0)) for name in cached)


def _text(path: Path) -> str:
    """The file's text; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
