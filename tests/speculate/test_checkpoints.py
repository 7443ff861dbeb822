"""Every format loads to the same drafter, with every switch; both ways to count layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config import DrafterOptions
from eyas.errors import ConfigError
from eyas.model_config import DrafterConfig, MLAConfig, ModelConfig, RopeConfig
from eyas.models.eagle3 import Eagle3
from eyas.speculate.checkpoints import (
    SHIPPED,
    Format,
    choose_drafter,
    detect_format,
    drafter_config,
    find_drafter,
    load_drafter,
)
from tests.helpers import CPU
from tests.speculate import writing
from tests.speculate.writing import FORMATS, IDS, TARGET, Config, Made, opinion, write

YARN = RopeConfig(
    theta=50000.0,
    kind="yarn",
    factor=8.0,
    original_max_position=64,
    beta_fast=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
LATENT = MLAConfig(
    q_lora_rank=24,
    kv_lora_rank=16,
    nope_dim=8,
    rope_dim=4,
    value_dim=8,
    norm_eps=1e-5,
    scale=12**-0.5 * YARN.score_factor,
)


def load(folder: Path, target: ModelConfig = TARGET, **options: Any) -> Eagle3:
    return load_drafter(folder, target, torch.float32, CPU, DrafterOptions(**options))


def assert_same(ours: Eagle3, expected: Eagle3) -> None:
    """The same network: config, map, weights, and what it says about a text."""
    assert ours.config == expected.config
    assert torch.equal(ours.target_ids, expected.target_ids)
    state = expected.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, state[name]), name
    for one, other in zip(opinion(ours), opinion(expected), strict=True):
        assert torch.equal(one, other)
        assert one.std() > 0.1, "the drafter says something"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
def test_one_drafter_in_every_format(tmp_path: Path, name: str, pickled: bool) -> None:
    """Fault: a format's names, nesting, defaults or way to count layers read wrongly."""
    made = Made.random()
    config, tensors = FORMATS[name](made)
    loaded = load(write(tmp_path, config, tensors, pickled))
    expected = made.expected()
    if name == "speculators":
        assert loaded.config.own_embedding
        for one, other in zip(opinion(loaded), opinion(expected), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(loaded.target_ids, expected.target_ids)
    else:
        assert_same(loaded, expected)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert drafter_config(tmp_path, TARGET) == loaded.config


def test_formats_are_told_by_content() -> None:
    """Fault: a format taken from a name. Architectures are shared between formats."""
    found = {n: detect_format(*form(Made.random())) for n, form in FORMATS.items()}
    assert found == {
        "eagle": Format.EAGLE,
        "specforge": Format.SPECFORGE,
        "speculators": Format.SPECULATORS,
        "modelopt": Format.MODELOPT,
        "vllm": Format.MODELOPT,
    }


@pytest.mark.parametrize("form", [writing.latent, writing.latent_export])
@pytest.mark.parametrize("q_lora_rank", [24, 0])
def test_latent_drafters(tmp_path: Path, form: writing.Format, q_lora_rank: int) -> None:
    """Fault: pairs, yarn's scales or the inner norms' epsilon of another drafter."""
    mla = dataclasses.replace(LATENT, q_lora_rank=q_lora_rank)
    made = Made.random(mla=mla, rope=YARN, num_kv_heads=4, head_dim=12)
    assert_same(load(write(tmp_path, *form(made))), made.expected())


def change(**keys: Any) -> Callable[[Config], None]:
    """Set keys of a config; those of `eagle_config` where it has them or `inner` says so."""

    def apply(config: Config) -> None:
        for key, value in keys.items():
            nested = config.get("eagle_config") or {}
            (nested if key in nested else config)[key] = value

    return apply


SWITCHES: dict[str, tuple[dict[str, Any], Config]] = {
    "norm_before_residual": ({"norm_before_residual": True}, {"norm_before_residual": True}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}),
    "use_aux_norm": ({"fc_norm": True}, {"use_aux_norm": True}),
    "norm_output": ({"norm_output": True}, {"norm_output": True}),
    "return_hidden_post_norm": ({"norm_output": True}, {"return_hidden_post_norm": True}),
    "attention_bias": ({"qkv_bias": True, "o_bias": True}, {"attention_bias": True}),
    "biased queries": ({"qkv_bias": True}, {}),
    "mlp_bias": ({"mlp_bias": True}, {"mlp_bias": True}),
    "bias": ({"fc_bias": True}, {"bias": True}),
    "norms of heads": ({"qk_norm": True}, {}),
    "logit_scale": ({"logit_scale": 0.25}, {"logit_scale": 0.25}),
    "five states": ({"aux_layers": (2, 3, 4, 5, 8)}, {IDS: [1, 2, 3, 4, 7]}),
    "one state": ({"aux_layers": (2,)}, {IDS: [1], "num_aux_hidden_states": 1}),
    "no fusion": ({"fused": False, "aux_layers": (8,)}, {"use_aux_hidden_state": False}),
    "no last norm": ({"last_norm": False}, {"use_last_layernorm": False}),
    "own embedding": ({"own_embedding": True}, {}),
    "narrow": ({"hidden_size": 16, "own_embedding": True}, {"target_hidden_size": 32}),
    "heads of another size": ({"head_dim": 16}, {"head_dim": 16}),
    "three layers": ({"num_layers": 3}, {"num_hidden_layers": 3}),
    "windows": (
        {"num_layers": 2, "windows": (0, 64)},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
    ),
    "linear": (
        {"rope": RopeConfig(kind="linear", factor=4.0)},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "yarn": (
        {"rope": RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=128)},
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama3": (
        {"rope": RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=256)},
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("form", [writing.specforge, writing.modelopt])
def test_switches(tmp_path: Path, form: writing.Format, switch: str) -> None:
    """Fault: a switch that is not read, or read as another. `test_eagle3` has their arithmetic."""
    network, keys = SWITCHES[switch]
    made = Made.random(**network)
    config, tensors = form(made)
    change(**keys)(config)
    assert_same(load(write(tmp_path, config, tensors)), made.expected())


SPECULATORS: dict[str, tuple[dict[str, Any], Config, Config]] = {
    "absent means on": ({"norm_before_residual": True}, {"norm_before_residual": None}, {}),
    "off": ({}, {"norm_before_residual": False}, {}),
    "qwen3": ({"qk_norm": True}, {}, {"model_type": "qwen3"}),
    "qwen3 by its tensors": ({"qk_norm": True}, {}, {"model_type": None}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}, {}),
    "two layers": ({"num_layers": 2}, {}, {"num_hidden_layers": 2}),
    "boundary 1": ({"aux_layers": (1, 3, 4)}, {IDS: [1, 3, 4]}, {}),
    "three layers uncounted": ({"num_layers": 3}, {}, {"num_hidden_layers": None}),
}


