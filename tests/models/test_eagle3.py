"""The drafter network against its plain float64 writing, switch by switch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from eyas.errors import ConfigError
from eyas.layers.linear import Linear
from eyas.model_config import MLAConfig, RopeConfig
from eyas.models.eagle3 import Eagle3
from tests.eagle3_reference import PlainEagle3, causal_attend
from tests.helpers import tiny_drafter

SWITCHES = ("fc_norm", "norm_before_residual", "norm_output", "own_embedding")
LENGTH = 23


def inputs(network: Eagle3, length: int = LENGTH) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Tokens, target states, and a target embedding."""
    generator = torch.Generator().manual_seed(5)
    config = network.config
    tokens = torch.randint(0, config.vocab_size, (length + 1,), generator=generator).tolist()
    width = len(config.aux_layers) * config.target_hidden_size
    aux = torch.randn(length, width, generator=generator) * 3
    return tokens, aux, torch.randn(config.vocab_size, config.hidden_size, generator=generator)


@torch.inference_mode()
def run_ours(
    network: Eagle3,
    tokens: list[int],
    aux: torch.Tensor,
    embedding: torch.Tensor,
    head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits and fed-back states of rows 0 .. n - 1 in one pass."""
    table = embedding if network.embed is None else network.embed.weight
    embeds = table[torch.tensor(tokens[1:])]
    attend = causal_attend(network.config.attention_shape())
    normed, fed_back = network(embeds, network.fuse(aux), torch.arange(len(aux)), attend)
    return network.score(normed, None if head is None else lambda x: x @ head.mT), fed_back


def check(network: Eagle3) -> None:
    """Ours and the plain writing agree on a text, and on a step with the state it feeds back."""
    tokens, aux, embedding = inputs(network)
    generator = torch.Generator().manual_seed(6)
    head = torch.randn(network.config.vocab_size, network.config.hidden_size, generator=generator)
    logits, fed_back = run_ours(network, tokens, aux, embedding, head)
    plain = PlainEagle3(network, embedding, head)
    plain_logits, plain_fed_back = plain.score(plain.read(tokens, aux))
    assert torch.allclose(logits[-1].double(), plain_logits, atol=1e-4)
    assert torch.allclose(fed_back[-1].double(), plain_fed_back, atol=1e-4)
    assert plain_logits.std() > 0.1, "the drafter says something"


@pytest.mark.parametrize("switches", list(itertools.product((False, True), repeat=4)), ids=str)
def test_network_equals_its_plain_writing(switches: tuple[bool, ...]) -> None:
    """Fault: residual missing before the output norm (v PR#14464), halves of q/k/v exchanged."""
    changes: dict[str, Any] = dict(zip(SWITCHES, switches, strict=True))
    check(tiny_drafter(**changes))


MLA = MLAConfig(
    q_lora_rank=24, kv_lora_rank=32, nope_dim=16, rope_dim=8, value_dim=12, scale=24**-0.5
)
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position=16)
ONE_BY_ONE: list[dict[str, Any]] = [
    {"aux_layers": (2,)},
    {"aux_layers": (0, 1, 2, 3)},
    {"target_hidden_size": 128, "own_embedding": True},
    {"rope": RopeConfig(theta=1e6)},
    {"rope": RopeConfig(kind="linear", factor=4.0)},
    {"rope": RopeConfig(kind="llama3", factor=8.0, original_max_position=16)},
    {"rope": YARN},
    {"num_kv_heads": 4},
    {"head_dim": 32},
    {"rms_norm_eps": 1e-2},
    {"draft_vocab_size": 64},
    {"fc_norm": False, "norm_before_fc": True},
    {"fused": False, "fc_norm": False, "aux_layers": (4,)},
    {"fc_bias": True},
    {"last_norm": False},
    {"own_head": False, "draft_vocab_size": 64},
    {"logit_scale": 0.5},
    {"qkv_bias": True},
    {"o_bias": True, "mlp_bias": True},
    {"qk_norm": True},
    {"num_layers": 3},
    {"num_layers": 2, "qk_norm": True, "qkv_bias": True, "windows": (0, 5)},
    {"windows": (7,)},
    {"mla": MLA},
    {"mla": dataclasses.replace(MLA, q_lora_rank=0), "rope": YARN},
    {"mla": dataclasses.replace(MLA, interleaved=False, norm_eps=1e-2)},
]


@pytest.mark.parametrize("changes", ONE_BY_ONE, ids=str)
def test_dimensions_and_switches_are_honoured(changes: dict[str, Any]) -> None:
    """Fault: a width, base, bias, norm or number of captured layers taken for granted."""
    check(tiny_drafter(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"last_norm": False, "o_bias": True},
        {"mla": MLA},
        {"num_layers": 3},
    ],
    ids=str,
)
@torch.inference_mode()
def test_last_rows_alone_are_those_of_all(changes: dict[str, Any]) -> None:
    """Fault: another request's row, a residual before its norm, rows that are not padded alike."""
    network = tiny_drafter(**changes)
    tokens, aux, embedding = inputs(network, 24)
    table = embedding if network.embed is None else network.embed.weight
    given = (table[torch.tensor(tokens[1:])], network.fuse(aux), torch.arange(24))
    shape, counts = network.config.attention_shape(), torch.tensor([3, 8, 1])
    every = network(*given, causal_attend(shape))
    found = network.last(*given, causal_attend(shape), counts, network)
    for some, whole in zip(found, every, strict=True):
        assert torch.equal(some, whole[[2, 15, 16]])
    other = tiny_drafter(**changes)
    other.mlp.down.weight.detach().mul_(2)
    changed, _ = network.last(*given, causal_attend(shape), counts, other)
    assert torch.equal(changed, found[0]) == (network.config.num_layers > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True}, "fc_norm with norm_before_fc"),
        ({"own_head": False}, "without a head and 40 of 64 tokens"),
        ({"hidden_size": 32}, "of hidden size 32 for 64"),
        ({"mla": MLA, "num_layers": 2}, "2 layers with latent attention"),
    ],
    ids=str,
)
def test_impossible_networks_are_refused(changes: dict[str, Any], message: str) -> None:
    """Fault: a network that reads the wrong tensors, or fails inside a pass."""
    with pytest.raises(ConfigError, match=message):
        tiny_drafter(**changes)


