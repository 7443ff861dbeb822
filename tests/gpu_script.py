"""The GPU benchmark for tests: its modules, and tiny networks under the names of real shapes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import eyas.checkpoint

FOLDER = Path(__file__).parent.parent / "benchmarks"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY_LATENT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
"""Instead of the large numbers of DeepSeek-V2-Lite."""
SHAPES = ("llama-3.1-8b", "smollm2-135m", "deepseek-v2-lite")


FEW: tuple[tuple[str, str, Any], ...] = (
    ("timing", "PROMPT", 8),
    ("timing", "SETTLING", 1),
    ("cycles", "STEPS", 2),
    ("cycles", "BATCH_STEPS", 2),
    ("cycles", "SIZES", (1, 8, 40)),
    ("host", "STEPS", 3),
    ("modes", "STEPS", 2),
    ("modes", "CONTEXTS", (20, 40)),
    ("deterministic", "STEPS", 2),
    ("deterministic", "POINTS", (("decode", 20), ("K=3", 20), ("tree 5-4-16", 40))),
    ("ranks", "STEPS", 2),
    ("ranks", "WATCHED", 1),
)
"""Module, constant, value: few steps and short prompts."""


def part(name: str) -> Any:
    """A module of the benchmark's parts, or the script itself: `gpu`."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name if name == "gpu" else f"gpu_parts.{name}")


def tiny_shapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put tiny networks under the names of the real shapes into `folder`; returns it."""
    real = json.loads((eyas.checkpoint.SHAPES / SHAPES[2] / "config.json").read_text())
    for shape, config in zip(SHAPES, (LLAMA, LLAMA, real | TINY_LATENT), strict=True):
        (folder / shape).mkdir()
        (folder / shape / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(eyas.checkpoint, "SHAPES", folder)
    for module, name, value in FEW:
        monkeypatch.setattr(part(module), name, value)
    return folder


def record(seconds: float = 100.0, **rest: Any) -> Any:
    """A run's record that says nothing."""
    module = part("record")
    return module.Record(module.Clock.of(seconds), Console(quiet=True), **rest)
