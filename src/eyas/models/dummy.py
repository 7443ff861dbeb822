"""Networks with random weights of any shape: for timing where the right weights are not at hand.

Values are drawn on the device: normal with a deviation that keeps activations finite, ones for
norms. What such a network writes means nothing.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from eyas.distributed.group import SOLO, Group
from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import allocate, settle

DEVIATION = 0.02
DRAFT_VOCAB = 32_000
"""Draft tokens of a made-up drafter: EAGLE-3's usual number."""
HEAD_DIM = 128
Network = TypeVar("Network", Decoder, Eagle3)


def dummy_target(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = SOLO,
    deterministic: bool = False,
) -> Decoder:
    """A target of `config`, this rank's share, with the same values for the same rank."""
    tile = row_tile(device, dtype, deterministic)
    return _filled(Decoder(config, tile, group), dtype, device, group.rank)


def dummy_drafter_config(target: ModelConfig) -> DrafterConfig:
    """A one-layer Llama-style EAGLE-3 drafter as they are published for such a target."""
    hidden, layers = target.hidden_size, target.num_layers
    heads = (target.num_heads, target.num_kv_heads, target.head_dim)
    if target.mla is not None:
        heads = (max(1, hidden // HEAD_DIM),) * 2 + (min(HEAD_DIM, hidden),)
    deep = layers >= 7
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=min(DRAFT_VOCAB, target.vocab_size),
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=target.intermediate_size,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_position=target.max_position,
        aux_layers=target.default_aux_layers() if deep else (0, layers // 2, layers),
        rms_norm_eps=target.rms_norm_eps,
    )


def dummy_drafter(config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> Eagle3:
    """A drafter of `config`."""
    module = _filled(Eagle3(config, row_tile(device, dtype)), dtype, device, 1)
    step = config.vocab_size // config.draft_vocab_size
    module.target_ids = torch.arange(config.draft_vocab_size, device=device) * step
    return module


def _filled(module: Network, dtype: torch.dtype, device: torch.device, seed: int) -> Network:
    allocate(module, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, DEVIATION, generator=generator)
        if parameter.dtype != dtype:  # routers' float32 holds 16 bits in checkpoints
            parameter.data.copy_(parameter.data.to(dtype))
    settle(module)
    return module.eval()
