"""What is no drafter of this target, or none that runs exactly, is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.errors import CheckpointError, ConfigError, EyasError
from tests.speculate import writing
from tests.speculate.test_checkpoints import LATENT, YARN, load
from tests.speculate.writing import IDS, Config, Made, Tensors, write

Change = Callable[[Tensors], object]
FC, HEAD, EMBED = "fc.weight", "lm_head.weight", "embed_tokens.weight"


def refused(
    folder: Path,
    words: str,
    form: writing.Format = writing.specforge,
    made: Made | None = None,
    config: Config | None = None,
    tensors: Change | None = None,
    error: type[EyasError] = CheckpointError,
    **options: Any,
) -> None:
    """A drafter with this config and these tensors is refused in these words."""
    keys, weights = form(made or Made.random())
    weights = dict(weights)
    if tensors is not None:
        tensors(weights)
    write(folder, keys | (config or {}), weights)
    with pytest.raises(error, match=words):
        load(folder, **options)


def shuffled(tensors: Tensors) -> None:
    """Target ids in another order."""
    size = len(tensors["d2t"])
    ids = torch.arange(size) + tensors["d2t"]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    tensors["d2t"] = ids[order] - torch.arange(size)


def indices(tensors: Tensors) -> None:
    """Target ids where offsets are wanted."""
    tensors["d2t"] = torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def unmarked_indices(tensors: Tensors) -> None:
    """The same without a mask: only that they make no offsets gives them away."""
    indices(tensors)
    del tensors["t2d"]


def plausible_indices(tensors: Tensors) -> None:
    """Target ids that would do as offsets too: the mask says what they are."""
    ids = 2 * torch.arange(len(tensors["d2t"]))
    tensors["t2d"] = torch.zeros(128, dtype=torch.bool)
    tensors["t2d"][ids] = True
    tensors["d2t"] = ids


def repeated(tensors: Tensors) -> None:
    """Two draft ids for one target id."""
    tensors["d2t"][5] = tensors["d2t"][4] - 1


MAPS: list[tuple[Change, str]] = [
    (lambda t: t.pop("d2t"), "'d2t': missing, though 40 draft ids must be mapped to 128"),
    (shuffled, "'d2t': target ids .* ascend strictly"),
    (indices, "'d2t': holds target ids, where offsets from the draft ids are wanted"),
    (unmarked_indices, "'d2t': holds target ids, where offsets"),
    (plausible_indices, "'d2t': holds target ids, where offsets"),
    (repeated, "'d2t': target ids .* ascend strictly"),
    (lambda t: t.update(d2t=t["d2t"][:-1]), r"'d2t'.*must be integers \[40\]"),
    (lambda t: t.update(d2t=t["d2t"].float()), "'d2t'.*must be integers"),
    (lambda t: t.update(d2t=t["d2t"] + 100), "'d2t': target ids .* within 0..127"),
    (lambda t: t.update(d2t=t["d2t"] - 100), "'d2t': target ids .* within 0..127"),
    (lambda t: t.update(t2d=~t["t2d"]), "'t2d': must mark exactly"),
    (lambda t: t.update(t2d=t["t2d"][:-1]), "'t2d': must mark exactly"),
]


@pytest.mark.parametrize(("change", "words"), MAPS)
@pytest.mark.parametrize("form", [writing.specforge, writing.vllm_export])
def test_maps(tmp_path: Path, form: writing.Format, change: Change, words: str) -> None:
    """Fault: a map that is missing or means something else, accepted silently (v#18906)."""
    refused(tmp_path, words, form, tensors=change)


def eagle_one(tensors: Tensors) -> None:
    """EAGLE-1 and EAGLE-2: embedding and one state are fused, one layer without hidden_norm."""
    for name in list(tensors):
        if not name.endswith(("_proj.weight", "post_attention_layernorm.weight")):
            del tensors[name]
    names = {name: name.replace("midlayer.", "layers.0.") for name in tensors}
    for old, new in names.items():
        tensors[new] = tensors.pop(old)
    tensors |= {FC: torch.ones(32, 64), "fc.bias": torch.ones(32)}


def without(name: str) -> Change:
    """Leave a tensor out."""
    return lambda tensors: tensors.pop(name)


def only(**weights: torch.Tensor) -> Change:
    """Other tensors altogether; dots of their names are written as __."""

    def apply(tensors: Tensors) -> None:
        tensors.clear()
        tensors.update({name.replace("__", "."): t for name, t in weights.items()})

    return apply


ONE = torch.ones(32, 32)
TENSORS: list[tuple[Change, str]] = [
    (lambda t: t.pop("norm.weight"), "'norm.weight': missing"),
    (lambda t: t.pop(HEAD), "'lm_head.weight' missing: .* scores 128 tokens, .* knows 40"),
    (lambda t: t.pop("midlayer.mlp.up_proj.weight"), "'midlayer.mlp.up_proj.weight': missing"),
    (lambda t: t.update(extra=torch.ones(1)), "'extra': is spare"),
    (lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}), "under two names"),
    (lambda t: t.update({FC: torch.ones(32, 64)}), "fc.weight reads 64 numbers: 3 states .* 96"),
    (lambda t: t.update({HEAD: torch.ones(41, 32)}), r"'lm_head.weight' of shape \[41, 32\]"),
    (lambda t: t.update({EMBED: torch.ones(127, 32)}), r"'embed_tokens.weight' of shape \[127"),
    (
        lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        "'midlayer.self_attn.k_norm.weight': missing",
    ),
    (
        lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)}),
        "'midlayer.self_attn.k_proj.bias' and 1 more: missing",
    ),
    (
        lambda t: t.update({"layers.1.mlp.up_proj.weight": ONE}),
        "num_hidden_layers=1: tensors of 2 draft layers",
    ),
    (lambda t: t.update(mask_hidden=torch.ones(1, 96)), "'mask_hidden': is of parallel drafting"),
    (
        lambda t: t.update({"parallel_draft_heads.0.medusa_layers.0.linear.weight": ONE}),
        "'parallel_draft_heads.*parallel drafting",
    ),
    (eagle_one, r"fc.weight \[32, 64\] without hidden_norm: is a drafter of EAGLE-1 or EAGLE-2"),
    (only(medusa_head__0__0__linear__weight=ONE), "'medusa_head.*is of Medusa heads"),
    (only(mtp__layers__0__eh_proj__weight=ONE), "'mtp.layers.*multi-token prediction"),
    (only(layers__0__self_attn__q_proj__weight=ONE), "no tensor of an EAGLE-3 drafter"),
    (only(model__embed_tokens__weight=ONE), "whole language model.*algorithm STANDALONE"),
]


