"""The drafter network against its plain float64 writing, switch by switch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from eyas.model_config import RopeConfig
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
    network: Eagle3, tokens: list[int], aux: torch.Tensor, embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits and fed-back states of rows 0 .. n - 1 in one pass."""
    table = embedding if network.embed is None else network.embed.weight
    embeds = table[torch.tensor(tokens[1:])]
    normed, fed_back = network(embeds, network.fuse(aux), torch.arange(len(aux)), causal_attend)
    return network.score(normed), fed_back


@pytest.mark.parametrize("switches", list(itertools.product((False, True), repeat=4)), ids=str)
def test_network_equals_its_plain_writing(switches: tuple[bool, ...]) -> None:
    """Fault: residual missing before the output norm (v PR#14464), halves of q/k/v exchanged."""
    changes: dict[str, Any] = dict(zip(SWITCHES, switches, strict=True))
    network = tiny_drafter(**changes)
    tokens, aux, embedding = inputs(network)
    logits, fed_back = run_ours(network, tokens, aux, embedding)
    plain = PlainEagle3(network, embedding)
    plain_logits, plain_fed_back = plain.score(plain.read(tokens, aux))
    assert torch.allclose(logits[-1].double(), plain_logits, atol=1e-4)
    assert torch.allclose(fed_back[-1].double(), plain_fed_back, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"aux_layers": (2,)},
        {"aux_layers": (0, 1, 2, 3)},
        {"target_hidden_size": 128, "own_embedding": True},
        {"rope": RopeConfig(theta=1e6)},
        {"num_kv_heads": 4},
        {"rms_norm_eps": 1e-2},
        {"draft_vocab_size": 64},
    ],
    ids=str,
)
def test_dimensions_are_honoured(changes: dict[str, Any]) -> None:
    """Fault: a width, base or number of captured layers taken for granted."""
    network = tiny_drafter(**changes)
    tokens, aux, embedding = inputs(network)
    logits, fed_back = run_ours(network, tokens, aux, embedding)
    plain = PlainEagle3(network, embedding)
    plain_logits, plain_fed_back = plain.score(plain.read(tokens, aux))
    assert torch.allclose(logits[-1].double(), plain_logits, atol=1e-4)
    assert torch.allclose(fed_back[-1].double(), plain_fed_back, atol=1e-4)


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
