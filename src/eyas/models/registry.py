"""From a checkpoint to a network: read its config, build, fill, prove.

Whatever would change the arithmetic and is not implemented is refused by name, and so is every
tensor that is missing, spare or of the wrong shape. Knows no file formats (`checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.checkpoint import read_config, tensor_stream
from eyas.config import DTYPES, require
from eyas.distributed.group import SOLO, Group
from eyas.errors import CheckpointError
from eyas.layers.linear import Places, row_tile
from eyas.model_config import ModelConfig, RopeConfig
from eyas.models.decoder import Decoder

ARCHITECTURES = ("LlamaForCausalLM",)
HARMLESS = ".rotary_emb.inv_freq"
"""Suffix of tensors that old checkpoints carry and every reader recomputes."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1),
}
"""Config keys that change the arithmetic -> the values that are implemented."""


def resolve_device(name: str) -> torch.device:
    """The device of a config's `device`; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    require(
        kind in ("cpu", "cuda") and (not index or index.isdigit()),
        f"device {name!r}",
        "only cpu and cuda are implemented",
        "give cpu, cuda, cuda:1 or auto",
    )
    require(
        kind == "cpu" or torch.cuda.is_available(),
        f"device {name!r}",
        "this machine or this torch has no CUDA",
        "give cpu or auto",
    )
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations; `auto` is bfloat16 on CPU and CUDA."""
    require(
        name in DTYPES,
        f"dtype {name!r}",
        f"the type must be known on {device.type}",
        f"use one of {', '.join(DTYPES)}",
    )
    types = {"float16": torch.float16, "float32": torch.float32}
    return types.get(name, torch.bfloat16)


def refuse_unknown_arithmetic(config: dict[str, Any]) -> None:
    """Raise `CheckpointError` for a value in `config` that asks for other arithmetic than ours."""
    for key, allowed in _FIXED.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{key}={value!r}",
                "would change the arithmetic and is not implemented",
                f"use a checkpoint with {key}={allowed[-1]!r}",
            )


def dimension(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer `config[key]`, or `default`; raises `CheckpointError` without either."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {key}={value!r}", "must be a positive integer", "mend config.json"
        )
    return value


def rope_config(config: dict[str, Any]) -> RopeConfig:
    """Rotary embedding of a config with `rope_parameters`, or `rope_theta` and `rope_scaling`.

    The first is transformers 5's form, the second the older one; a config with both must mean the
    same. Raises `CheckpointError` for rope types other than default, linear and llama3.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise CheckpointError(
            f"rope scaling {scaling!r}", "must be one flat object", "use a plain Llama checkpoint"
        )
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if config.get("rope_theta") not in (None, theta):
        raise CheckpointError(
            f"rope_theta={config['rope_theta']!r} beside rope_parameters with {theta!r}",
            "must agree",
            "mend config.json",
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }
    if kind not in needed or scaling.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(
            f"rope scaling {scaling!r}",
            "only default, linear and llama3 over whole heads are implemented",
            "use a checkpoint with one of these",
        )
    values: dict[str, Any] = {}
    for key in needed[kind]:
        value = scaling.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"rope scaling {kind} with {key}={value!r}", "needs a number", "mend config.json"
            )
        whole = key == "original_max_position_embeddings"
        values["original_max_position" if whole else key] = value
    return RopeConfig(theta=float(theta), kind=kind, **values)


def model_config(config: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a Hugging Face config dict (`checkpoint.read_config`).

    Absent keys take the defaults of transformers' `LlamaConfig` where these are no dimensions of
    a weight. Raises `CheckpointError` for other architectures and for arithmetic that is not
    implemented.
    """
    names = config.get("architectures") or []
    if not any(name in ARCHITECTURES for name in names):
        raise CheckpointError(
            f"architecture {', '.join(map(str, names)) or config.get('model_type')!r}",
            f"only {', '.join(ARCHITECTURES)} is implemented",
            "use a Llama checkpoint",
        )
    refuse_unknown_arithmetic(config)
    hidden, heads = dimension(config, "hidden_size"), dimension(config, "num_attention_heads")
    eos = config.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return ModelConfig(
        vocab_size=dimension(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=dimension(config, "intermediate_size"),
        num_layers=dimension(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=dimension(config, "num_key_value_heads", heads),
        head_dim=dimension(config, "head_dim", hidden // heads),
        max_position=dimension(config, "max_position_embeddings", 2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_config(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", False)),
        o_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=tuple(eos),
    )


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter empty memory of `dtype` on `device`; move buffers, keep their types.

    Shared parameters stay shared. Parameters then need no gradient. Values of parameters are not
    copied: `module` may come straight from its constructor, whose memory was never touched.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            if id(old) not in made:
                data = torch.empty(old.shape, dtype=dtype, device=device)
                made[id(old)] = nn.Parameter(data, requires_grad=False)
            setattr(part, name, made[id(old)])
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def fill(places: Places, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors of `stream` to their `places`, casting to their types.

    Raises `CheckpointError` with the tensor's name if one is missing, spare, repeated, of another
    shape or not of a floating type. Rotary tables of old checkpoints are passed over.
    """
    missing = set(places)
    for name, tensor in stream:
        if name.endswith(HARMLESS):
            continue
        if name not in places:
            raise CheckpointError(
                f"tensor {name!r}",
                "is spare: the network has no place for it",
                "check that config.json belongs to these weights",
            )
        if name not in missing:
            raise CheckpointError(
                f"tensor {name!r}", "comes twice", "give a checkpoint with each tensor once"
            )
        place = places[name]
        if tuple(tensor.shape) != place.shape:
            raise CheckpointError(
                f"tensor {name!r} of shape {list(tensor.shape)}",
                f"must have shape {list(place.shape)}",
                "check that config.json belongs to these weights",
            )
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise CheckpointError(
                f"tensor {name!r} of type {str(tensor.dtype).removeprefix('torch.')}",
                "weights are bfloat16, float16, float32 or float64",
                "use a checkpoint that is not quantised",
            )
        place.into.copy_(place.take(tensor))
        missing.remove(name)
    if missing:
        raise CheckpointError(
            f"tensor {min(missing)!r}" + f" and {len(missing) - 1} more" * (len(missing) > 1),
            "missing in the checkpoint",
            "check that config.json belongs to these weights",
        )


def load_target(
    folder: Path, dtype: torch.dtype, device: torch.device, group: Group = SOLO
) -> Decoder:
    """The target in checkpoint `folder`, weights in `dtype` on `device`, without gradients.

    With tensor parallelism this rank's share of it.
    Raises `CheckpointError` as `model_config`, `checkpoint.tensor_stream` and `fill` do.
    """
    config = model_config(read_config(folder))
    model = Decoder(config, row_tile(device, dtype), group)
    allocate(model, dtype, device)
    stream = tensor_stream(folder)
    if not config.tie_word_embeddings:
        fill(model.places(), stream)
        return model.eval()
    heads: list[torch.Tensor] = []
    fill(model.places(), _without_head(stream, heads))
    for head in heads:
        if not torch.equal(model.embed.place().take(head).to(device, dtype), model.embed.weight):
            raise CheckpointError(
                "tensor 'lm_head.weight'",
                "differs from the embedding although tie_word_embeddings is true",
                "mend tie_word_embeddings in config.json",
            )
    return model.eval()


def _without_head(
    stream: Iterable[tuple[str, torch.Tensor]], heads: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `stream` on, setting aside the head that some checkpoints with tied weights repeat."""
    for name, tensor in stream:
        if name == "lm_head.weight":
            heads.append(tensor)
        else:
            yield name, tensor
