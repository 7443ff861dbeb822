"""Random drafters written by hand in every format, and what a drafter says about a text.

Nothing here goes through the exporters: configs and names are those that each project's own tools
write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import allocate, fill
from tests.eagle3_reference import causal_attend
from tests.helpers import CPU

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
)
"""What the drafters here are made for."""


def network_config(**changes: Any) -> DrafterConfig:
    """A drafter with 40 of the 128 target ids, reading boundaries 2, 4 and 5."""
    values: Config = {
        "vocab_size": 128,
        "draft_vocab_size": 40,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 512,
        "aux_layers": (2, 4, 5),
        "rms_norm_eps": 1e-5,
    }
    return DrafterConfig(**{**values, **changes})


@dataclass(frozen=True)
class Made:
    """A random drafter: what its config means, and its tensors under EAGLE's names."""

    network: DrafterConfig
    tensors: Tensors
    ids: torch.Tensor

    @classmethod
    def random(cls, seed: int = 0, **changes: Any) -> Made:
        """Weights of a seed, the map as offsets, and the mask of kept ids."""
        config = network_config(**changes)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, place in Eagle3(config).places().items():
            values = torch.randn(place.shape, generator=generator) * 0.2
            tensors[name] = 1 + values if len(place.shape) == 1 else values
        order = torch.randperm(config.vocab_size, generator=generator)
        ids = order[: config.draft_vocab_size].sort().values
        kept = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
        return cls(config, tensors, ids)

    def expected(self) -> Eagle3:
        """The network, filled by name without a loader."""
        module = Eagle3(self.network, row_tile(CPU, torch.float32))
        allocate(module, torch.float32, CPU)
        weights = {k: t for k, t in self.tensors.items() if k not in ("d2t", "t2d")}
        fill(module.places(), weights.items())
        module.target_ids = self.ids
        return module.eval()


def write(folder: Path, config: Config, tensors: Tensors, pickled: bool = False) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return folder


def layer_config(network: DrafterConfig) -> Config:
    """Keys of a transformers config that all formats share."""
    return {
        "hidden_act": "silu",
        "hidden_size": network.hidden_size,
        "intermediate_size": network.intermediate_size,
        "num_hidden_layers": network.num_layers,
        "num_attention_heads": network.num_heads,
        "num_key_value_heads": network.num_kv_heads,
        "max_position_embeddings": network.max_position,
        "rms_norm_eps": network.rms_norm_eps,
        "vocab_size": network.vocab_size,
    }


def eagle(made: Made) -> tuple[Config, Tensors]:
    """The EAGLE authors': no layer ids, no head_dim, no rope."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "float16"}
    sizes = {"draft_vocab_size": made.network.draft_vocab_size}
    return {**layer_config(made.network), **config, **ends, **sizes}, made.tensors


def specforge(made: Made) -> tuple[Config, Tensors]:
    """SpecForge's and SGLang's: ids count outputs."""
    config = layer_config(made.network) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "head_dim": made.network.head_dim,
        "draft_vocab_size": made.network.draft_vocab_size,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True},
    }
    return config, made.tensors


def speculators(made: Made) -> tuple[Config, Tensors]:
    """Speculators': a nested config, the embedding kept, ids count boundaries."""
    inner = layer_config(made.network) | {"model_type": "llama", "head_dim": made.network.head_dim}
    # to_diff_dict leaves out what LlamaConfig defaults to
    inner = {k: v for k, v in inner.items() if k not in ("hidden_act", "rms_norm_eps")}
    inner["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    if made.network.rms_norm_eps != 1e-6:
        inner["rms_norm_eps"] = made.network.rms_norm_eps
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
        },
        "transformer_layer_config": inner,
        "draft_vocab_size": made.network.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        IDS: [2, 4, 5],
    }
    return config, layers_named(made.tensors) | {"embed_tokens.weight": LENT_EMBEDDING}


def modelopt(made: Made) -> tuple[Config, Tensors]:
    """ModelOpt's: no mask of kept ids, switches of its own."""
    config = layer_config(made.network) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": made.network.head_dim,
        "draft_vocab_size": made.network.draft_vocab_size,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000},
        "rope_theta": 10000,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_config": {
            IDS: [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }
    tensors = layers_named(made.tensors)
    return config, {k: t for k, t in tensors.items() if k != "t2d"}


def vllm_export(made: Made) -> tuple[Config, Tensors]:
    """What converters write for vLLM: layers.0 names, ids count boundaries."""
    config, _ = specforge(made)
    config["eagle_config"] = {IDS: [2, 4, 5]}
    return config, layers_named(made.tensors)


def layers_named(tensors: Tensors) -> Tensors:
    """The tensors with `layers.0` for `midlayer`."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def latent(made: Made) -> tuple[Config, Tensors]:
    """A Kimi-like drafter with latent attention, as trained; ids count outputs."""
    mla = made.network.mla
    assert mla is not None
    config = layer_config(made.network) | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "draft_vocab_size": made.network.draft_vocab_size,
        "num_key_value_heads": made.network.num_heads,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True},
    }
    rope = made.network.rope
    config["rope_theta"] = rope.theta
    config["rope_scaling"] = {
        "type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    return config, made.tensors


def latent_export(made: Made) -> tuple[Config, Tensors]:
    """The same as converters write it for vLLM."""
    config, tensors = latent(made)
    config["architectures"] = ["Eagle3DeepseekV3ForCausalLM"]
    config["eagle_config"] = {IDS: [2, 4, 5]}
    return config, layers_named(tensors)


Format = Callable[[Made], tuple[Config, Tensors]]
FORMATS: dict[str, Format] = {
    "eagle": eagle,
    "specforge": specforge,
    "speculators": speculators,
    "modelopt": modelopt,
    "vllm": vllm_export,
}

_GENERATOR = torch.Generator().manual_seed(11)
LENT_EMBEDDING = torch.randn(128, 32, generator=_GENERATOR)
LENT_HEAD = torch.randn(128, 32, generator=_GENERATOR)


@torch.inference_mode()
def opinion(network: Eagle3, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits of a random text's rows and of a step that goes on from the state fed back.

    The target's embedding and head are lent where the drafter has none.
    """
    generator = torch.Generator().manual_seed(3)
    config = network.config
    tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
    width = len(config.aux_layers) * config.target_hidden_size
    aux = torch.randn(length, width, generator=generator)
    table = LENT_EMBEDDING if network.embed is None else network.embed.weight
    attend = causal_attend(config.attention_shape())

    def head(x: torch.Tensor) -> torch.Tensor:
        return x @ LENT_HEAD.mT

    positions = torch.arange(length)
    normed, fed_back = network(table[tokens], network.fuse(aux), positions, attend)
    again, _ = network(table[tokens], fed_back, positions + 1, attend)
    return network.score(normed, head), network.score(again, head)
