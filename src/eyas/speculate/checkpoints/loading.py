"""From a drafter's name to its network: an EAGLE-3 network, or a small language model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch

from eyas.checkpoint import read_config, resolve, tensor_stream
from eyas.config import DrafterOptions
from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.families import model_config
from eyas.models.families.reading import understood
from eyas.models.registry import allocate, fill, load_target
from eyas.quantised import dequantised, quantization_config
from eyas.speculate.checkpoints.formats import (
    Tensors,
    detect_format,
    flatten,
    is_language_model,
    network_names,
)
from eyas.speculate.checkpoints.switches import read_switches
from eyas.speculate.checkpoints.vocabulary import target_ids

SHIPPED = {"smollm2-135m-instruct": ("smollm2", "smollm2-135m-instruct")}
"""Folder in `eyas/drafters` -> last parts of the names of the target it was trained for."""

_DRAFTER_KEYS = {"speculators_model_type", "eagle_config", "draft_vocab_size"}
"""Keys that no language model's config has."""


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


def choose_drafter(drafter: str | None, model: str, algorithm: str | None) -> Path | None:
    """The folder that an engine drafts from, None if it drafts without weights or not at all.

    `algorithm` None takes whatever there is. Shipped drafters are EAGLE-3 networks.
    """
    wanted = (None, "EAGLE3") if drafter == "auto" else (None, "EAGLE3", "STANDALONE")
    if drafter is None or algorithm not in wanted:
        return None
    return find_drafter(drafter, model)


def drafter_kind(path: Path) -> str:
    """The algorithm that folder `path` drafts with: STANDALONE for a whole model, or EAGLE3."""
    if read_config(path).keys() & _DRAFTER_KEYS:
        return "EAGLE3"
    names = (name for name, _ in tensor_stream(path))
    return "STANDALONE" if is_language_model(names) else "EAGLE3"


def drafter_config(
    path: Path, target: ModelConfig, options: DrafterOptions | None = None
) -> DrafterConfig | ModelConfig:
    """The config of what `load_network` would load, before memory is taken.

    Tensors of the folder are mapped, not read. Raises `CheckpointError` as the loaders do.
    """
    if drafter_kind(path) == "STANDALONE":
        return model_config(read_config(path))
    drafter, tensors = _read(path, target, options)
    target_ids(tensors.get("d2t"), tensors.get("t2d"), drafter)
    return drafter


def load_network(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: DrafterOptions | None = None,
) -> Eagle3 | Decoder:
    """What folder `path` drafts with, whole, in `dtype` on `device`, without gradients.

    Raises `CheckpointError` as `load_drafter` and `load_target` do.
    """
    if drafter_kind(path) == "STANDALONE":
        return load_target(path, dtype, device)
    return load_drafter(path, target, dtype, device, options)


def load_drafter(
    path: Path,
    target: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: DrafterOptions | None = None,
) -> Eagle3:
    """The EAGLE-3 drafter in folder `path` for `target`, in `dtype` on `device`, no gradients.

    Without an embedding or a head of its own it borrows the target's. `options` stand in for what
    a checkpoint says ambiguously: layer ids, the state that is fed back, the rotary base. Raises
    `CheckpointError` for another network, another target, or tensors that do not fit.
    """
    drafter, tensors = _read(path, target, options)
    ids = target_ids(tensors.pop("d2t", None), tensors.pop("t2d", None), drafter)
    module = Eagle3(drafter, row_tile(device, dtype))
    allocate(module, dtype, device)
    fill(module.places(), tensors.items())
    module.target_ids = ids.to(device)
    return module.eval()


def _read(
    path: Path, target: ModelConfig, options: DrafterOptions | None
) -> tuple[DrafterConfig, Tensors]:
    """An EAGLE-3 drafter's config, and its tensors under the names of `Eagle3.places`."""
    config = read_config(path)
    with understood("config.json of a drafter"):
        tensors = dict(dequantised(tensor_stream(path), quantization_config(config)))
        form = detect_format(config, tensors)
        settings, tensors = flatten(config, form, tensors), network_names(tensors)
        drafter = read_switches(settings, form, tensors, target, options or DrafterOptions())
    return drafter, tensors
