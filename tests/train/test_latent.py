"""A target with latent attention and experts trains a drafter as any other does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.errors import ConfigError
from eyas.models.decoder import Decoder
from eyas.speculate.checkpoints import load_drafter
from eyas.train.corpus import Corpus, pack
from eyas.train.export import drafter_tensors, export_specforge, export_speculators
from eyas.train.loss import teach, training_time_test
from eyas.train.settings import TrainConfig
from eyas.train.trainer import Trainer
from tests.helpers import CPU, LATENT, VOCAB, tiny_drafter, tiny_experts, tiny_target


@pytest.fixture(scope="module")
def target() -> Decoder:
    """DeepSeek-V3's form in 7 layers."""
    return tiny_target(num_layers=7, mla=LATENT, moe=tiny_experts(7))


def text() -> Corpus:
    """Counting in sevens, which a drafter can learn."""
    made = [[(7 * (i + 5 * d)) % VOCAB for i in range(20 + d)] for d in range(10)]
    return Corpus.of([(tokens, [True] * len(tokens)) for tokens in made])


def test_a_few_steps_train_and_export(target: Decoder, tmp_path: Path) -> None:
    """Fault: a trainer that knows ordinary heads only. The export is read back bit for bit."""
    settings = TrainConfig(
        folder=str(tmp_path),
        dtype="float32",
        device="cpu",
        steps=12,
        rows=64,
        ttt_steps=3,
        lr=3e-3,
        draft_vocab_size=40,
        held_out=2,
        eval_every=100,
        save_every=100,
    )
    trainer = Trainer(settings, target, text())
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["loss"] < before["loss"]
    drafter = trainer.state.master
    assert drafter.config.num_heads * drafter.config.head_dim == target.config.hidden_size
    export_specforge(drafter, tmp_path / "a", torch.float32)
    export_speculators(drafter, tmp_path / "b", "target", torch.float32)
    for folder in ("a", "b"):
        again = load_drafter(tmp_path / folder, target.config, torch.float32, CPU)
        assert again.config.aux_layers == target.config.default_aux_layers()
        for name, place in again.places().items():
            assert torch.equal(place.into, drafter.places()[name].into), name


def test_a_latent_drafter_learns(target: Decoder, tmp_path: Path) -> None:
    """Fault: gradients lost in the absorbed form. Every parameter has one, and the loss falls."""
    drafter = tiny_drafter(mla=LATENT, aux_layers=(2, 3, 4)).requires_grad_(True)
    ids, corpus = np.arange(3), text()
    batch = pack(corpus, ids, rows=64, skip=4, device=CPU, backend="loop")
    teacher = teach(target, drafter, batch, chunk=16)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        outcome = training_time_test(drafter, batch, teacher, steps=3, decay=0.8, chunk=16)
        torch.autograd.backward(outcome.loss)
        assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(outcome.loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    with pytest.raises(ConfigError, match="a drafter with mla="):
        export_specforge(drafter, tmp_path, torch.float32)
    names = drafter_tensors(drafter, torch.float32)
    assert names["midlayer.self_attn.kv_b_proj.weight"].shape == (4 * 64, 32)
    assert names["midlayer.self_attn.kv_a_proj_with_mqa.weight"].shape == (48, 128)
