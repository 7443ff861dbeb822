"""Kernel files on a machine without Triton, and the sizes their programs take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eyas
from eyas.kernels.lang import block_of, warpgroups

WITHOUT = """
import sys
sys.modules["triton"] = None
sys.path.insert(0, {source!r})
import torch
from eyas.layers.basic import RMSNorm
assert RMSNorm(8, 1e-5)(torch.ones(2, 8)).shape == (2, 8)
import eyas.engine.engine
"""


def test_networks_run_without_triton() -> None:
    """Fault: an import that makes Triton a dependency of CPU users."""
    source = str(Path(eyas.__file__).parents[1])
    subprocess.run([sys.executable, "-c", WITHOUT.format(source=source)], check=True)


@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 2), (3, 4), (576, 1024), (4096, 4096)])
def test_block_covers_the_size(size: int, block: int) -> None:
    """Fault: lanes missing at or behind a power of two."""
    assert block_of(size) == block


@pytest.mark.parametrize(("major", "there"), [(8, False), (9, True), (10, False), (12, False)])
def test_hopper_alone_reads_shared_memory_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, major: int, there: bool
) -> None:
    """Fault: elsewhere a block of keys has one buffer, which is filled while it is read."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    x: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert warpgroups(x) is there
    assert not warpgroups(torch.zeros(1)), "a CPU"
