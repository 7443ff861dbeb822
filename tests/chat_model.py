"""A tiny random chat model with its drafter, as checkpoint folders that `LLM` loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import allocate
from eyas.train.export import export_specforge
from tests.helpers import randomise

VOCAB, EOS = 288, 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_model(folder: Path, save_llama: Callable[..., Any], **changes: Any) -> Path:
    """A Llama of 8 layers over bytes, with a chat template; context of 512 tokens."""
    values = {"vocab_size": VOCAB, "num_hidden_layers": 8, "eos_token_id": EOS}
    save_llama(folder, **{**values, **changes})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_drafter(folder: Path, **changes: Any) -> Path:
    """A random drafter that fits the model of `write_chat_model`."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": 96,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "aux_layers": (2, 4, 5),
    }
    cpu = torch.device("cpu")
    module = Eagle3(DrafterConfig(**{**values, **changes}), row_tile(cpu, torch.float32))
    allocate(module, torch.float32, cpu)
    randomise(module, 1, 0.15)
    export_specforge(module, folder, torch.float32)
    return folder
