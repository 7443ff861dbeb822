"""What `eyas train` can be told, and what follows from it without running anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.config import option, require
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.train.data import TextConfig

STAGES = ("all", "data", "train", "evaluate")
ATTENTION = ("auto", "flash", "loop")
HEAD_DIMS = (64, 32, 16, 8, 4, 2)
"""Head sizes to choose from for a target without ordinary heads, the wanted ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(TextConfig):
    """Everything `eyas train` can be told."""

    stage: str = option("all", "all, data (write text), train (and export) or evaluate")
    resume: bool = option(False, "continue from the checkpoint in the folder")
    texts: tuple[str, ...] = option((), "text files of other runs to train on as well")
    dtype: str = option("auto", "type of the passes: auto, bfloat16 or float32")
    attention: str = option("auto", "flash (CUDA), loop (anywhere, slow) or auto")
    steps: int = option(6000, "optimiser steps")
    max_minutes: float = option(0.0, "end training after these minutes; 0: no limit")
    rows: int = option(32_768, "tokens per step")
    ttt_steps: int = option(5, "draft steps trained, as deep as chains shall be good")
    decay: float = option(0.8, "weight of a draft step's loss relative to the one before")
    lr: float = option(1e-3, "peak learning rate")
    final_lr: float = option(0.03, "last learning rate as a share of the peak")
    warmup: float = option(0.02, "share of the run over which the rate rises")
    weight_decay: float = option(0.0, "AdamW's, on matrices")
    clip: float = option(1.0, "largest gradient norm")
    draft_vocab_size: int = option(8192, "tokens the drafter can propose")
    intermediate_size: int = option(0, "width of the drafter's MLP; 0: the target's")
    fc_norm: bool = option(True, "norm each captured target state")
    norm_output: bool = option(True, "feed the normed state back (EAGLE-3.1)")
    norm_before_residual: bool = option(False, "residual starts at the normed state")
    loss_chunk: int = option(8192, "rows whose logits exist at once")
    held_out: int = option(512, "conversations kept for evaluation")
    log_every: int = option(20, "steps between reports")
    eval_every: int = option(500, "steps between evaluations on held-out text")
    save_every: int = option(1000, "steps between checkpoints")
    evaluate_prompts: tuple[str, ...] = option((), "JSON lines files to measure accept length on")
    evaluate_tokens: int = option(128, "tokens written per evaluated prompt")
    evaluate_drafts: int = option(4, "drafts per cycle of the evaluated chain")

    def __post_init__(self) -> None:
        TextConfig.__post_init__(self)
        for name, value, known in (
            ("stage", self.stage, STAGES),
            ("attention", self.attention, ATTENTION),
        ):
            require(value in known, f"{name}={value!r}", "must be known", f"use one of {known}")
        for name in (
            "steps",
            "rows",
            "ttt_steps",
            "loss_chunk",
            "held_out",
            "evaluate_tokens",
            "evaluate_drafts",
            "log_every",
            "eval_every",
            "save_every",
        ):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")
        require(
            self.dtype in ("auto", "bfloat16", "float32"),
            f"dtype={self.dtype!r}",
            "float16 gradients would underflow",
            "use auto, bfloat16 or float32",
        )
        for name in ("prompts", "exclude", "evaluate_prompts", "texts"):
            for path in getattr(self, name):
                require(Path(path).is_file(), f"{name} {path}", "must be a file", "check the path")

    @property
    def text_path(self) -> Path:
        """Where the written text lies."""
        return Path(self.folder) / "text.safetensors"

    @property
    def checkpoint_path(self) -> Path:
        """Where training is resumed from."""
        return Path(self.folder) / "checkpoint.pt"

    @property
    def export_path(self) -> Path:
        """Where the drafter is exported in SpecForge's format, which the engine reads."""
        return Path(self.folder) / "specforge"


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Rate at `progress` in [0, 1]: linear warm-up, then a cosine down to `final_lr`."""
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    done = min(1.0, (progress - config.warmup) / max(1e-9, 1.0 - config.warmup))
    share = config.final_lr + (1.0 - config.final_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * share


def drafter_config(config: TrainConfig, model: ModelConfig) -> DrafterConfig:
    """Shape of the drafter: the target's widths, heads and rotary embedding.

    A target with latent attention gets a drafter with ordinary heads that make up its width.
    """
    layers = model.default_aux_layers()
    require(
        len(set(layers)) == len(layers),
        f"a target of {model.num_layers} layers",
        f"its states would be captured before layers {layers}, which must differ",
        "train for a target of at least 7 layers",
    )
    num_heads, num_kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    if model.mla is not None:
        head_dim = next(n for n in HEAD_DIMS if model.hidden_size % n == 0)
        num_heads = num_kv_heads = model.hidden_size // head_dim
    return DrafterConfig(
        vocab_size=model.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=config.intermediate_size or model.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=model.max_position,
        aux_layers=layers,
        rms_norm_eps=model.rms_norm_eps,
        rope=model.rope,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
    )


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """`flash` or `loop`; raises `ConfigError` where flash attention cannot run."""
    able = device.type == "cuda" and dtype != torch.float32
    require(
        name != "flash" or able,
        f"attention={name!r} in {dtype} on {device.type}",
        "flash attention needs a CUDA GPU and a 16-bit type",
        "use auto or loop",
    )
    return name if name != "auto" else "flash" if able else "loop"