@pytest.mark.parametrize("case", SPECULATORS)
def test_speculators_switches(tmp_path: Path, case: str) -> None:
    """Fault: what this format leaves out taken as another format takes it."""
    network, outer, inner = SPECULATORS[case]
    made = Made.random(own_embedding=True, **network)
    config, tensors = writing.speculators(made)
    config.update(outer)
    config["transformer_layer_config"].update(inner)
    tensors["embed_tokens.weight"] = made.tensors["embed_tokens.weight"]
    assert_same(load(write(tmp_path, config, tensors)), made.expected())


def test_defaults_of_a_qwen3_layer(tmp_path: Path) -> None:
    """Fault: heads of hidden / heads where Qwen3's class says 128."""
    made = Made.random(own_embedding=True, qk_norm=True, head_dim=128, num_kv_heads=4)
    config, tensors = writing.speculators(made)
    inner = config["transformer_layer_config"]
    inner.update(model_type="qwen3", head_dim=None)
    tensors["embed_tokens.weight"] = made.tensors["embed_tokens.weight"]
    config["transformer_layer_config"] = {k: v for k, v in inner.items() if v is not None}
    assert_same(load(write(tmp_path, config, tensors)), made.expected())


def test_both_ways_to_count_layers(tmp_path: Path) -> None:
    """Fault: auxiliary layers off by one (v#43671). The same checkpoint, ids in both ways."""
    made = Made.random()
    for form in (writing.specforge, writing.modelopt):

        def layers(ids: Any, form: writing.Format = form, **options: Any) -> tuple[int, ...]:
            config, tensors = form(made)
            config["eagle_config"][IDS] = ids
            return load(write(tmp_path, config, tensors), **options).config.aux_layers

        assert layers([1, 3, 4]) == (2, 4, 5)  # outputs
        assert layers([2, 4, 5]) == (2, 4, 5)  # boundaries
        assert layers([3, 5, 8]) == (3, 5, 8)  # the last: after the last layer
        assert layers(None) == layers([]) == TARGET.default_aux_layers() == (2, 4, 5)
        assert layers([1, 3, 4], aux_layers=(1, 3, 4)) == (1, 3, 4)
        assert layers([3, 5, 8], aux_layers=(8, 0, 2)) == (8, 0, 2)
    config, tensors = writing.specforge(made)
    config |= {"eagle_config": None, IDS: [1, 3, 4]}
    assert load(write(tmp_path, config, tensors)).config.aux_layers == (2, 4, 5)


