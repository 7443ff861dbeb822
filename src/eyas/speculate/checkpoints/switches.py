"""From a drafter's flat config and its tensors to `DrafterConfig`.

A config says what its format's readers ask it; biases, norms of heads and borrowed tensors are told
by the tensors themselves. A switch of another network is refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eyas.config import DrafterOptions
from eyas.model_config import DrafterConfig, ModelConfig, RopeConfig
from eyas.models.families.deepseek import mla_config
from eyas.models.families.reading import (
    dimension,
    refuse_unknown_arithmetic,
    rope_config,
    windows,
)
from eyas.speculate.checkpoints.formats import Format, Tensors, refuse

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_OTHERS: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (None, True),
    "use_mtp_layernorm": (None, False),
    "eh_proj_before_attn": (None, False),
    "is_causal": (None, True),
}
"""Switches of other networks -> the values that this one implements."""

_PARALLEL: dict[str, tuple[Any, ...]] = {
    "parallel_drafting": (None, False),
    "parallel_draft_step": (None, 0, 1),
    "mask_hidden": (None, False),
}
"""Switches of parallel drafting -> the values that mean none."""


def read_switches(
    settings: dict[str, Any],
    form: Format,
    tensors: Tensors,
    target: ModelConfig,
    options: DrafterOptions,
) -> DrafterConfig:
    """The network of a flat config and tensors under network names, as `options` would have it.

    Raises `CheckpointError` for a network that is not implemented, or one of another target.
    """
    _refuse_other_networks(settings, tensors)
    num_layers = _num_layers(settings, tensors)
    fused = settings.get("use_aux_hidden_state") is not False
    hidden, heads = dimension(settings, "hidden_size"), dimension(settings, "num_attention_heads")
    vocab = dimension(settings, "vocab_size")
    longest = dimension(settings, "max_position_embeddings", 2048)
    rope = _rope(settings, options)
    drafter = dict(
        vocab_size=vocab,
        draft_vocab_size=dimension(settings, "draft_vocab_size", vocab),
        hidden_size=hidden,
        target_hidden_size=dimension(settings, "target_hidden_size", hidden),
        intermediate_size=dimension(settings, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=dimension(settings, "num_key_value_heads", heads),
        head_dim=dimension(settings, "head_dim", hidden // heads),
        # a drafter trained short still runs as far as its target: its rotary table must reach
        max_position=max(longest, target.max_position),
        aux_layers=_aux_layers(settings, form, target, options, fused),
        num_layers=num_layers,
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        rope=rope,
        fused=fused,
        fc_norm=bool(settings.get("fc_norm") or settings.get("use_aux_norm")),
        norm_before_fc=bool(settings.get("norm_before_fc")),
        norm_before_residual=bool(settings.get("norm_before_residual")),
        norm_output=_norm_output(settings, options),
        logit_scale=float(settings.get("logit_scale") or 1.0),
        windows=_windows(settings, num_layers),
        **_by_tensors(settings, tensors),
    )
    _check_target(drafter, target)
    _check_borrowed(drafter, settings, target)
    _check_fusion(drafter, tensors)
    return DrafterConfig(**(drafter | _latent(settings, tensors, rope)))


def _refuse_other_networks(settings: dict[str, Any], tensors: Tensors) -> None:
    plain = {key: value for key, value in settings.items() if key != "logit_scale"}
    refuse_unknown_arithmetic({"hidden_act": "silu", **plain})
    for key, allowed in _PARALLEL.items():
        if settings.get(key) not in allowed:
            refuse(f"{key}={settings[key]!r}", "is of parallel drafting (P-EAGLE), another network")
    for name in tensors:
        if name == "mask_hidden" or name.startswith("parallel_draft_heads."):
            refuse(f"tensor {name!r}", "is of parallel drafting (P-EAGLE), another network")
    for key, allowed in _OTHERS.items():
        if settings.get(key) not in allowed:
            refuse(f"{key}={settings[key]!r}", "is another network, which is not implemented")


def _num_layers(settings: dict[str, Any], tensors: Tensors) -> int:
    """Draft layers, counted by their tensors; the config must say the same."""
    later = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    found = 1 + len(later)
    said = settings.get("num_hidden_layers")
    if said not in (None, found):
        refuse(f"num_hidden_layers={said!r}", f"tensors of {found} draft layers were found")
    if found > 1 and settings.get("next_layer_regular") is False:
        refuse("next_layer_regular=False", "later layers that read embeddings are not implemented")
    return found


def _rope(settings: dict[str, Any], options: DrafterOptions) -> RopeConfig:
    """The rotary embedding; a base given by the user replaces the checkpoint's."""
    if not options.rope_theta:
        return rope_config(settings)
    given: dict[str, Any] = {"rope_theta": options.rope_theta}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(key), dict):
            given[key] = settings[key] | {"rope_theta": options.rope_theta}
    return rope_config(settings | given)


