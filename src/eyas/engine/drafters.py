"""Which drafter an engine runs, and what must hold before it runs.

A network or a language model becomes a `Drafter` with a KV pool of its own over the target's page
table. What would fail, or read garbage, inside a cycle is refused here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from eyas.attention import paged_attention
from eyas.config import EngineConfig, SpeculationConfig, require
from eyas.cost import draft_pass
from eyas.errors import ConfigError
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape, DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.setting import Precision, Setting
from eyas.speculate.drafter import Drafter, NGramDrafter, NoDrafter
from eyas.speculate.eagle3 import Eagle3Drafter
from eyas.speculate.standalone import StandaloneDrafter

Network = Eagle3 | Decoder
"""What a drafter is made from: an EAGLE-3 network, or a small language model."""

ALIGNMENT = 16
"""The GPU's kernel reads so many 8-bit weights at once."""
LEAST_SAVED = 2**25
"""Bytes that a draft reads less in 8 bits, from which on that is more time than the launches take
that cut rows for 8-bit layers; on an H200 a drafter that saves 22 MB was 1 % slower with them."""


def make_drafter(
    drafter: Network | Drafter | None,
    target: Decoder,
    config: EngineConfig,
    speculation: SpeculationConfig,
    make_pool: Callable[[AttentionShape], KVPool],
) -> Drafter:
    """The drafter of `speculation.algorithm`; raises `ConfigError` for one that does not fit."""
    algorithm, rows = speculation.algorithm, config.max_running_requests + 1
    orders = config.deterministic != "off"
    if algorithm == "NONE":
        return NoDrafter()
    if algorithm == "NGRAM" and (drafter is None or isinstance(drafter, Network)):
        return NGramDrafter(speculation.num_steps)
    if isinstance(drafter, Eagle3):
        _check_algorithm("EAGLE3", speculation, "an EAGLE-3 network")
        _check_eagle3(drafter.config, target)
        _check_size(drafter.config, drafter.config.draft_vocab_size, config, speculation)
        pool = make_pool(drafter.config.attention_shape())
        quick = _quick(drafter, config, target.embed.weight)
        attention = paged_attention(pool, deterministic=orders)
        return Eagle3Drafter(drafter, target, pool, attention, speculation, rows, quick)
    if isinstance(drafter, Decoder):
        _check_algorithm("STANDALONE", speculation, "a language model")
        vocab = target.config.vocab_size
        _check_size(drafter.config, min(vocab, drafter.config.vocab_size), config, speculation)
        require(
            config.draft_weights != "int8",
            "draft_weights int8 with STANDALONE",
            "8-bit draft passes are made for EAGLE-3 networks",
            "use auto or full",
        )
        pool = make_pool(drafter.config.attention_shape())
        attention = paged_attention(pool, deterministic=orders)
        return StandaloneDrafter(drafter, vocab, pool, attention, speculation, rows)
    if drafter is not None:
        return drafter
    needs = {"EAGLE3": "a trained network", "STANDALONE": "a small model of the same tokenizer"}
    raise ConfigError(
        f"algorithm {algorithm} without a drafter",
        f"it needs {needs[algorithm]}",
        "give a drafter checkpoint, or algorithm NGRAM or NONE",
    )


def _check_algorithm(fitting: str, speculation: SpeculationConfig, what: str) -> None:
    require(
        speculation.algorithm == fitting,
        f"algorithm {speculation.algorithm} with a drafter that is {what}",
        f"such a drafter drafts with {fitting}",
        f"give algorithm {fitting}, or another drafter",
    )


def _check_eagle3(drafter: DrafterConfig, target: Decoder) -> None:
    """Whether the network was made for this target."""
    remedy = "give a drafter made for this target"
    for name in ("vocab_size", "hidden_size"):
        own = getattr(drafter, "target_" * (name == "hidden_size") + name)
        wanted = getattr(target.config, name)
        require(own == wanted, f"drafter for a target of {name} {own}", f"is {wanted} here", remedy)
    layers = drafter.aux_layers
    require(
        len(set(layers)) == len(layers) and 0 <= min(layers) <= max(layers) <= len(target.blocks),
        f"drafter reads boundaries {layers}",
        f"must be different ones in 0..{len(target.blocks)}",
        remedy,
    )
    require(
        drafter.fused or layers == (len(target.blocks),),
        f"drafter reads boundaries {layers} as they are",
        f"one that fuses no states reads the last, {len(target.blocks)}",
        remedy,
    )


def _check_size(
    drafter: DrafterConfig | ModelConfig,
    vocab_size: int,
    config: EngineConfig,
    speculation: SpeculationConfig,
) -> None:
    """Whether positions and vocabulary suffice."""
    require(
        drafter.max_position >= config.context_length,
        f"drafter of {drafter.max_position} positions",
        f"drafts up to context_length {config.context_length}",
        f"give context_length {drafter.max_position}",
    )
    require(
        speculation.eagle_topk <= vocab_size,
        f"eagle_topk={speculation.eagle_topk}",
        f"the drafter knows {vocab_size} tokens",
        "give a smaller topk",
    )


def _quick(drafter: Eagle3, config: EngineConfig, weight: torch.Tensor) -> Eagle3 | None:
    """The drafter with 8-bit weights, where it can draft faster."""
    rounds = drafts_rounded(config, drafter.config, weight.device, weight.dtype)
    require(
        rounds or config.draft_weights != "int8",
        f"draft_weights int8 in {weight.dtype} on {weight.device.type}",
        "8-bit draft passes are made for bfloat16 on a CPU, and for 16 bits on a GPU",
        "use auto or full",
    )
    return drafter.rounded() if rounds else None


def drafts_rounded(
    config: EngineConfig, drafter: DrafterConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether an EAGLE-3 network on `device` drafts with a copy in 8 bits."""
    if device.type == "cpu":
        able, gains = dtype == torch.bfloat16, True
    else:
        able = dtype in (torch.bfloat16, torch.float16) and drafter.hidden_size % ALIGNMENT == 0
        gains = _bytes(drafter, 16) - _bytes(drafter, 8) >= LEAST_SAVED
    return able and (config.draft_weights == "int8" or (config.draft_weights == "auto" and gains))


def _bytes(drafter: DrafterConfig, bits: float) -> float:
    """Weights that a draft reads, those that are the drafter's own in so many bits."""
    setting = Setting(precision=Precision(draft_bits=bits))
    return sum(op.weights * op.times for op in draft_pass(drafter, setting, 1))
