"""What `eyas info` says of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.config import EngineConfig
from eyas.report.info import checkpoint

CPU = EngineConfig(device="cpu", dtype="float32")


def test_kv_of_ordinary_heads(tmp_path: Path, save_llama: Callable[..., Any]) -> None:
    """Fault: KV memory of other heads. 4 layers of 2 KV heads, 16 numbers, keys and values."""
    save_llama(tmp_path)
    said = checkpoint(str(tmp_path), None, CPU)
    assert said["KV per token"] == "1.0 kB in float32"
    assert said["heads"] == "4 query, 2 KV, dimension 16"


def test_kv_of_a_latent(tmp_path: Path, save_deepseek: Callable[..., Any]) -> None:
    """Fault: a latent counted as keys and values of every head. 4 layers of 32 + 16 numbers."""
    reference = save_deepseek(tmp_path, "v3")
    said = checkpoint(str(tmp_path), None, CPU)
    assert said["KV per token"] == "0.8 kB in float32"
    assert said["heads"] == "4 query over one latent of 32 + 16 numbers"
    biases = 3 * 8  # a buffer there, a parameter here
    assert said["parameters"] == sum(p.numel() for p in reference.parameters()) + biases
