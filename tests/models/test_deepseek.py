"""Our DeepSeek-V2, V3 and Kimi against transformers' on tiny random checkpoints (`beside.py`)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.checkpoint import read_config
from eyas.errors import CheckpointError
from eyas.models.families import model_config
from eyas.models.registry import load_target
from tests.models.beside import (
    CPU,
    Pair,
    check_both_conventions,
    check_boundaries,
    check_chunks,
    check_prefill,
    check_single_tokens,
    check_training_forward,
    check_tree,
)
from tests.quantising import Tensors, fp8_config, int4_config, quantise_folder, to_fp8, to_int4

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V2: dict[str, Any] = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("v2", {**V2, "q_lora_rank": 32}),
    "v2 lite": ("v2", {**V2, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.707}}),
    "v2 grouped": ("v2", {**GROUPED, "q_lora_rank": 32, "routed_scaling_factor": 4.0}),
    "v3": ("v3", {"rope_parameters": YARN}),
    "v3 dense": ("v3", {"first_k_dense_replace": 4}),
    "v3 half-split": ("v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "v3 direct queries": ("v3", {"q_lora_rank": None, "tie_word_embeddings": True}),
    "kimi k2": ("v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}),
    "kimi k2.5": ("kimi", {"rope_parameters": {**YARN, "factor": 64.0, "beta_fast": 1}}),
}
Save = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrap(folder: Path) -> None:
    """Turn a V3 checkpoint into the form of Kimi-K2.5, vision tower and all."""
    inner = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner["model_type"] = "kimi_k2"
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": inner,
        "vision_config": {"hidden_size": 8, "hidden_act": "gelu"},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.encoder.blocks.0.wo.weight"] = torch.ones(8, 8)
    tensors["mm_projector.proj.0.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def saved(folder: Path, variant: str, save_deepseek: Save) -> Any:
    """Write the checkpoint of a variant; returns transformers' model of it."""
    version, changes = VARIANTS[variant]
    reference = save_deepseek(folder, "v2" if version == "v2" else "v3", **changes)
    if version == "kimi":
        wrap(folder)
    return reference


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, save_deepseek: Save
) -> Pair:
    """Ours and transformers' network of one tiny checkpoint."""
    folder = tmp_path_factory.mktemp("deepseek")
    reference = saved(folder, request.param, save_deepseek)
    return load_target(folder, torch.float32, CPU), reference


def test_one_shot_prefill(pair: Pair) -> None:
    """Fault: absorbed attention, rotary pairs, yarn's factors, routing or inner norms wrong."""
    check_prefill(pair)


@pytest.mark.parametrize("page_size", [1, 64])
def test_chunked_prefill(pair: Pair, page_size: int) -> None:
    """Fault: a latent pool that is read or written at other places."""
    check_chunks(pair, page_size)


def test_forward_of_training(pair: Pair) -> None:
    """Fault: training on other states than serving computes."""
    check_training_forward(pair)


def test_token_by_token(pair: Pair) -> None:
    """Fault: decode differs from prefill."""
    check_single_tokens(pair)


@pytest.mark.parametrize("count", [5, 24])
def test_verify_pass_over_a_random_tree(pair: Pair, count: int) -> None:
    """Fault: stale mask or wrong positions in verify."""
    check_tree(pair, count)


def test_aux_states_are_the_boundaries(pair: Pair) -> None:
    """Fault: aux layer ids off by one (v#43671)."""
    check_boundaries(pair)


def test_outputs_are_the_next_boundaries(pair: Pair) -> None:
    """Fault: ids of outputs read as boundaries."""
    check_both_conventions(pair)


