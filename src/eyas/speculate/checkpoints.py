"""EAGLE-3 drafter checkpoints: which format, which switches, every tensor accounted for.

Three formats of the same network are read; a format is told by content, never by its name. What
the network cannot do exactly is refused with the reason, because a drafter that is loaded wrongly
still runs: it only accepts less. Sources: the loaders of EAGLE, SGLang, vLLM and speculators.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import torch

from eyas.checkpoint import read_config, resolve, tensor_stream
from eyas.errors import CheckpointError
from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.eagle3 import Eagle3
from eyas.models.families.reading import dimension, refuse_unknown_arithmetic, rope_config
from eyas.models.registry import allocate, fill
from eyas.quantised import dequantised, quantization_config

Tensors = dict[str, torch.Tensor]

SHIPPED = {"smollm2-135m-instruct": ("smollm2", "smollm2-135m-instruct")}
"""Folder in `eyas/drafters` -> last parts of the names of the target it was trained for."""

_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
"""Defaults of transformers' LlamaConfig, which a speculators config leaves out."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "bias": (None, False),
    "norm_before_fc": (None, False),
    "use_aux_hidden_state": (None, True),
    "parallel_drafting": (None, False),
    "parallel_draft_step": (None, 1),
    "mask_hidden": (None, False),
    "sliding_window": (None,),
}
"""Switches of other drafters -> the values that this network implements."""


class Format(enum.Enum):
    """Layouts of a drafter checkpoint."""

    EAGLE = "the EAGLE authors' format"
    SPECFORGE = "the format of SpecForge and SGLang"
    SPECULATORS = "the format of speculators"


def find_drafter(drafter: str, model: str) -> Path | None:
    """The folder of `drafter`: a local folder, a hub id, or `auto`.

    `auto` is the drafter shipped for `model` (told by the last part of its name), None if there
    is none. Raises `CheckpointError` as `checkpoint.resolve` does.
    """
    if drafter != "auto":
        return resolve(drafter, pickled=True)
    name = Path(model).name.lower().split(".")[0]
    for folder, targets in SHIPPED.items():
        place = Path(str(files("eyas") / "drafters" / folder))
        if name in targets and place.is_dir():
            return place
    return None


def detect_format(config: dict[str, Any], tensors: Tensors) -> Format:
    """The format of a drafter; raises `CheckpointError` for what is no EAGLE-3 we can run."""
    architecture = " ".join(map(str, config.get("architectures") or ()))
    if "deepseek" in architecture.lower() or config.get("kv_lora_rank"):
        _refuse(f"architecture {architecture!r}", "drafters with MLA are not supported yet")
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            _refuse(f"speculators_model_type={kind!r}", "only eagle3 is a drafter of this kind")
        return Format.SPECULATORS
    if "midlayer.hidden_norm.weight" in tensors:
        return Format.SPECFORGE if "Eagle3" in architecture else Format.EAGLE
    if "layers.0.hidden_norm.weight" in tensors:
        _refuse(
            "tensor 'layers.0.hidden_norm.weight' without speculators_model_type",
            "exports of ModelOpt and vLLM are not supported yet",
        )
    if "fc.weight" in tensors:
        shape = list(tensors["fc.weight"].shape)
        _refuse(
            f"fc.weight {shape} without hidden_norm",
            "is a drafter of EAGLE-1 or EAGLE-2, which needs another network",
        )
    _refuse(f"architecture {architecture!r}", "no tensor of an EAGLE-3 drafter was found")


def load_drafter(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    aux_layers_override: Sequence[int] | None = None,
    feedback_override: bool | None = None,
) -> Eagle3:
    """The drafter in folder `path` for `target`, in `dtype` on `device`, without gradients.

    Without an embedding of its own it borrows the target's. `aux_layers_override` gives the
    captured boundaries (i: input of target layer i) where a checkpoint's ids are ambiguous;
    `feedback_override` says whether the normed hidden state is fed back (`norm_output`), which
    SpecForge's own trainer and the servers read differently. Raises `CheckpointError` for another
    network, another target, or tensors that do not fit.
    """
    drafter, tensors = _read(path, target, aux_layers_override, feedback_override)
    ids = target_ids(tensors.pop("d2t", None), tensors.pop("t2d", None), drafter)
    module = Eagle3(drafter, row_tile(device, dtype))
    allocate(module, dtype, device)
    fill(module.places(), tensors.items())
    module.target_ids = ids.to(device)
    return module.eval()


