"""What is exported is what was trained: both formats load back to the same drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import ConfigError
from eyas.model_config import ModelConfig, RopeConfig
from eyas.models.eagle3 import Eagle3
from eyas.speculate.checkpoints import load_drafter
from eyas.train.export import export_specforge, export_speculators

CPU = torch.device("cpu")
Make = Callable[..., Eagle3]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_residual": True},
    {"own_embedding": True, "rope": RopeConfig(theta=5e5, kind="llama3", factor=8.0)},
    {"aux_layers": (3, 5, 8), "rope": RopeConfig(kind="linear", factor=2.0)},
    {"aux_layers": (2, 8), "draft_vocab_size": 128, "head_dim": 16},
    {"rope": RopeConfig(kind="yarn", factor=40.0, mscale=0.7, mscale_all_dim=1.0, truncate=False)},
    {"rope": RopeConfig(kind="yarn", factor=4.0, beta_fast=8.0, attention_factor=1.5)},
]


@pytest.mark.parametrize("switches", SWITCHES)
def test_both_formats_load_to_the_same_drafter(
    tmp_path: Path, make_drafter: Make, drafter_target: ModelConfig, switches: dict[str, Any]
) -> None:
    drafter = make_drafter(**switches)
    export_specforge(drafter, tmp_path / "specforge", torch.float32)
    export_speculators(drafter, tmp_path / "speculators", "some/target", torch.float32)
    for form in ("specforge", "speculators"):
        loaded = load_drafter(tmp_path / form, drafter_target, torch.float32, CPU)
        assert loaded.config == drafter.config, form
        assert torch.equal(loaded.target_ids, drafter.target_ids), form
        state = drafter.state_dict()
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, state[name]), (form, name)


def test_tensors_of_the_formats(tmp_path: Path, make_drafter: Make) -> None:
    drafter = make_drafter(fc_norm=True)
    export_specforge(drafter, tmp_path / "a", torch.bfloat16)
    export_speculators(drafter, tmp_path / "b", "some/target", torch.bfloat16)
    ours = load_file(tmp_path / "a" / "model.safetensors")
    layer = {
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "hidden_norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    top = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    top |= {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(ours) == top | {f"midlayer.{name}" for name in layer}
    theirs = load_file(tmp_path / "b" / "model.safetensors")
    assert set(theirs) == top | {f"layers.0.{name}" for name in layer}
    assert (ours["d2t"].dtype, ours["t2d"].dtype) == (torch.int64, torch.bool)
    assert ours["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(torch.arange(40) + ours["d2t"], drafter.target_ids)
    assert torch.equal(ours["t2d"].nonzero().flatten(), drafter.target_ids)


def test_layer_ids_as_each_format_counts(tmp_path: Path, make_drafter: Make) -> None:
    def written(folder: Path) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return config

    key = "eagle_aux_hidden_state_layer_ids"
    export_specforge(make_drafter(), tmp_path / "a", torch.float32)
    assert written(tmp_path / "a")["eagle_config"][key] == [1, 3, 4]
    export_specforge(make_drafter(aux_layers=(3, 4, 5)), tmp_path / "a", torch.float32)
    assert written(tmp_path / "a")["eagle_config"][key] == [3, 4, 5]
    export_speculators(make_drafter(), tmp_path / "b", "some/target", torch.float32)
    assert written(tmp_path / "b")[key] == [2, 4, 5]
    assert (
        written(tmp_path / "b")["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    )
    with pytest.raises(ConfigError, match="first id of 1"):
        export_specforge(make_drafter(aux_layers=(1, 4, 5)), tmp_path / "c", torch.float32)
    assert not (tmp_path / "c").exists()


def test_export_replaces_an_older_one(
    tmp_path: Path, make_drafter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_specforge(make_drafter(), tmp_path, torch.float32)
    before = (tmp_path / "model.safetensors").read_bytes()

    def interrupt(*args: object, **rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("eyas.train.export.save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_specforge(
                make_drafter(hidden_size=16, own_embedding=True), tmp_path, torch.float32
            )
    assert (tmp_path / "model.safetensors").read_bytes() == before
    export_specforge(make_drafter(), tmp_path, torch.bfloat16)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "config.json"}


def test_what_is_never_trained_is_not_written(tmp_path: Path, make_drafter: Make) -> None:
    """Fault: a switch that an export leaves out, so that another network is read back."""
    for changes in ({"qk_norm": True}, {"num_layers": 2}, {"norm_before_fc": True}):
        for export in (export_specforge, lambda *a: export_speculators(a[0], a[1], "t", a[2])):
            with pytest.raises(ConfigError, match=f"a drafter with {next(iter(changes))}="):
                export(make_drafter(**changes), tmp_path / "a", torch.float32)