def test_options_stand_in_for_the_checkpoint(tmp_path: Path) -> None:
    """Fault: SpecForge's norm_output served as vLLM reads it; a base that the trainer ignored."""
    made = Made.random(norm_output=True)
    config, tensors = writing.specforge(made)
    write(tmp_path, {**config, "norm_output": True}, tensors)
    assert load(tmp_path).config.norm_output is True
    assert load(tmp_path, feedback="post").config.norm_output is True
    assert load(tmp_path, feedback="pre").config.norm_output is False
    assert load(tmp_path, rope_theta=5e4).config.rope.theta == 5e4
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    write(tmp_path, {**config, "rope_theta": None, "rope_parameters": yarn}, tensors)
    rope = load(tmp_path, rope_theta=10000.0).config.rope
    assert (rope.theta, rope.kind, rope.factor) == (10000.0, "yarn", 4.0)
    with pytest.raises(ConfigError, match="feedback 'both'"):
        DrafterOptions(feedback="both")
    with pytest.raises(ConfigError, match="rope_theta=-1"):
        DrafterOptions(rope_theta=-1.0)


def test_a_borrowed_head(tmp_path: Path) -> None:
    """Fault: a head that must be the target's, asked of the checkpoint."""
    made = Made.random(own_head=False, draft_vocab_size=128)
    config, tensors = writing.modelopt(made)
    del config["draft_vocab_size"], tensors["d2t"]
    loaded = load(write(tmp_path, config, tensors))
    assert_same(loaded, made.expected())
    assert loaded.head is None


def test_same_vocabulary_needs_no_map(tmp_path: Path) -> None:
    """Fault: a map asked of a drafter that knows every token."""
    made = Made.random(draft_vocab_size=128)
    config, tensors = writing.specforge(made)
    tensors = {k: t for k, t in tensors.items() if k not in ("d2t", "t2d")}
    for size in (128, None):
        config["draft_vocab_size"] = size
        assert_same(load(write(tmp_path, config, tensors)), made.expected())


def test_short_drafter_reaches_as_far_as_its_target(tmp_path: Path) -> None:
    """Fault: a rotary table that ends before the context does."""
    config, tensors = writing.specforge(Made.random())
    config["max_position_embeddings"] = 16
    loaded = load(write(tmp_path, config, tensors))
    assert loaded.config.max_position == TARGET.max_position


def test_quantised_names_nothing_else(tmp_path: Path) -> None:
    """The config of a drafter is known without loading it, maps included."""
    made = Made.random()
    config, tensors = writing.specforge(made)
    found = drafter_config(write(tmp_path, config, tensors), TARGET)
    assert isinstance(found, DrafterConfig)
    assert found == made.network


def test_shipped_drafter_is_found_by_its_target(tmp_path: Path) -> None:
    """Fault: another model's drafter taken for this one's."""
    assert find_drafter(str(tmp_path), "anything") == tmp_path
    assert find_drafter("auto", "someone/another-model") is None
    for folder in SHIPPED:
        names = ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")
        places = {find_drafter("auto", name) for name in names}
        assert len(places) == 1
        assert all(place is None or place.name == folder for place in places)


def test_drafters_are_chosen_by_algorithm(tmp_path: Path) -> None:
    """Fault: a network loaded for an algorithm without weights; EAGLE-3 for STANDALONE."""
    shipped = find_drafter("auto", "smollm2")
    own = str(tmp_path)
    for algorithm in (None, "EAGLE3"):
        assert choose_drafter("auto", "smollm2", algorithm) == shipped
    assert choose_drafter("auto", "smollm2", "STANDALONE") is None
    for algorithm in (None, "EAGLE3", "STANDALONE"):
        assert choose_drafter(own, "smollm2", algorithm) == tmp_path
    for algorithm in ("NGRAM", "NONE"):
        assert choose_drafter(own, "smollm2", algorithm) is None
    assert choose_drafter(None, "smollm2", None) is None
