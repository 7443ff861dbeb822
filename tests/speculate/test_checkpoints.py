"""Every format loads to the same drafter; what the network cannot do is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import CheckpointError
from eyas.model_config import ModelConfig
from eyas.models.eagle3 import Eagle3
from eyas.speculate.checkpoints import SHIPPED, Format, detect_format, find_drafter, load_drafter
from eyas.train.export import export_specforge, export_speculators

CPU = torch.device("cpu")
Make = Callable[..., Eagle3]
Change = Callable[[dict[str, Any]], object]
IDS = "eagle_aux_hidden_state_layer_ids"


def load(folder: Path, target: ModelConfig, **rest: Any) -> Eagle3:
    return load_drafter(folder, target, torch.float32, CPU, **rest)


def edit(folder: Path, config: Change | None = None, tensors: Change | None = None) -> None:
    """Change a written checkpoint in place."""
    if config is not None:
        record = json.loads((folder / "config.json").read_text())
        config(record)
        (folder / "config.json").write_text(json.dumps(record))
    if tensors is not None:
        weights = load_file(folder / "model.safetensors")
        tensors(weights)
        save_file(weights, folder / "model.safetensors")


def as_eagle(folder: Path) -> None:
    """Rewrite a SpecForge checkpoint as the EAGLE authors': no layer ids, pickled weights."""

    def change(config: dict[str, Any]) -> None:
        for key in ("eagle_config", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(key)
        config["architectures"] = ["LlamaForCausalLM"]

    edit(folder, change)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def assert_same(ours: Eagle3, expected: Eagle3) -> None:
    assert ours.config == expected.config
    assert torch.equal(ours.target_ids, expected.target_ids)
    state = expected.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_eagle_format(tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig) -> None:
    drafter = make_drafter()
    export_specforge(drafter, tmp_path, torch.float32)
    as_eagle(tmp_path)
    loaded = load(tmp_path, drafter_target)
    assert_same(loaded, drafter)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_formats_are_told_by_content(tmp_path: Path, make_drafter: Make) -> None:
    def found(folder: Path) -> Format:
        config = json.loads((folder / "config.json").read_text())
        return detect_format(config, load_file(folder / "model.safetensors"))

    export_specforge(make_drafter(), tmp_path / "a", torch.float32)
    export_speculators(make_drafter(), tmp_path / "b", "some/target", torch.float32)
    assert found(tmp_path / "a") is Format.SPECFORGE
    assert found(tmp_path / "b") is Format.SPECULATORS
    edit(tmp_path / "a", lambda c: c.update(architectures=["LlamaForCausalLM"]))
    assert found(tmp_path / "a") is Format.EAGLE


def test_layer_ids_in_both_conventions(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig
) -> None:
    export_specforge(make_drafter(), tmp_path, torch.float32)

    def layers(ids: list[int] | None, **rest: Any) -> tuple[int, ...]:
        edit(tmp_path, lambda c: c.update(eagle_config={IDS: ids} if ids else None))
        return load(tmp_path, drafter_target, **rest).config.aux_layers

    assert layers([1, 3, 4]) == (2, 4, 5)  # outputs
    assert layers([2, 3, 4]) == (2, 3, 4)  # boundaries
    assert layers([3, 5, 8]) == (3, 5, 8)  # the last: after the last layer
    assert layers(None) == drafter_target.default_aux_layers() == (2, 4, 5)
    assert layers([1, 3, 4], aux_layers_override=(1, 3, 4)) == (1, 3, 4)
    edit(tmp_path, lambda c: c.update({"eagle_config": None, IDS: [1, 3, 4]}))
    assert load(tmp_path, drafter_target).config.aux_layers == (2, 4, 5)


def test_switches(tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig) -> None:
    export_speculators(make_drafter(), tmp_path, "some/target", torch.float32)
    edit(tmp_path, lambda c: c.pop("norm_before_residual"))
    assert load(tmp_path, drafter_target).config.norm_before_residual is True
    assert load(tmp_path, drafter_target, feedback_override=True).config.norm_output is True


def test_short_drafter_reaches_as_far_as_its_target(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig
) -> None:
    export_specforge(make_drafter(max_position=16), tmp_path, torch.float32)
    loaded = load(tmp_path, drafter_target)
    assert loaded.config.max_position == drafter_target.max_position


def test_same_vocabulary_needs_no_map(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig
) -> None:
    export_specforge(make_drafter(draft_vocab_size=128), tmp_path, torch.float32)
    edit(tmp_path, lambda c: c.pop("draft_vocab_size"), lambda t: (t.pop("d2t"), t.pop("t2d")))
    assert torch.equal(load(tmp_path, drafter_target).target_ids, torch.arange(128))


def zero_first(tensors: dict[str, Any]) -> None:
    tensors["d2t"][1:] = 0
    tensors["d2t"][0] = 5


BAD_TENSORS: list[tuple[Change, str]] = [
    (lambda t: t.pop("norm.weight"), "'norm.weight': missing"),
    (lambda t: t.pop("lm_head.weight"), "'lm_head.weight': missing"),
    (lambda t: t.update(extra=torch.ones(1)), "'extra': is spare"),
    (lambda t: t.pop("d2t"), "'d2t': missing, though 40 draft ids must be mapped to 128"),
    (lambda t: t.update(d2t=t["d2t"][:-1].clone()), r"'d2t'.*must be integers \[40\]"),
    (lambda t: t.update(d2t=t["d2t"].float()), "'d2t'.*must be integers"),
    (lambda t: t.update(d2t=t["d2t"] + 100), "'d2t': target ids .* within 0..127"),
    (zero_first, "'d2t': target ids .* ascend strictly"),
    (lambda t: t.update(t2d=~t["t2d"]), "'t2d': must mark exactly"),
    (lambda t: t.update(t2d=t["t2d"][:-1].clone()), "'t2d': must mark exactly"),
    (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), "fc.weight reads 64.* are 96"),
    (
        lambda t: t.update({"lm_head.weight": torch.ones(41, 32)}),
        r"'lm_head.weight' of shape \[41, 32\]",
    ),
    (
        lambda t: t.update({"embed_tokens.weight": torch.ones(127, 32)}),
        r"'embed_tokens.weight' of shape \[127, 32\]",
    ),
    (
        lambda t: (
            t.pop("midlayer.hidden_norm.weight"),
            t.update({"fc.weight": torch.ones(32, 64)}),
        ),
        "EAGLE-1 or EAGLE-2",
    ),
    (
        lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        "q_norm.weight': is spare",
    ),
]