def _norm_output(settings: dict[str, Any], options: DrafterOptions) -> bool:
    """Whether the normed state is fed back; TensorRT-LLM's switch means the same."""
    if options.feedback != "auto":
        return options.feedback == "post"
    return bool(settings.get("norm_output") or settings.get("return_hidden_post_norm"))


def _windows(settings: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Sliding windows by `layer_types`, as vLLM reads a drafter's config."""
    types = settings.get("layer_types")
    if types is None:
        window, wanted = settings.get("sliding_window"), settings.get("use_sliding_window", True)
        if window is not None and wanted:
            refuse(f"sliding_window={window!r}", "without layer_types: readers differ over it")
        return ()
    kinds = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or not all(kind in kinds for kind in types):
        refuse(f"layer_types={types!r}", f"must be a list of {', '.join(kinds)}")
    if len(types) < num_layers:
        refuse(f"layer_types={types!r}", f"must name the kind of all {num_layers} layers")
    return windows(settings, [kinds[kind] for kind in types[:num_layers]])


def _aux_layers(
    settings: dict[str, Any],
    form: Format,
    target: ModelConfig,
    options: DrafterOptions,
    fused: bool,
) -> tuple[int, ...]:
    """Captured boundaries, whichever way the checkpoint counts them."""
    if not fused:
        if options.aux_layers:
            refuse(
                f"aux_layers {list(options.aux_layers)}", "it reads the target's last state alone"
            )
        return (target.num_layers,)
    layers = options.aux_layers or _layers_of(settings, form, target)
    if not all(0 <= i <= target.num_layers for i in layers) or len(set(layers)) < len(layers):
        refuse(
            f"auxiliary layers {list(layers)}",
            f"must be different boundaries within 0..{target.num_layers} of the target",
            "use a drafter of this target, or give its aux_layers",
        )
    count = settings.get("num_aux_hidden_states")
    if count not in (None, len(layers)):
        refuse(
            f"num_aux_hidden_states={count!r}",
            f"its layer ids are {len(layers)}",
            "give its aux_layers, or mend config.json",
        )
    return layers


def _layers_of(settings: dict[str, Any], form: Format, target: ModelConfig) -> tuple[int, ...]:
    """The checkpoint's own layer ids as boundaries.

    Speculators counts boundaries. The others may count outputs (boundary - 1); as in SGLang, ids
    whose first is 1 are read so. Absent ids are EAGLE's: inputs of layers 2, L/2, L-3.
    """
    ids = settings.get(_LAYER_IDS)
    if ids is None or ids == []:
        return target.default_aux_layers()
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        refuse(f"{_LAYER_IDS}={ids!r}", "must be a list of layer ids")
    outputs = form is not Format.SPECULATORS and ids[0] == 1
    return tuple(i + outputs for i in ids)


def _by_tensors(settings: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """What the tensors show; a switch of the config without its tensors is refused."""
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    found = {
        "fc_bias": "fc.bias" in tensors,
        "qkv_bias": f"{attention}.q_proj.bias" in tensors,
        "o_bias": f"{attention}.o_proj.bias" in tensors,
        "mlp_bias": f"{mlp}.gate_proj.bias" in tensors,
        "qk_norm": f"{attention}.q_norm.weight" in tensors,
        "last_norm": "norm.weight" in tensors or settings.get("use_last_layernorm") is not False,
        "own_embedding": "embed_tokens.weight" in tensors,
        "own_head": "lm_head.weight" in tensors,
    }
    for switch, kind in (("attention_bias", "qkv_bias"), ("mlp_bias", "mlp_bias")):
        if settings.get(switch) and not found[kind]:
            refuse(f"{switch}={settings[switch]!r}", "has no tensors of biases")
    # a drafter of Qwen3's layers without its norms is refused when tensors are counted
    found["qk_norm"] = found["qk_norm"] or settings.get("model_type") == "qwen3"
    return found


def _latent(settings: dict[str, Any], tensors: Tensors, rope: RopeConfig) -> dict[str, Any]:
    """Latent attention, if the tensors are of it.

    The norms inside have the network's epsilon, as in the trainers and servers of such drafters.
    """
    if "midlayer.self_attn.kv_a_proj_with_mqa.weight" not in tensors:
        return {}
    interleaved = settings.get("rope_interleave") is not False
    mla = mla_config(settings, rope, interleaved)
    eps = float(settings.get("rms_norm_eps", 1e-6))
    heads = dimension(settings, "num_attention_heads")
    sizes = {"num_kv_heads": heads, "head_dim": mla.nope_dim + mla.rope_dim}
    return {"mla": dataclasses.replace(mla, norm_eps=eps), **sizes}


def _check_target(drafter: dict[str, Any], target: ModelConfig) -> None:
    if drafter["target_hidden_size"] != target.hidden_size:
        refuse(
            f"made for a target of hidden size {drafter['target_hidden_size']}",
            f"the target has {target.hidden_size}",
        )
    if drafter["vocab_size"] != target.vocab_size:
        refuse(
            f"made for a target of {drafter['vocab_size']} tokens",
            f"the target's vocabulary has {target.vocab_size}",
        )


def _check_borrowed(drafter: dict[str, Any], settings: dict[str, Any], target: ModelConfig) -> None:
    """Whether the target can lend what has no tensor."""
    narrow = drafter["hidden_size"] != target.hidden_size
    for name, owned in (("embed_tokens", "own_embedding"), ("lm_head", "own_head")):
        if narrow and not drafter[owned]:
            refuse(
                f"tensor '{name}.weight' missing with hidden size {drafter['hidden_size']}",
                f"only a drafter of hidden size {target.hidden_size} can borrow the target's",
            )
    if narrow and not drafter["fused"]:
        refuse(
            f"use_aux_hidden_state=False with hidden size {drafter['hidden_size']}",
            f"it reads the target's state of {target.hidden_size} as it is",
        )
    if drafter["own_head"]:
        return
    if drafter["draft_vocab_size"] != target.vocab_size:
        refuse(
            "tensor 'lm_head.weight' missing",
            f"the target's scores {target.vocab_size} tokens, "
            f"the drafter knows {drafter['draft_vocab_size']}",
        )
    tied = settings.get("tie_word_embeddings")
    if tied and (drafter["own_embedding"] or not target.tie_word_embeddings):
        refuse(
            "tensor 'lm_head.weight' missing with tie_word_embeddings",
            "a head that is an embedding can't be borrowed from this target",
        )


def _check_fusion(drafter: dict[str, Any], tensors: Tensors) -> None:
    count, size = len(drafter["aux_layers"]), drafter["target_hidden_size"]
    fc = tensors.get("fc.weight")
    if not drafter["fused"] or fc is None or fc.dim() != 2 or fc.shape[1] == count * size:
        return
    refuse(
        f"fc.weight reads {fc.shape[1]} numbers",
        f"{count} states of width {size} are {count * size}",
    )
