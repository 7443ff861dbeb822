"""Drafters train on targets with head norms, experts and sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.attention.dense import DenseCausal, Documents
from eyas.model_config import MoEConfig
from eyas.models.decoder import Decoder
from eyas.train.corpus import Corpus
from eyas.train.settings import TrainConfig
from eyas.train.trainer import Trainer
from tests.helpers import CPU, VOCAB, tiny_target
from tests.models.beside import Paged

LAYERS = 7
MOE = MoEConfig(num_experts=8, top_k=3, intermediate_size=32, sparse_layers=(True,) * LAYERS)
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "windows": {"windows": (0, 64, 0, 70, 64, 0, 0)},
    "qwen3-moe": {"qk_norm": True, "moe": MOE},
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Decoder:
    """A random target of seven layers."""
    return tiny_target(num_layers=LAYERS, **TARGETS[request.param]).requires_grad_(False)


def test_the_trainer_sees_what_is_served(target: Decoder) -> None:
    """Fault: dense attention or a pass of many rows that computes another network."""
    texts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (100, 7, 90)]
    docs = Documents.of(tuple(map(len, texts)), CPU, "loop")
    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    with torch.no_grad():
        dense = target(tokens, positions, DenseCausal(docs, target.config.attention_shape()))
    paged = torch.cat([Paged(target, 16).forward(text)[1] for text in texts])
    torch.testing.assert_close(dense, paged, atol=1e-4, rtol=1e-4)


def test_a_few_steps_train(target: Decoder, tmp_path: Path) -> None:
    """Fault: a trainer that knows Llama only."""
    texts = [[(7 * (i + 5 * d)) % VOCAB for i in range(66 + d)] for d in range(8)]
    settings = TrainConfig(
        folder=str(tmp_path),
        dtype="float32",
        device="cpu",
        steps=6,
        rows=80,
        ttt_steps=3,
        lr=3e-3,
        draft_vocab_size=40,
        held_out=2,
        eval_every=100,
        save_every=100,
    )
    trainer = Trainer(settings, target, Corpus.of([(t, [True] * len(t)) for t in texts]))
    before = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["loss"] < before["loss"]
