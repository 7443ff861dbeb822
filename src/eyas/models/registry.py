"""From a checkpoint to a network: build, fill, prove.

Every tensor that is missing, spare or of the wrong shape is refused by name. Knows neither file
formats (`checkpoint.py`) nor architectures' configs (`families`).
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
from eyas.layers.moe import Router
from eyas.models.decoder import Decoder
from eyas.models.families import model_config
from eyas.quantised import dequantised, quantization_config

HARMLESS = ".rotary_emb.inv_freq"
"""Suffix of tensors that old checkpoints carry and every reader recomputes."""


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


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter empty memory of `dtype` on `device`; move buffers, keep their types.

    A module may name parameters in `keep_float32`, which then are float32 in any network.
    Shared parameters stay shared. Parameters then need no gradient. Values of parameters are not
    copied: `module` may come straight from its constructor, whose memory was never touched.
    """
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        wide = getattr(part, "keep_float32", ())
        for name, old in part.named_parameters(recurse=False):
            if id(old) not in made:
                kind = torch.float32 if name in wide else dtype
                data = torch.empty(old.shape, dtype=kind, device=device)
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
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = SOLO,
    deterministic: bool = False,
) -> Decoder:
    """The target in checkpoint `folder`, weights in `dtype` on `device`, without gradients.

    With tensor parallelism this rank's share of it. Quantised weights are dequantised. See
    `row_tile` for `deterministic`.
    Raises `CheckpointError` as `model_config`, `checkpoint.tensor_stream` and `fill` do.
    """
    raw = read_config(folder)
    model = Decoder(model_config(raw), row_tile(device, dtype, deterministic), group)
    allocate(model, dtype, device)
    fill_target(model, raw, tensor_stream(folder))
    settle(model)
    return model.eval()


def settle(model: nn.Module) -> None:
    """Let the layers of a filled network keep weights in fewer bits where that loses nothing."""
    for part in model.modules():
        if isinstance(part, Router):
            part.settle()


def fill_target(
    model: Decoder, raw: dict[str, Any], stream: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Fill `model` from the tensors of its checkpoint, whose config is `raw`.

    A model on the meta device takes shapes: then this only proves that the tensors are its own.
    """
    config = model.config
    own = (item for item in stream if not item[0].startswith(config.passed_over))
    stream = dequantised(own, quantization_config(raw))
    if not config.tie_word_embeddings:
        fill(model.places(), stream)
        return
    heads: list[torch.Tensor] = []
    head_name = f"{config.prefix}lm_head.weight"
    fill(model.places(), _without_head(stream, head_name, heads))
    weight, place = model.embed.weight, model.embed.place()
    for head in heads:
        same = weight.is_meta or torch.equal(place.take(head).to(weight), weight)
        if not same:
            raise CheckpointError(
                f"tensor {head_name!r}",
                "differs from the embedding although tie_word_embeddings is true",
                "mend tie_word_embeddings in config.json",
            )


def _without_head(
    stream: Iterable[tuple[str, torch.Tensor]], head: str, heads: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `stream` on, setting aside the `head` that some checkpoints with tied weights repeat."""
    for name, tensor in stream:
        if name == head:
            heads.append(tensor)
        else:
            yield name, tensor
