"""Write a drafter where other engines find it: SpecForge's format and speculators'.

Both hold the same tensors under other names and count auxiliary layers differently. What is
written here is read back by `speculate/checkpoints.py` to the same network. Files are written
aside and renamed, so that an interrupted export leaves the old ones whole.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas.config import require
from eyas.errors import ConfigError
from eyas.model_config import DrafterConfig, RopeConfig
from eyas.models.eagle3 import Eagle3

_SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
SPECULATORS_VERSION = "0.3.0"
"""Version of speculators whose config keys are written."""


def export_specforge(module: Eagle3, folder: Path, dtype: torch.dtype) -> None:
    """Write `module` in the format of SpecForge, which SGLang serves, weights in `dtype`.

    Layer ids are written as SGLang reads them: as outputs (boundary - 1) where the first is then
    1, as boundaries otherwise. Raises `ConfigError` for a first boundary of 1, which that rule
    cannot tell from an output.
    """
    config = _writable(module.config)
    if config.aux_layers[0] == 1:
        raise ConfigError(
            f"auxiliary boundaries {list(config.aux_layers)}",
            "a first id of 1 means the output of layer 1 in this format",
            "export in the format of speculators, or capture from boundary 2 on",
        )
    outputs = config.aux_layers[0] == 2
    record = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_settings(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - outputs for i in config.aux_layers],
            "use_aux_hidden_state": True,
        },
    }
    if config.target_hidden_size != config.hidden_size:
        record["target_hidden_size"] = config.target_hidden_size
    # SpecForge takes an explicit false for "no final norm": an absent key is the plain drafter
    record |= {name: True for name in _SWITCHES if getattr(config, name)}
    _write(folder, record, drafter_tensors(module, dtype))


def export_speculators(
    module: Eagle3,
    folder: Path,
    verifier_name: str,
    dtype: torch.dtype,
    speculative_tokens: int = 4,
) -> None:
    """Write `module` in the format of speculators, which vLLM serves, weights in `dtype`.

    `verifier_name` is the target's hub id or path, `speculative_tokens` the chain length proposed
    to the server. Layer ids are boundaries.
    """
    config = _writable(module.config)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    record = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier_name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": _layer_settings(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": _name(dtype),
    }
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in drafter_tensors(module, dtype).items()
    }
    _write(folder, record, tensors)


def drafter_tensors(module: Eagle3, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of a drafter under SpecForge's names, on the CPU, weights in `dtype`.

    With d2t int64[Vd], offsets from draft id to target id, and t2d bool[V], the kept target ids.
    """
    tensors = {
        name: place.give().to("cpu", dtype).contiguous().clone()
        for name, place in module.places().items()
    }
    ids = module.target_ids.cpu()
    kept = torch.zeros(module.config.vocab_size, dtype=torch.bool)
    kept[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": kept}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _writable(config: DrafterConfig) -> DrafterConfig:
    """`config`, if it has no switch that is read from checkpoints and never trained."""
    written = {"rms_norm_eps", "rope", "own_embedding", *_SWITCHES}
    for field in dataclasses.fields(config):
        plain = field.default is dataclasses.MISSING or field.name in written
        require(
            plain or getattr(config, field.name) == field.default,
            f"a drafter with {field.name}={getattr(config, field.name)!r}",
            "only drafters as `eyas train` makes them are written",
            "keep its own checkpoint",
        )
    return config


def _layer_settings(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The draft layer's sizes in the keys of a transformers Llama config."""
    scaling = _rope_scaling(config.rope)
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope.theta,
            **(scaling or {"rope_type": "default"}),
        },
        "torch_dtype": _name(dtype),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    if rope.kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_max_position,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        given = ("mscale", "mscale_all_dim", "attention_factor")
        scaling |= {name: getattr(rope, name) for name in given if getattr(rope, name)}
    return scaling


def _write(folder: Path, record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / ".model.partial", folder / ".config.partial"
    save_file(tensors, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    weights.replace(folder / "model.safetensors")
    config.replace(folder / "config.json")