@pytest.mark.parametrize(("change", "words"), TENSORS)
def test_tensors(tmp_path: Path, change: Change, words: str) -> None:
    """Fault: another network loaded as this one, or a tensor left out (Automodel#2447)."""
    refused(tmp_path, words, tensors=change)


def nested(**switches: Any) -> Config:
    """A config whose drafter has these switches, layer ids 1, 3, 4 among them."""
    return {"eagle_config": {IDS: [1, 3, 4], **switches}}


CONFIGS: list[tuple[Config, str]] = [
    ({"vocab_size": 130}, "made for a target of 130 tokens: the target's vocabulary has 128"),
    ({"target_hidden_size": 64}, "made for a target of hidden size 64: the target has 32"),
    ({"num_hidden_layers": 2}, "num_hidden_layers=2: tensors of 1 draft layers"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type='eagle'"),
    ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
    ({"attention_bias": True}, "attention_bias=True: has no tensors of biases"),
    ({"mlp_bias": True}, "mlp_bias=True: has no tensors of biases"),
    (nested(parallel_draft_step=4), "parallel_draft_step=4: is of parallel drafting"),
    ({"parallel_drafting": True}, "parallel_drafting=True: is of parallel drafting"),
    (nested(use_input_layernorm_in_first_layer=False), "use_input_layernorm_in_first_layer=False"),
    (nested(use_mtp_layernorm=True), "use_mtp_layernorm=True: is another network"),
    (nested(eh_proj_before_attn=True), "eh_proj_before_attn=True: is another network"),
    (nested(use_aux_hidden_state=False), "'fc.weight': is spare"),
    ({"is_causal": False}, "is_causal=False: is another network"),
    ({"eagle_config": {IDS: [1, 3, 9]}}, r"auxiliary layers \[2, 4, 10\]: .* within 0..8"),
    ({"eagle_config": {IDS: [2, 2, 3]}}, "must be different"),
    ({"eagle_config": {IDS: [-1, 2, 3]}}, "within 0..8"),
    ({"eagle_config": {IDS: "1"}}, "must be a list"),
    ({"eagle_config": {IDS: [1, 3]}}, "fc.weight reads 96.* are 64"),
    ({"eagle_config": [1]}, "must hold the drafter's switches"),
    ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4: its layer ids are 3"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"quantization_config": {"bits": 4}}, "quant"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"sliding_window": 128}, "sliding_window=128: without layer_types"),
    ({"layer_types": ["chunked_attention"]}, "layer_types"),
    ({"intermediate_size": None}, "intermediate_size=None"),
    ({"draft_vocab_size": 41}, r"must be integers \[41\]"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=str)
def test_configs(tmp_path: Path, config: Config, words: str) -> None:
    """Fault: a switch of another network passed over, or another target's drafter."""
    refused(tmp_path, words, config=config)


def test_borrowed_tensors_must_fit(tmp_path: Path) -> None:
    """Fault: an embedding or a head of another width or another vocabulary."""
    narrow = Made.random(hidden_size=16, own_embedding=True)
    wide = {"target_hidden_size": 32}
    for name in (EMBED, HEAD):
        words = f"'{name}' missing with hidden size 16"
        refused(tmp_path, words, made=narrow, config=wide, tensors=without(name))
    whole = Made.random(own_head=False, draft_vocab_size=128)
    tied = {"tie_word_embeddings": True}
    refused(tmp_path, "missing with tie_word_embeddings", made=whole, config=tied)


def test_several_layers_of_another_kind(tmp_path: Path) -> None:
    """Fault: later layers that read the embedding again, or latent ones."""
    two = Made.random(num_layers=2)
    irregular = nested(next_layer_regular=False)
    refused(tmp_path, "next_layer_regular=False", made=two, config=irregular)
    one = Made.random(mla=LATENT, rope=YARN)

    def second(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.1.")] = tensors[name].clone()

    refused(
        tmp_path,
        "2 layers with latent attention",
        writing.latent,
        one,
        {"num_hidden_layers": 2},
        second,
        ConfigError,
    )


def test_norms_exclude_each_other(tmp_path: Path) -> None:
    """Fault: states normed twice."""
    made = Made.random(norm_before_fc=True)
    both = {"norm_before_fc": True, "fc_norm": True}
    refused(tmp_path, "fc_norm with norm_before_fc", made=made, config=both, error=ConfigError)


def test_options_must_fit(tmp_path: Path) -> None:
    """Fault: layers given by hand that the drafter or the target does not have."""
    refused(tmp_path, r"auxiliary layers \[2, 4, 9\]: .* within 0..8", aux_layers=(2, 4, 9))
    refused(tmp_path, "fc.weight reads 96.* are 64", aux_layers=(2, 4))
    unfused = Made.random(fused=False, aux_layers=(8,))
    words = r"aux_layers \[2\]: it reads the target's last state alone"
    last = nested(use_aux_hidden_state=False)
    refused(tmp_path, words, made=unfused, config=last, aux_layers=(2,))


def test_missing_files(tmp_path: Path) -> None:
    """Fault: a stack trace for a folder that is incomplete."""
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors"):
        load(tmp_path)
