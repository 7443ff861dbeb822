"""Tensors to the two quantised forms, and what these forms mean, number by number.

Written from the formats' descriptions with element-wise index arithmetic, apart from the reader in
`eyas.quantised`, so that a mistake in the one is not repeated in the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def fp8_config(block: tuple[int, int], **changes: Any) -> dict[str, Any]:
    """The `quantization_config` of DeepSeek-V3."""
    values = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return {**values, "weight_block_size": list(block), **changes}


def int4_config(group: int, **changes: Any) -> dict[str, Any]:
    """The `quantization_config` of Kimi-K2-Thinking, with one group of all linear layers."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    groups = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**groups, "weights": weights}},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **changes,
    }


def to_fp8(
    name: str, weight: torch.Tensor, block: tuple[int, int], scales: torch.dtype = torch.float32
) -> tuple[Tensors, torch.Tensor]:
    """The stored tensors of a matrix, and the float32 matrix that they mean."""
    rows, columns = (torch.arange(n) // b for n, b in zip(weight.shape, block, strict=True))
    grid = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[rows == i][:, columns == j]
            grid[i, j] = part.abs().max() / 448
    grid = 2 ** grid.log2().ceil() if scales == torch.float8_e8m0fnu else grid
    grid = grid.to(scales)
    spread = grid.float()[rows][:, columns]
    stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": grid}, stored.float() * spread


def to_int4(
    name: str, weight: torch.Tensor, group: int, scales: torch.dtype = torch.bfloat16
) -> tuple[Tensors, torch.Tensor]:
    """The same in symmetric INT4; `name` ends in `.weight`."""
    rows, columns = weight.shape
    grid = (weight.view(rows, -1, group).abs().amax(-1) / 7.5).to(scales)
    spread = grid.float()[:, torch.arange(columns) // group]
    numbers = (weight / spread).round().clamp(-8, 7)
    words = np.zeros((rows, -(-columns * 4 // 32)), np.uint32)
    for i in range(rows):
        for j in range(columns):
            words[i, j // 8] |= np.uint32((int(numbers[i, j]) + 8) << 4 * (j % 8))
    stored = {
        f"{name}_packed": torch.from_numpy(words.view(np.int32)),
        f"{name}_scale": grid,
        f"{name}_shape": torch.tensor([rows, columns]),
    }
    return stored, numbers * spread


def quantise_folder(
    folder: Path,
    chosen: Callable[[str], bool],
    quantise: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    quantization: dict[str, Any],
) -> Tensors:
    """Quantise the `chosen` weights of a checkpoint; returns every weight as it now means.

    The tensors go to three shards in turn, so that partners lie in different files.
    """
    saved = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in saved.items():
        if chosen(name):
            made, meant[name] = quantise(name, tensor.float())
            stored |= made
        else:
            stored[name] = meant[name] = tensor
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(stored)}
    for file in set(places.values()):
        save_file({n: stored[n] for n, place in places.items() if place == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return meant