def drafter_config(path: Path, target: ModelConfig) -> DrafterConfig:
    """What `load_drafter` would load; raises `CheckpointError` as it does, before memory is taken.

    Tensors of the folder are mapped, not read.
    """
    drafter, tensors = _read(path, target)
    target_ids(tensors.get("d2t"), tensors.get("t2d"), drafter)
    return drafter


def _read(
    path: Path,
    target: ModelConfig,
    aux_layers_override: Sequence[int] | None = None,
    feedback_override: bool | None = None,
) -> tuple[DrafterConfig, Tensors]:
    """The drafter's config, and its tensors under the names of `Eagle3.places`."""
    config = read_config(path)
    tensors = dict(dequantised(tensor_stream(path), quantization_config(config)))
    form = detect_format(config, tensors)
    tensors = {_network_name(name): tensor for name, tensor in tensors.items()}
    settings = _settings(config, form)
    _check_network(settings, tensors)
    if aux_layers_override is None:
        aux_layers = _aux_layers(settings, form, target)
    else:
        aux_layers = tuple(aux_layers_override)
    _check_aux_layers(aux_layers, target)
    drafter = _drafter_config(settings, aux_layers, target, "embed_tokens.weight" in tensors)
    if feedback_override is not None:
        drafter = dataclasses.replace(drafter, norm_output=feedback_override)
    _check_target(drafter, target)
    _check_fusion(drafter, tensors)
    return drafter, tensors


