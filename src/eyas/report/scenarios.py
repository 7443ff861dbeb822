"""From the flags of `eyas plan` to a scenario: configs are read, never weights of a target."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from eyas.checkpoint import read_config, resolve
from eyas.config import EngineConfig, SpeculationConfig, require
from eyas.engine.drafters import drafts_rounded
from eyas.estimate import ENGINES, EYAS, Scenario
from eyas.hardware import HardwareProfile, load_profile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.dummy import dummy_drafter_config
from eyas.models.families import model_config
from eyas.report.options import PlanConfig
from eyas.setting import Precision, Setting
from eyas.speculate.checkpoints import drafter_config, find_drafter
from eyas.speculate.eagle3 import is_few
from eyas.speculate.simulate import rates_for

RATE = 0.6
"""Acceptance of every position where nothing is said."""
USUAL, LATENT, NONE = "usual", "latent", "none"


def scenario_of(
    model: str, drafter: str, speculation: SpeculationConfig | None, config: PlanConfig
) -> Scenario:
    """What the flags ask for; raises `ConfigError` and `CheckpointError`."""
    spec = _speculation(speculation, config, drafter)
    target, profile = read_target(model), load_profile(config.profile)
    network = read_drafter(drafter, target, model) if spec.algorithm in _NETWORKS else None
    usual = partial(usual_draft_bits, config.engine, network, profile)
    draft_bits = config.draft_bits or usual(config.batch_size * spec.eagle_topk)
    extend_bits = config.draft_bits or usual(config.batch_size * (spec.num_steps + 1))
    setting = Setting(
        ranks=config.tp,
        batch=config.batch_size,
        context=config.context,
        precision=Precision(
            weight_bits=config.weight_bits,
            expert_bits=config.expert_bits,
            kv_bits=config.kv_bits,
            draft_bits=draft_bits,
            extend_bits=extend_bits,
        ),
        expert_overlap=config.expert_overlap,
        sharded_drafter=config.sharded_drafter,
    )
    software = dataclasses.replace(
        ENGINES[config.engine],
        all_reduce=config.all_reduce,
        prefill_attention=spec.attention_mode == "prefill",
    )
    return Scenario(
        target=target,
        drafter=network,
        speculation=spec,
        setting=setting,
        profile=profile,
        software=software,
        rates=_rates(config, spec),
    )


_NETWORKS = ("EAGLE3", "STANDALONE")


def usual_draft_bits(
    engine: str, drafter: DrafterConfig | ModelConfig | None, profile: HardwareProfile, rows: int
) -> float:
    """Bits of the weights that `engine` drafts with in passes of `rows`, 16-bit types taken."""
    if engine != EYAS.name or not isinstance(drafter, DrafterConfig):
        return 16.0
    device = torch.device("cuda" if profile.eager_us else "cpu")
    rounded = drafts_rounded(EngineConfig(), drafter, device, torch.bfloat16)
    return 8.0 if rounded and is_few(rows, device.type) else 16.0


def read_target(model: str) -> ModelConfig:
    """The config of a target by its name."""
    return model_config(read_config(resolve(model)))


def read_drafter(
    drafter: str, target: ModelConfig, model: str = ""
) -> DrafterConfig | ModelConfig | None:
    """The config of a drafter: usual, latent, none, auto, a shape, or a checkpoint.

    `usual` is EAGLE-3's one layer with 32,000 tokens; `latent` has the target's latent attention
    and all its tokens, as published for Kimi-K2; `auto` is the one shipped for `model`, or usual.
    """
    if drafter == NONE:
        return None
    usual = dummy_drafter_config(target)
    if drafter == LATENT:
        require(
            target.mla is not None,
            "drafter 'latent'",
            "the target has no latent attention",
            "use usual",
        )
        return dataclasses.replace(
            usual,
            mla=target.mla,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            draft_vocab_size=target.vocab_size,
        )
    if drafter == USUAL:
        return usual
    if drafter.startswith("shape:"):
        return read_target(drafter)
    place = find_drafter(drafter, model)
    return usual if place is None else drafter_config(place, target)


def _speculation(
    given: SpeculationConfig | None, config: PlanConfig, drafter: str
) -> SpeculationConfig:
    require(
        not (given and config.nodes),
        f"nodes={config.nodes} with --speculative flags",
        "one of them says how many rows are verified",
        "give one",
    )
    if given is not None:
        return given
    if drafter == NONE or config.nodes == 1:
        return SpeculationConfig(algorithm="NONE")
    algorithm = "STANDALONE" if drafter.startswith("shape:") else "EAGLE3"
    return SpeculationConfig.chain((config.nodes or 4) - 1, algorithm)


def _rates(config: PlanConfig, spec: SpeculationConfig) -> tuple[float, ...]:
    """Acceptance by position of a chain; a given length is one rate that leads to it."""
    if config.acceptance:
        return config.acceptance
    if not config.accept_length:
        return (RATE,)
    require(
        config.accept_length <= spec.depth + 1,
        f"accept_length={config.accept_length}",
        f"a cycle of depth {spec.depth} commits {spec.depth + 1} tokens at most",
        "give a smaller length or more steps",
    )
    return rates_for(config.accept_length, spec.depth)[:1] or (0.0,)
