"""The layouts of EAGLE-3 drafters, told by content, and what else a drafter's folder may hold.

A format is a way to name tensors and to nest a config; whichever it is, `flatten` gives one flat
config and `network_names` the tensors under the names of `models/eagle3.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from eyas.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

HIDDEN_NORM = "hidden_norm.weight"
"""Last part of the tensor's name that every EAGLE-3 layer has, and no other drafter's."""

_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
"""Defaults of transformers' config classes, which a speculators config leaves out."""


class Format(enum.Enum):
    """Layouts of a drafter checkpoint."""

    EAGLE = "the EAGLE authors' format"
    SPECFORGE = "the format of SpecForge and SGLang"
    SPECULATORS = "the format of speculators"
    MODELOPT = "the format that ModelOpt and vLLM's converters export"


def refuse(value: str, rule: str, remedy: str | None = None) -> NoReturn:
    """Raise `CheckpointError` about a drafter."""
    raise CheckpointError(
        f"drafter: {value}", rule, remedy or "use another EAGLE-3 drafter of this target"
    )


def detect_format(config: dict[str, Any], tensors: Tensors) -> Format:
    """The format of a drafter; raises `CheckpointError` for what is no EAGLE-3 we can run."""
    architecture = " ".join(map(str, config.get("architectures") or ()))
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            refuse(f"speculators_model_type={kind!r}", "only eagle3 is a drafter of this kind")
        return Format.SPECULATORS
    if f"midlayer.{HIDDEN_NORM}" in tensors:
        return Format.SPECFORGE if "Eagle3" in architecture else Format.EAGLE
    if f"layers.0.{HIDDEN_NORM}" in tensors:
        return Format.MODELOPT
    _refuse_others(config, tensors)
    refuse(f"architecture {architecture!r}", "no tensor of an EAGLE-3 drafter was found")


def is_language_model(names: Iterable[str]) -> bool:
    """Whether these are names of a whole model's tensors; no drafter's begin so."""
    return any(name.startswith(("model.", "language_model.")) for name in names)


def _refuse_others(config: dict[str, Any], tensors: Tensors) -> None:
    """Say by name what a checkpoint without an EAGLE-3 layer is."""

    def some(*parts: str) -> str | None:
        return next((name for name in sorted(tensors) if any(p in name for p in parts)), None)

    if name := some("medusa"):
        refuse(f"tensor {name!r}", "is of Medusa heads, which draft without a network")
    if name := some("eh_proj", "mtp."):
        refuse(f"tensor {name!r}", "is of a layer for multi-token prediction, another drafter")
    if config.get("medusa_num_heads") is not None:
        refuse("medusa_num_heads", "is of Medusa heads, which draft without a network")
    for kind in ("dflash", "dspark"):
        if f"{kind}_config" in config:
            refuse(f"{kind}_config", f"is of {kind.upper()}, which drafts blocks of tokens at once")
    if is_language_model(tensors):
        refuse(
            "a whole language model",
            "is no EAGLE-3 network",
            "draft with algorithm STANDALONE if it has the target's tokenizer",
        )
    if "fc.weight" in tensors:
        shape = list(tensors["fc.weight"].shape)
        refuse(
            f"fc.weight {shape} without hidden_norm",
            "is a drafter of EAGLE-1 or EAGLE-2, which needs another network",
        )


def flatten(config: dict[str, Any], form: Format, tensors: Tensors) -> dict[str, Any]:
    """One flat dict of a drafter's config, whichever way its format nests it.

    What stands at the top and is not null goes before what is nested.
    """
    given = {key: value for key, value in config.items() if value is not None}
    if form is not Format.SPECULATORS:
        nested = config.get("eagle_config") or {}
        if not isinstance(nested, dict):
            refuse(f"eagle_config={nested!r}", "must hold the drafter's switches")
        return {**config, **nested, **given}
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        refuse("transformer_layer_config", "must hold the sizes of the draft layer")
    normed = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    kind = layer.get("model_type") or ("qwen3" if normed else "llama")
    defaults = {"llama": _LLAMA_DEFAULTS, "qwen3": _QWEN3_DEFAULTS}
    if kind not in defaults:
        refuse(f"model_type={kind!r} of the draft layer", "only llama and qwen3 are known")
    given.pop("transformer_layer_config")
    # speculators and vLLM's reader of this format take an absent switch as on
    switches = {"norm_before_residual": True, "draft_vocab_size": 32000}
    return {**switches, **defaults[kind], "model_type": kind, **layer, **given}


def network_names(tensors: Tensors) -> Tensors:
    """The tensors under the names of EAGLE and SpecForge."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("layers.0."):
            name = name.replace("layers.0.", "midlayer.", 1)
        if name in named:
            refuse(f"tensor {name!r}", "comes under two names")
        named[name] = tensor
    return named
