"""GGUF file to Hugging Face folder, converted once and kept in a cache.

Reads through the gguf library, and through transformers for the tokenizer. Knows Llama's names in
both worlds and nothing else of networks. A folder in the cache is always whole: it is written
aside and renamed when finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file

from eyas.errors import CheckpointError

SHARD_BYTES = 2 << 30
"""Tensors of a converted file are written in shards of about this size, to bound memory."""
STALE_SECONDS = 24 * 3600
"""A partial folder this old was left by a killed process."""
_CONVERSION = "1"
_PIECE = 1 << 20

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DIGITS_THEN_GPT2 = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_SPLITTERS: dict[str, dict[str, Any] | None] = {
    "smollm": _DIGITS_THEN_GPT2,
    "default": None,
    "gpt-2": None,
    "llama-bpe": None,
    "llama3": None,
    "llama-v3": None,
    "falcon3": None,
    "smaug-bpe": None,
    "tekken": None,
}
"""`tokenizer.ggml.pre` -> the pre-tokenizer to write, or none where transformers' is right."""


def convert_gguf(path: Path, cache: Path) -> Path:
    """The Hugging Face folder made from the GGUF file `path`, in `cache`.

    Weights become float32 safetensors. A second call finds the folder by the file's size and
    content. Raises `CheckpointError` for unreadable files and other architectures than llama.
    """
    final = cache / f"{path.stem}-{_content_key(path)}"
    if final.is_dir():
        return final
    reader = _open_gguf(path)
    config = _gguf_config(path, reader)
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(".partial-*"):
        if time.time() - old.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        _write_weights(path, reader, config, partial)
        _write_tokenizer(path, reader, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        # Another process finished first: its folder holds the same files.
        if not final.is_dir():
            raise


def _content_key(path: Path) -> str:
    digest = hashlib.sha256(_CONVERSION.encode())
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for place in (0, size // 2, max(0, size - _PIECE)):
                file.seek(place)
                digest.update(file.read(_PIECE))
    except OSError as e:
        raise CheckpointError(
            str(path), f"cannot be read ({e.strerror})", "give the path of a GGUF file"
        ) from e
    return digest.hexdigest()[:16]


def _open_gguf(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as e:
        raise CheckpointError(
            str(path), f"is no complete GGUF file ({e})", "download the file again"
        ) from e


class _Metadata:
    """The key-value pairs of a GGUF file, and refusals that name them."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path, self._reader = path, reader

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise CheckpointError(
                f"{self.path}: metadata {key}", "is missing", "convert the model to GGUF again"
            )
        return found

    def only(self, key: str, allowed: tuple[Any, ...], rule: str) -> Any:
        """The value of `key`, the first of `allowed` if absent, refused if not in `allowed`."""
        found = self.get(key, allowed[0])
        if found not in allowed:
            raise CheckpointError(
                f"{self.path}: {key}={found!r}",
                rule,
                "use a Llama model, or its Hugging Face folder",
            )
        return found


def _gguf_rope(data: _Metadata) -> dict[str, Any]:
    theta = float(data.get("llama.rope.freq_base", 10000.0))
    key = "llama.rope.scaling.type"
    if data.only(key, ("none", "linear"), "only linear rope scaling is read") == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(data.need("llama.rope.scaling.factor"))
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _gguf_config(path: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    """A Llama config of the file's metadata, or the reason why there is none."""
    data = _Metadata(path, reader)
    data.need("general.architecture")
    data.only("general.architecture", ("llama",), "only the llama architecture is read")
    data.only("llama.expert_count", (0,), "mixtures of experts are not read")
    heads, hidden = data.need("llama.attention.head_count"), data.need("llama.embedding_length")
    head_dim = data.get("llama.attention.key_length", hidden // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        data.only(key, (head_dim,), f"must equal the head dimension {head_dim}")
    names = {tensor.name for tensor in reader.tensors}
    epsilon = data.need("llama.attention.layer_norm_rms_epsilon")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(data.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": data.need("llama.feed_forward_length"),
        "num_hidden_layers": data.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": data.need("llama.context_length"),
        # float32 in the file; the shortest decimal that is the same float32 is what was meant
        "rms_norm_eps": float(str(np.float32(epsilon))),
        "rope_parameters": _gguf_rope(data),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "bos_token_id": data.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": data.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": data.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _checkpoint_name(path: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _BLOCK and kind in ("weight", "bias"):
            return f"model.layers.{layer}.{_BLOCK[part]}.{kind}"
    raise CheckpointError(
        f"{path}: tensor {name!r}",
        "is no tensor of a plain Llama",
        "use the model's Hugging Face folder",
    )


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection `[heads * D, ...]` from interleaved to half-split rotary order.

    Undoes `permute` of llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _dequantize(path: Path, tensor: gguf.ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    try:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as e:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} of type {tensor.tensor_type.name}",
            f"cannot be dequantised ({e})",
            "use another quantisation of the model",
        ) from e
    part = tensor.name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        weight = unpermute(weight, heads)
    return torch.from_numpy(np.array(weight, dtype=np.float32, order="C"))


def _write_weights(
    path: Path, reader: gguf.GGUFReader, config: dict[str, Any], folder: Path
) -> None:
    names = {tensor.name: _checkpoint_name(path, tensor.name) for tensor in reader.tensors}
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    with Progress(console=Console(stderr=True), transient=True) as progress:
        for tensor in progress.track(reader.tensors, description=f"Converting {path.name}"):
            pending[names[tensor.name]] = _dequantize(path, tensor, config)
            if sum(t.nbytes for t in pending.values()) >= SHARD_BYTES:
                flush()
    if pending:
        flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, held in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        places |= dict.fromkeys(held, file)
    text = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_tokenizer(path: Path, reader: gguf.GGUFReader, folder: Path) -> None:
    """Tokenizer files and chat template, through transformers' conversion.

    That conversion has no splitter for `smollm` vocabularies, which were trained with every digit
    apart; the splitter of the original tokenizer.json is written in its place.
    """
    field = reader.get_field("tokenizer.ggml.pre")
    split = "default" if field is None else field.contents()
    model = reader.get_field("tokenizer.ggml.model")
    if model is not None and model.contents() == "gpt2" and split not in _SPLITTERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre={split!r}",
            f"only {', '.join(_SPLITTERS)} are known to split text rightly",
            "use the model's Hugging Face folder",
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as e:  # the tokenizers library raises nothing narrower
        raise CheckpointError(
            str(path), f"its tokenizer cannot be read ({e})", "use the Hugging Face folder"
        ) from e
    tokenizer.save_pretrained(folder)
    if splitter := _SPLITTERS.get(split):
        place = folder / "tokenizer.json"
        saved = json.loads(place.read_text(encoding="utf-8"))
        saved["pre_tokenizer"] = splitter
        place.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