def target_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, config: DrafterConfig
) -> torch.Tensor:
    """Target ids int64[Vd] of the draft vocabulary, strictly ascending.

    `d2t` int[Vd] holds offsets: target id = draft id + d2t[draft id]. `t2d` bool[V], if given,
    must mark exactly these ids. Without `d2t` both vocabularies are the same.
    """
    size, total = config.draft_vocab_size, config.vocab_size
    if d2t is None and size != total:
        _refuse(
            "tensor 'd2t'",
            f"missing, though {size} draft ids must be mapped to {total} target ids",
        )
    ids = torch.arange(size)
    if d2t is not None:
        if d2t.shape != (size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
            _refuse(
                f"tensor 'd2t' {d2t.dtype} {list(d2t.shape)}",
                f"must be integers [{size}] (draft_vocab_size)",
            )
        ids = ids + d2t.to(torch.int64)
    in_range = bool(((ids >= 0) & (ids < total)).all())
    if not in_range or not bool((ids.diff() > 0).all()):
        _refuse(
            "tensor 'd2t'",
            f"target ids (draft id + offset) must ascend strictly within 0..{total - 1}",
        )
    if t2d is not None:
        kept = torch.zeros(total, dtype=torch.bool)
        kept[ids] = True
        if t2d.shape != (total,) or not torch.equal(t2d.to(torch.bool), kept):
            _refuse("tensor 't2d'", f"must mark exactly the {size} target ids of d2t")
    return ids


def _refuse(value: str, rule: str) -> NoReturn:
    raise CheckpointError(f"drafter: {value}", rule, "use another EAGLE-3 drafter of this target")


def _network_name(name: str) -> str:
    """A speculators tensor's name in the names of EAGLE and SpecForge."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _settings(config: dict[str, Any], form: Format) -> dict[str, Any]:
    """One flat dict of a drafter's config, whichever way its format nests it."""
    if form is not Format.SPECULATORS:
        nested = config.get("eagle_config") or {}
        return {**nested, **config}
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        _refuse("transformer_layer_config", "must hold the sizes of the draft layer")
    top = {key: value for key, value in config.items() if key != "transformer_layer_config"}
    # speculators and vLLM's reader of this format take an absent switch as on
    return {"norm_before_residual": True, **_LLAMA_DEFAULTS, **layer, **top}


def _check_network(settings: dict[str, Any], tensors: Tensors) -> None:
    refuse_unknown_arithmetic({"hidden_act": "silu", **settings})
    layers = settings.get("num_hidden_layers", 1)
    if layers != 1 or any(name.startswith("layers.1.") for name in tensors):
        _refuse(f"num_hidden_layers={layers}", "drafters of several layers are not supported")
    for key, allowed in _UNSUPPORTED.items():
        value = settings.get(key)
        if key == "sliding_window" and not settings.get("use_sliding_window", True):
            continue
        if value not in allowed:
            _refuse(f"{key}={value!r}", "is not supported")
    if "sliding_attention" in (settings.get("layer_types") or ()):
        _refuse("layer_types with sliding_attention", "is not supported")


def _aux_layers(settings: dict[str, Any], form: Format, target: ModelConfig) -> tuple[int, ...]:
    """Captured boundaries, whichever way the checkpoint counts them.

    Speculators counts boundaries. The others may count outputs (boundary - 1); as in SGLang, ids
    whose first is 1 are read so. Absent ids are EAGLE's: inputs of layers 2, L/2, L-3.
    """
    ids = settings.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return target.default_aux_layers()
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or not ids:
        _refuse(f"eagle_aux_hidden_state_layer_ids={ids!r}", "must be a list of layer ids")
    outputs = form is not Format.SPECULATORS and ids[0] == 1
    return tuple(i + outputs for i in ids)


def _check_aux_layers(layers: tuple[int, ...], target: ModelConfig) -> None:
    if not all(0 <= i <= target.num_layers for i in layers) or len(set(layers)) < len(layers):
        raise CheckpointError(
            f"drafter: auxiliary layers {list(layers)}",
            f"must be different boundaries within 0..{target.num_layers} of the target",
            "use a drafter of this target, or override its auxiliary layers",
        )


def _drafter_config(
    settings: dict[str, Any],
    aux_layers: tuple[int, ...],
    target: ModelConfig,
    own_embedding: bool,
) -> DrafterConfig:
    hidden, heads = dimension(settings, "hidden_size"), dimension(settings, "num_attention_heads")
    vocab = dimension(settings, "vocab_size")
    longest = dimension(settings, "max_position_embeddings", 2048)
    return DrafterConfig(
        vocab_size=vocab,
        draft_vocab_size=dimension(settings, "draft_vocab_size", vocab),
        hidden_size=hidden,
        target_hidden_size=dimension(settings, "target_hidden_size", hidden),
        intermediate_size=dimension(settings, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=dimension(settings, "num_key_value_heads", heads),
        head_dim=dimension(settings, "head_dim", hidden // heads),
        # a drafter trained short still runs as far as its target: its rotary table must reach
        max_position=max(longest, target.max_position),
        aux_layers=aux_layers,
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope=rope_config(settings),
        fc_norm=bool(settings.get("fc_norm") or settings.get("use_aux_norm")),
        norm_before_residual=bool(settings.get("norm_before_residual")),
        norm_output=bool(settings.get("norm_output")),
        own_embedding=own_embedding,
    )


def _check_target(drafter: DrafterConfig, target: ModelConfig) -> None:
    if drafter.target_hidden_size != target.hidden_size:
        _refuse(
            f"made for a target of hidden size {drafter.target_hidden_size}",
            f"the target has {target.hidden_size}",
        )
    if drafter.vocab_size != target.vocab_size:
        _refuse(
            f"made for a target of {drafter.vocab_size} tokens",
            f"the target's vocabulary has {target.vocab_size}",
        )
    if not drafter.own_embedding and drafter.hidden_size != target.hidden_size:
        _refuse(
            f"tensor 'embed_tokens.weight' missing with hidden size {drafter.hidden_size}",
            f"only a drafter of hidden size {target.hidden_size} can borrow the embedding",
        )


def _check_fusion(drafter: DrafterConfig, tensors: Tensors) -> None:
    width = len(drafter.aux_layers) * drafter.target_hidden_size
    fc = tensors.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != width:
        _refuse(
            f"fc.weight reads {fc.shape[1]} numbers",
            f"{len(drafter.aux_layers)} states of width {drafter.target_hidden_size} are {width}",
        )