def rewrite(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config in `folder` with `changes`, written and read back."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(config), encoding="utf-8")
    return read_config(folder)


def test_prediction_layers_are_passed_over(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: V3's layer for multi-token prediction refused, or any spare layer let through."""
    save_deepseek(tmp_path, "v3")
    path = tmp_path / "model.safetensors"
    plain = load_file(path)
    save_file({**plain, "model.layers.4.eh_proj.weight": torch.ones(2, 2)}, path)
    load_target(tmp_path, torch.float32, CPU)
    save_file({**plain, "model.layers.5.eh_proj.weight": torch.ones(2, 2)}, path)
    with pytest.raises(CheckpointError, match=re.escape("model.layers.5.eh_proj.weight")):
        load_target(tmp_path, torch.float32, CPU)
    save_file({**plain, "model.layers.4.eh_proj.weight": torch.ones(2, 2)}, path)
    rewrite(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=re.escape("model.layers.4.eh_proj.weight")):
        load_target(tmp_path, torch.float32, CPU)


def test_vision_is_passed_over_in_the_wrapper_alone(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: unknown tensors let through by name where no vision tower belongs."""
    saved(tmp_path, "kimi k2.5", save_deepseek)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "audio_tower.weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=re.escape("audio_tower.weight")):
        load_target(tmp_path, torch.float32, CPU)
    save_deepseek(tmp_path, "v3")
    save_file({**load_file(path), "vision_tower.weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=re.escape("vision_tower.weight")):
        load_target(tmp_path, torch.float32, CPU)


def test_the_older_spelling_of_yarn_means_the_same(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: `rope_scaling` with `type`, as the hub's DeepSeek configs have it, read otherwise."""
    save_deepseek(tmp_path, "v3", rope_parameters=YARN)
    new = model_config(read_config(tmp_path))
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    old = {"rope_parameters": None, "rope_theta": 10000.0}
    config = rewrite(tmp_path, **old, rope_scaling={"type": "yarn", **scaling})
    assert model_config(config) == new
    assert new.mla is not None
    assert new.mla.scale > 24**-0.5, "the scores carry yarn's factor"
    del scaling["original_max_position_embeddings"]
    config = rewrite(tmp_path, **old, rope_scaling={"type": "yarn", **scaling})
    longest = model_config(config).rope.original_max_position
    assert longest == config["max_position_embeddings"]


def test_block_fp8_is_its_dequantised_self(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: rotary rows reordered with scales of other rows; a prediction layer's scale spare."""
    save_deepseek(tmp_path, "v3", rope_parameters=YARN)
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.4.eh_proj.weight": torch.ones(32, 32)}
    save_file({**load_file(path), **extra}, path)
    check_quantised(
        tmp_path,
        lambda name: "proj.weight" in name,
        lambda name, weight: to_fp8(name, weight, (16, 32)),
        fp8_config((16, 32)),
    )


def test_packed_int4_experts_are_their_dequantised_selves(
    tmp_path: Path, save_deepseek: Save
) -> None:
    """Fault: Kimi's experts packed under the wrapper's prefix not found."""
    saved(tmp_path, "kimi k2.5", save_deepseek)
    check_quantised(
        tmp_path,
        lambda name: ".mlp.experts." in name,
        lambda name, weight: to_int4(name, weight, 32),
        int4_config(32, ignore=["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"]),
    )


def check_quantised(
    folder: Path,
    chosen: Callable[[str], bool],
    quantise: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    quantization: dict[str, Any],
) -> None:
    """The checkpoint in `folder`, quantised, loads as the weights that its numbers mean."""
    plain = load_target(folder, torch.float32, CPU)
    config = (folder / "config.json").read_text(encoding="utf-8")
    meant = quantise_folder(folder, chosen, quantise, quantization)
    ours = load_target(folder, torch.float32, CPU)
    (folder / "model.safetensors.index.json").unlink()
    save_file(meant, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    theirs = load_target(folder, torch.float32, CPU)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    name = "blocks.3.mlp.experts.down"
    assert not torch.equal(plain.get_parameter(name), ours.get_parameter(name)), "was it rounded?"


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("v2", {"topk_method": "noaux_tc"}),
        ("v2", {"norm_topk_prob": True}),
        ("v2", {"scoring_func": "sigmoid"}),
        ("v3", {"topk_method": "greedy"}),
        ("v3", {"scoring_func": "softmax"}),
        ("v3", {"attention_bias": True}),
        ("v3", {"n_group": None}),
        ("v3", {"routed_scaling_factor": "2.5"}),
        ("v3", {"kv_lora_rank": None}),
        ("v3", {"q_lora_rank": -1}),
        ("v3", {"rope_parameters": {**YARN, "factor": None}}),
        ("v3", {"rope_parameters": {**YARN, "truncate": 1}}),
        ("v3", {"rope_parameters": {**YARN, "rope_type": "longrope"}}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_arithmetic_is_refused(
    tmp_path: Path, save_deepseek: Save, version: str, changes: dict[str, Any]
) -> None:
    """Fault: routing or scaling that is not ours, run all the same."""
    save_deepseek(tmp_path, version)
    with pytest.raises(CheckpointError, match=next(iter(changes)).partition("_")[0]):
        model_config(rewrite(tmp_path, **changes))


def test_the_wrapper_needs_a_known_text_network(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: another text network under Kimi's wrapper read as DeepSeek-V3."""
    saved(tmp_path, "kimi k2.5", save_deepseek)
    config = read_config(tmp_path)
    text = {**config["text_config"], "eos_token_id": [7, 9]}
    assert model_config({**config, "text_config": text, "eos_token_id": [7]}).eos_token_ids == (
        7,
        9,
    )
    for broken in (None, {**text, "model_type": "kimi_linear"}):
        with pytest.raises(CheckpointError, match="text_config"):
            model_config({**config, "text_config": broken})
    with pytest.raises(CheckpointError, match="hidden_act"):
        model_config({**config, "text_config": {**text, "hidden_act": "gelu"}})


def test_layers_with_experts_are_the_authors(tmp_path: Path, save_deepseek: Save) -> None:
    """Fault: `moe_layer_freq` left out; layers are sparse from the first on, and of a multiple."""
    save_deepseek(tmp_path, "v3")
    config = read_config(tmp_path)

    def sparse(**changes: Any) -> list[bool]:
        model = model_config({**config, **changes})
        return [model.is_sparse(i) for i in range(model.num_layers)]

    assert sparse() == [False, True, True, True]
    assert sparse(moe_layer_freq=2) == [False, False, True, False]
    assert sparse(n_routed_experts=None) == [False] * 4
    assert dataclasses.replace(model_config(config), moe=None).is_sparse(3) is False
