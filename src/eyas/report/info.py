"""What the machine and a checkpoint are: the answer of `eyas info`, as plain dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.checkpoint import read_config, resolve
from eyas.config import DrafterOptions, EngineConfig
from eyas.engine.networks import CheckpointSource
from eyas.engine.ranks import Ranks, take_part
from eyas.errors import CheckpointError
from eyas.fingerprint import fingerprint
from eyas.model_config import ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.families import model_config
from eyas.models.registry import resolve_device, resolve_dtype
from eyas.speculate.checkpoints import (
    drafter_kind,
    find_drafter,
    load_network,
    same_vocabulary,
)
from eyas.tokenizer import Tokenizer


def machine(config: EngineConfig) -> dict[str, Any]:
    """The fingerprint, and the device and type an engine would take."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return fingerprint() | {"device": str(device), "dtype": _type_name(dtype)}


def checkpoint(
    model: str,
    drafter: str | None,
    config: EngineConfig,
    options: DrafterOptions | None = None,
) -> dict[str, Any]:
    """Architecture, size, memory and drafter of `model`; raises `CheckpointError`."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    folder = resolve(model)
    raw = read_config(folder)
    target = model_config(raw)
    parameters = num_parameters(target)
    kv_type = torch.float32 if device.type == "cpu" else dtype
    kv_values = target.num_layers * target.attention_shape().values_per_position
    return {
        "folder": str(folder),
        "architecture": ", ".join(raw.get("architectures") or ["unknown"]),
        "layers": target.num_layers,
        "hidden": target.hidden_size,
        "heads": _heads(target),
        "vocabulary": target.vocab_size,
        "context": target.max_position,
        "parameters": parameters,
        "weights": f"{parameters * dtype.itemsize / 1e6:.0f} MB in {_type_name(dtype)}",
        "KV per token": f"{kv_values * kv_type.itemsize / 1e3:.1f} kB in {_type_name(kv_type)}",
        "drafter": _drafter(drafter, model, folder, target, options),
    }


def ranks(model: str, drafter: str | None, config: EngineConfig) -> dict[str, Any]:
    """How the ranks of `config.tp` see themselves; they are started, compared and ended.

    Raises `ConfigError` as `Ranks` does.
    """
    place = None if drafter is None else find_drafter(drafter, model)
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    source = CheckpointSource(target=resolve(model), drafter=place, dtype=dtype)
    seat = take_part(source, config.tp, config.device)
    started = Ranks(source, config.tp, config.device, seat)
    started.close()
    prints = started.prints
    facts: dict[str, Any] = {f"rank {i}": one.where for i, one in enumerate(prints)}
    different = [str(mismatch) for mismatch in started.mismatches]
    return (
        facts
        | prints[0].results
        | prints[0].speed
        | {"differences": "; ".join(different) or "none"}
    )


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a target; tied ones count once."""
    with torch.device("meta"):
        model = Decoder(config)
    return sum(p.numel() for p in model.parameters())


def _heads(config: ModelConfig) -> str:
    """Attention in words."""
    if config.mla is None:
        return f"{config.num_heads} query, {config.num_kv_heads} KV, dimension {config.head_dim}"
    kept = f"{config.mla.kv_lora_rank} + {config.mla.rope_dim}"
    return f"{config.num_heads} query over one latent of {kept} numbers"


def _drafter(
    drafter: str | None,
    model: str,
    folder: Path,
    target: ModelConfig,
    options: DrafterOptions | None,
) -> str:
    """Which drafter is found, and whether it fits."""
    if drafter is None:
        return "none wanted"
    try:
        place = find_drafter(drafter, model)
        if place is None:
            return "none is shipped for this target"
        kind = drafter_kind(place)
        if kind == "STANDALONE":
            same_vocabulary(Tokenizer.from_folder(folder), Tokenizer.from_folder(place))
        network = load_network(place, target, torch.bfloat16, torch.device("cpu"), options)
    except CheckpointError as e:
        return f"does not fit: {e}"
    count = sum(p.numel() for p in network.parameters())
    config = network.config
    tokens = config.vocab_size if isinstance(config, ModelConfig) else config.draft_vocab_size
    return f"{place}: fits ({kind}, {count / 1e6:.1f} M parameters, {tokens} draft tokens)"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
