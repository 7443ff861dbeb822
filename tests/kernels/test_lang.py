"""Kernel files on a machine without Triton, and the sizes their programs take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eyas
from eyas.kernels.lang import block_of

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
