"""Free memory is the least that machine and control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.engine.memory import free_memory

CPU = torch.device("cpu")
GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 * 2**20} kB\nBuffers: 1 kB\n"}


def test_this_machine_has_memory() -> None:
    """Fault: a parser that finds nothing here, so that nothing is ever refused."""
    free = free_memory(CPU)
    assert free is not None
    assert 2**26 < free < 2**50


def test_the_machine_alone(tmp_path: Path) -> None:
    assert free_memory(CPU, write(tmp_path, MACHINE)) == 8 * GIB


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    """Fault: a crash where /proc is missing; sysconf answers there."""
    free = free_memory(CPU, tmp_path)
    assert free is None or free > 0


@pytest.mark.parametrize(
    ("limit", "usage", "expected"), [("max", 1, 8), (str(4 * GIB), GIB, 4), (str(GIB), 5 * GIB, 0)]
)
def test_version_2_groups(tmp_path: Path, limit: str, usage: int, expected: int) -> None:
    """Fault: a container's limit passed over; cached files counted as taken."""
    folder = "sys/fs/cgroup/box"
    files = {
        "proc/self/cgroup": "0::/box/inner\n",
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n",
        f"{folder}/inner/memory.max": "max\n",
        f"{folder}/inner/memory.current": "7\n",
    }
    assert free_memory(CPU, write(tmp_path, {**MACHINE, **files})) == expected * GIB


def test_version_1_groups(tmp_path: Path) -> None:
    """Fault: the older files not read; other controllers' lines taken for memory."""
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n4:memory:/unseen/box\n1:name=systemd:/\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{folder}/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{folder}/memory.stat": f"cache 9\ntotal_inactive_file {GIB}\n",
    }
    assert free_memory(CPU, write(tmp_path, {**MACHINE, **files})) == 2 * GIB
