"""What readers of architectures' configs share: dimensions, rotary embedding, refusals.

A config is the dict of a checkpoint's `config.json` (`checkpoint.read_config`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eyas.config import MAX_NODES
from eyas.errors import CheckpointError
from eyas.model_config import RopeConfig
from eyas.quantised import quantization_config, scheme_of

WINDOW = 4096
"""transformers' `sliding_window` where a config has none."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1),
}
"""Config keys that change the arithmetic -> the values that are implemented."""

_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, *_OPTIONAL),
}
"""Kind of rope scaling -> its keys in a config."""


_MOST = {
    "num_hidden_layers": 2**12,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
}
"""Keys that are counts of layers or experts -> what they stay below."""


@contextmanager
def understood(what: str = "config.json") -> Iterator[None]:
    """Around the reading of a config: a value of a kind that nobody expects is refused in words."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as e:
        raise CheckpointError(
            what, f"cannot be understood ({e})", "download it again, or mend it"
        ) from e


def refuse_unknown_arithmetic(config: dict[str, Any]) -> None:
    """Raise `CheckpointError` for a value in `config` that asks for other arithmetic than ours."""
    refuse_others(config, _FIXED)
    quantization = quantization_config(config)
    if quantization is not None:
        scheme_of(quantization)


def refuse_others(config: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raise `CheckpointError` for a key of `config` with a value that `allowed` does not list.

    The first value of each list is what an absent key means.
    """
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise CheckpointError(
                f"{key}={value!r}",
                "would change the arithmetic and is not implemented",
                f"use a checkpoint with {key}={values[-1]!r}",
            )


def dimension(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer `config[key]`, or `default`; raises `CheckpointError` without either.

    Numbers that no network has are refused too: nothing must be built or counted by them.
    """
    value = config.get(key)
    value = default if value is None else value
    most = _MOST.get(key, 2**31)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < most:
        raise CheckpointError(
            f"config.json: {key}={value!r}",
            f"must be a positive integer below {most}",
            "mend config.json",
        )
    return value


def rope_config(config: dict[str, Any]) -> RopeConfig:
    """Rotary embedding of a config with `rope_parameters`, or `rope_theta` and `rope_scaling`.

    The first is transformers 5's form, the second the older one; a config with both must mean the
    same. Raises `CheckpointError` for rope types other than default, linear, llama3 and yarn.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise CheckpointError(
            f"rope scaling {scaling!r}", "must be one flat object", "use a plain Llama checkpoint"
        )
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if config.get("rope_theta") not in (None, theta):
        raise CheckpointError(
            f"rope_theta={config['rope_theta']!r} beside rope_parameters with {theta!r}",
            "must agree",
            "mend config.json",
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _SCALINGS or scaling.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(
            f"rope scaling {scaling!r}",
            f"only {', '.join(_SCALINGS)} over whole heads are implemented",
            "use a checkpoint with one of these",
        )
    if kind == "yarn":
        longest = config.get(_ORIGINAL)
        longest = longest or scaling.get(_ORIGINAL) or config.get("max_position_embeddings")
        scaling = {**scaling, _ORIGINAL: longest}
    values: dict[str, Any] = {}
    for key in _SCALINGS[kind]:
        value = scaling.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if isinstance(value, bool) != (key == "truncate") or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"rope scaling {kind} with {key}={value!r}", "needs a number", "mend config.json"
            )
        values["original_max_position" if key == _ORIGINAL else key] = value
    return RopeConfig(theta=float(theta), kind=kind, **values)


def common_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` that every family's config spells alike.

    Absent keys take the defaults of transformers' `LlamaConfig` where these are no dimensions of
    a weight. Raises `CheckpointError` for a dimension that is missing or no positive integer.
    """
    hidden, heads = dimension(config, "hidden_size"), dimension(config, "num_attention_heads")
    eos = config.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return {
        "vocab_size": dimension(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": dimension(config, "intermediate_size"),
        "num_layers": dimension(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": dimension(config, "num_key_value_heads", heads),
        "head_dim": dimension(config, "head_dim", hidden // heads),
        "max_position": dimension(config, "max_position_embeddings", 2048),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_config(config),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "eos_token_ids": tuple(eos),
    }


def windows(config: dict[str, Any], sliding: list[bool]) -> tuple[int, ...]:
    """`ModelConfig.windows`: `sliding_window` in the layers marked in `sliding`, empty for none.

    Raises `CheckpointError` for a window that a draft tree may be larger than: a node sees its
    ancestors, however far they lie.
    """
    if not any(sliding):
        return ()
    size = dimension(config, "sliding_window", WINDOW)
    if size < MAX_NODES:
        raise CheckpointError(
            f"sliding_window={size}",
            f"must hold the {MAX_NODES} nodes of the largest draft tree",
            "use a checkpoint with a wider window",
        )
    return tuple(size if slides else 0 for slides in sliding)
