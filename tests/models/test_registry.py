"""A target is what its checkpoint says, or is refused by the name of what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eyas.checkpoint import read_config
from eyas.errors import CheckpointError, ConfigError
from eyas.layers.linear import row_tile, whole
from eyas.model_config import RopeConfig
from eyas.models.families import model_config
from eyas.models.families.reading import rope_config
from eyas.models.registry import fill, load_target, resolve_device, resolve_dtype

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj.weight"
SaveLlama = Callable[..., Any]


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_arrives(tiny_llama_folder: Path, dtype: torch.dtype) -> None:
    model = load_target(tiny_llama_folder, dtype, CPU)
    saved = load_file(tiny_llama_folder / "model.safetensors")
    q, k, v = (saved[Q.replace("q_proj", f"{x}_proj")].to(dtype) for x in "qkv")
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters["blocks.1.attention.qkv.weight"], torch.cat((q, k, v)))
    assert torch.equal(model.head.weight, saved["lm_head.weight"].to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not any(p.requires_grad for p in model.parameters())
    assert model.rotary.table.dtype == torch.float32
    assert model.row_tile == row_tile(CPU, dtype)
    total = sum(p.numel() for p in model.parameters())
    assert total == sum(t.numel() for t in saved.values())


def test_biases_and_tied_weights(tmp_path: Path, save_llama: SaveLlama) -> None:
    save_llama(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    model = load_target(tmp_path, torch.float32, CPU)
    assert model.head.weight is model.embed.weight
    bias = dict(model.named_parameters())["blocks.0.attention.qkv.bias"]
    assert torch.equal(bias[-32:], saved["model.layers.0.self_attn.v_proj.bias"])
    embedding = saved["model.embed_tokens.weight"]
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    load_target(tmp_path, torch.float32, CPU)  # repeated, but the same
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differs from the embedding"):
        load_target(tmp_path, torch.float32, CPU)


def test_smollm2_loads(smollm2_folder: Path) -> None:
    config = load_target(smollm2_folder, torch.bfloat16, CPU).config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q), f"'{Q}': missing"),
        (lambda t: t.update(extra=torch.ones(1)), "'extra': is spare"),
        (lambda t: t.update({Q: t[Q][:-1].clone()}), rf"'{Q}' of shape \[63, 64\].*\[64, 64\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"'{Q}' of type int8"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"'{Q}' of type float8"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_target(folder, torch.float32, CPU)


def test_rotary_tables_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    load_target(folder, torch.float32, CPU)


def test_fill_refuses_a_tensor_twice() -> None:
    weight = nn.Parameter(torch.empty(2))
    with pytest.raises(CheckpointError, match="'w': comes twice"):
        fill({"w": whole(weight)}, [("w", torch.ones(2)), ("w", torch.ones(2))])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM': not implemented.*Llama"),
        ({"architectures": None}, "'llama': not implemented; use a checkpoint of .*Llama"),
        ({"architectures": ["GptOssForCausalLM"]}, "GptOssForCausalLM': attention sinks, .*Llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor=None.*needs a number"),
        ({"hidden_size": None}, "hidden_size=None.*positive integer"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_other_arithmetic_is_refused_by_name(
    tiny_llama_folder: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        model_config({**read_config(tiny_llama_folder), **change})


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
    ],
)
def test_rope_in_both_spellings(config: dict[str, Any], expected: RopeConfig) -> None:
    assert rope_config(config) == expected


def test_rope_spellings_must_agree() -> None:
    with pytest.raises(CheckpointError, match="must agree"):
        rope_config({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}})


def test_generation_config_brings_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert model_config(read_config(folder)).eos_token_ids == (5, 2)


def test_devices_and_types() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ConfigError, match="only cpu and cuda"):
        resolve_device("tpu")
    with pytest.raises(ConfigError, match="int4"):
        resolve_dtype("int4", CPU)