@pytest.mark.parametrize("bias", [False, True])
def test_rounded_weights_are_nearly_the_same(bias: bool) -> None:
    """Fault: a bias, a later layer or a head that 8-bit weights leave out."""
    network = tiny_drafter(torch.bfloat16, qkv_bias=bias, fc_bias=bias, num_layers=2)
    tokens, aux, embedding = inputs(network)
    aux, embedding = aux.bfloat16(), embedding.bfloat16()
    full, _ = run_ours(network, tokens, aux, embedding)
    quick, _ = run_ours(network.rounded(), tokens, aux, embedding)
    assert not any(isinstance(m, Linear) for m in network.rounded().modules())
    assert (full - quick).float().std() < 0.1 * full.float().std()


def test_any_leading_rows_give_the_same_bits() -> None:
    """Fault: padding to the row tile leaks into results."""
    network = tiny_drafter()
    tokens, aux, embedding = inputs(network, 37)
    full, _ = run_ours(network, tokens, aux, embedding)
    for count in (1, 2, 3, 4, 5, 31, 36):
        part, fed_back = run_ours(network, tokens[: count + 1], aux[:count], embedding)
        assert fed_back.shape == (count, network.config.hidden_size)
        assert torch.allclose(part, full[:count], atol=1e-5)
        assert torch.equal(network.fuse(aux[:count]), network.fuse(aux)[:count])
        normed = torch.randn(37, network.config.hidden_size)
        assert torch.equal(network.score(normed[:count]), network.score(normed)[:count])


def test_places_are_eagles() -> None:
    """Fault: a tensor under another name. The names of EAGLE and SpecForge, all of them."""
    own = tiny_drafter(own_embedding=True)
    layer = "midlayer"
    expected = {"fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight"}
    expected |= {f"fc_norm.{i}.weight" for i in range(3)}
    expected |= {f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"}
    expected |= {f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    expected |= {f"{layer}.{n}.weight" for n in norms}
    assert set(own.places()) == expected
    plain = Eagle3(dataclasses.replace(own.config, own_embedding=False, fc_norm=False))
    missing = {"embed_tokens.weight", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert set(plain.places()) == expected - missing
    more = {"num_layers": 2, "qk_norm": True, "qkv_bias": True, "norm_before_fc": True}
    wide = Eagle3(dataclasses.replace(plain.config, **more))  # type: ignore[arg-type]
    second = {name.replace(layer, "layers.1") for name in expected if name.startswith(layer)}
    added = {f"{part}.self_attn.{n}_norm.weight" for part in (layer, "layers.1") for n in "qk"}
    added |= {f"{part}.self_attn.{n}_proj.bias" for part in (layer, "layers.1") for n in "qkv"}
    added |= {"input_norm.weight", *second} - {"layers.1.hidden_norm.weight"}
    assert set(wide.places()) == (expected - missing) | added