@pytest.mark.parametrize(("change", "words"), BAD_TENSORS)
def test_wrong_tensors_are_refused(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig, change: Change, words: str
) -> None:
    export_specforge(make_drafter(), tmp_path, torch.float32)
    edit(tmp_path, tensors=change)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, drafter_target)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA are not supported yet"),
    ({"kv_lora_rank": 512}, "MLA are not supported yet"),
    ({"num_hidden_layers": 2}, "several layers are not supported"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type='eagle'"),
    ({"vocab_size": 130}, "made for a target of 130 tokens"),
    ({"target_hidden_size": 64}, "made for a target of hidden size 64"),
    ({"attention_bias": True}, "attention_bias=True: is not supported"),
    ({"norm_before_fc": True}, "norm_before_fc=True"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
    ({"eagle_config": {IDS: [1, 3, 9]}}, r"auxiliary layers \[2, 4, 10\]: .* within 0..8"),
    ({"eagle_config": {IDS: [2, 2, 3]}}, "must be different"),
    ({"eagle_config": {IDS: "1"}}, "must be a list"),
    ({"eagle_config": {IDS: [1, 3]}}, "fc.weight reads 96.* are 64"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "yarn"),
    ({"sliding_window": 128}, "sliding_window=128"),
    ({"logit_scale": 0.5}, "logit_scale=0.5"),
    ({"intermediate_size": None}, "intermediate_size=None"),
]


@pytest.mark.parametrize(("change", "words"), BAD_CONFIGS)
def test_other_networks_and_targets_are_refused(
    tmp_path: Path,
    make_drafter: Make,
    drafter_target: ModelConfig,
    change: dict[str, Any],
    words: str,
) -> None:
    export_specforge(make_drafter(), tmp_path, torch.float32)
    edit(tmp_path, lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, drafter_target)


def test_other_exports_are_refused(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig
) -> None:
    export_speculators(make_drafter(), tmp_path, "some/target", torch.float32)
    edit(tmp_path, lambda c: c.pop("speculators_model_type"))
    with pytest.raises(CheckpointError, match="ModelOpt and vLLM are not supported yet"):
        load(tmp_path, drafter_target)


def test_borrowed_embedding_must_be_as_wide(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig
) -> None:
    narrow = make_drafter(hidden_size=16, own_embedding=True)
    export_specforge(narrow, tmp_path, torch.float32)
    assert_same(load(tmp_path, drafter_target), narrow)
    edit(tmp_path, tensors=lambda t: t.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match="can borrow the embedding"):
        load(tmp_path, drafter_target)


def test_missing_files_are_refused(tmp_path: Path, drafter_target: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path, drafter_target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors"):
        load(tmp_path, drafter_target)


def test_shipped_drafter_is_found_by_its_target(tmp_path: Path) -> None:
    assert find_drafter(str(tmp_path), "anything") == tmp_path
    assert find_drafter("auto", "someone/another-model") is None
    for folder in SHIPPED:
        names = ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")
        places = {find_drafter("auto", name) for name in names}
        assert len(places) == 1
        assert all(place is None or place.name == folder for place in places)
