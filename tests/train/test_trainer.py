"""The loop: alignment of loss and mask, no leak between documents, exact resume, learning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from eyas.attention.dense import DenseCausal, Documents, TrainingTimeTest
from eyas.errors import CheckpointError, ConfigError
from eyas.model_config import ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.train.corpus import Corpus, Pass, choose_vocabulary, pack
from eyas.train.loss import accept_lengths, soft_cross_entropy, teach, training_time_test
from eyas.train.settings import TrainConfig, drafter_config, learning_rate, resolve_attention
from eyas.train.state import TrainState, new_drafter
from eyas.train.trainer import Trainer, TrainingError

CPU = torch.device("cpu")
VOCAB = 40
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=96,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def target() -> Decoder:
    """A random target with spread-out logits."""
    torch.manual_seed(3)
    model = Decoder(MODEL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.requires_grad_(False)


def corpus(documents: int = 12, seed: int = 0) -> Corpus:
    """Random documents of 9..30 tokens; the last two thirds of each count as written."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(documents):
        length = int(rng.integers(9, 31))
        made.append((rng.integers(0, VOCAB, length).tolist(), [i >= 3 for i in range(length)]))
    return Corpus.of(made)


def config(folder: Path, **changes: object) -> TrainConfig:
    """A tiny run."""
    base = TrainConfig(
        folder=str(folder),
        dtype="float32",
        device="cpu",
        steps=6,
        rows=64,
        ttt_steps=3,
        lr=3e-3,
        draft_vocab_size=24,
        loss_chunk=7,
        held_out=2,
        log_every=1,
        eval_every=100,
        save_every=3,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def one_pass(text: Corpus, rows: int, steps: int) -> Pass:
    """All documents of `text` in one pass."""
    ids = np.arange(len(text))
    return pack(text, ids, rows=rows, skip=steps + 1, device=CPU, backend="loop")


def drafter(target: Decoder, text: Corpus, folder: Path, **changes: object) -> Eagle3:
    """A fresh drafter over `text`'s vocabulary."""
    trainer = Trainer(config(folder, **changes), target, text)
    return trainer.state.master


def test_features_of_packed_documents_equal_features_alone(target: Decoder, tmp_path: Path) -> None:
    text = corpus(3)
    module = drafter(target, text, tmp_path)
    together = one_pass(text, 100, 3)
    teacher = teach(target, module, together, chunk=5)
    row, column = 0, 0
    for index in range(3):
        tokens, mask = text.document(index)
        alone = Corpus.of([(tokens.tolist(), mask.tolist())])
        single = one_pass(alone, len(tokens), 3)
        want = teach(target, module, single, chunk=50)
        rows = slice(row, row + len(tokens))
        num = single.predicted.shape[0]
        columns = slice(column, column + num)
        torch.testing.assert_close(teacher.aux[rows], want.aux, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(teacher.probs[columns], want.probs, atol=1e-5, rtol=1e-4)
        assert torch.equal(teacher.best[columns], want.best)
        assert torch.equal(together.predicted[columns], single.predicted + row)
        row, column = row + len(tokens), column + num
    assert column == together.predicted.shape[0], "padding must carry no loss"


def test_teacher_is_the_target_at_the_position_before(target: Decoder, tmp_path: Path) -> None:
    text = corpus(1)
    module = drafter(target, corpus(), tmp_path)
    tokens, _ = text.document(0)
    batch = one_pass(text, len(tokens), 3)
    teacher = teach(target, module, batch, chunk=100)
    docs = Documents.of((len(tokens),), CPU, "loop")
    hidden = target(
        batch.tokens, batch.positions, DenseCausal(docs, target.config.attention_shape())
    )
    logits = target.logits(hidden)
    assert batch.predicted.tolist() == list(range(4, len(tokens))), "skip = steps + 1 tokens"
    for m, row in enumerate(batch.predicted.tolist()):
        said = logits[row - 1]
        torch.testing.assert_close(teacher.probs[m], said[module.target_ids].softmax(-1))
        best = int(said.argmax())
        known = module.target_ids.tolist()
        assert int(teacher.best[m]) == (known.index(best) if best in known else -1)


def test_loss_pairs_row_t_with_token_t_plus_two(target: Decoder, tmp_path: Path) -> None:
    """Every step's loss and hits, written out row by row from the definition."""
    text, steps = corpus(3, seed=5), 3
    module = drafter(target, corpus(), tmp_path)
    batch = one_pass(text, 96, steps)
    teacher = teach(target, module, batch, chunk=4)
    outcome = training_time_test(module, batch, teacher, steps=steps, decay=0.5, chunk=4)
    attend = TrainingTimeTest(batch.docs, module.config.attention_shape())
    hidden = module.fuse(teacher.aux)
    total = torch.zeros(())
    for step in range(steps):
        shifted = torch.cat((batch.tokens[1 + step :], batch.tokens[: 1 + step]))
        normed, hidden = module(target.embed(shifted), hidden, batch.positions + step, attend)
        logits = module.score(normed)
        losses = []
        for m, row in enumerate(batch.predicted.tolist()):
            start = row - 2 - step
            assert int(batch.positions[start]) == int(batch.positions[row]) - 2 - step >= 0
            guess = int(logits[start].argmax())
            assert bool(outcome.hits[step, m]) == (guess == int(teacher.best[m]))
            if int(teacher.best[m]) >= 0:
                losses.append(-(teacher.probs[m] * logits[start].log_softmax(-1)).sum())
        mean = torch.stack(losses).mean()
        torch.testing.assert_close(outcome.step_losses[step], mean, atol=1e-5, rtol=1e-5)
        total = total + 0.5**step * mean
    torch.testing.assert_close(outcome.loss, total, atol=1e-5, rtol=1e-5)
    parameters = [p for p in module.parameters() if p.requires_grad]
    got = torch.autograd.grad(outcome.loss, parameters, retain_graph=True)
    want = torch.autograd.grad(total, parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_soft_cross_entropy_gradients_in_bfloat16() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 16), torch.randn(30, 16)
    probs = torch.randn(11, 30).softmax(-1)
    share = torch.rand(11)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = -(share @ (probs * (leaves[0] @ leaves[1].T).log_softmax(-1)).sum(-1))
    want_grads = torch.autograd.grad(want, leaves)
    small = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    loss, guess = soft_cross_entropy(small[0], small[1], probs.half(), share, 4)
    got_grads = torch.autograd.grad(loss, small)
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=1e-2)
    assert (guess == (hidden @ weight.T).argmax(-1)).float().mean() > 0.8
    for a, b in zip(got_grads, want_grads, strict=True):
        assert (a.float() - b).norm() < 0.03 * b.norm()


def test_simulated_accept_length_follows_chains() -> None:
    text = Corpus.of([(list(range(8)), [False] * 3 + [True] * 5)])
    batch = one_pass(text, 8, 2)
    assert batch.predicted.tolist() == [3, 4, 5, 6, 7]
    # row t starts a chain if tokens t + 2 and t + 3 carry loss: rows 1..4
    hits = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 0, 1]], dtype=torch.bool)
    total, rows = accept_lengths(batch, hits)
    # row 1: token 3 hit, token 4 hit: 3; row 2: token 4 missed: 1; row 3: 5 hit, 6 missed: 2;
    # row 4: 6 and 7 hit: 3
    assert (total.item(), rows.item()) == (9.0, 4.0)


def test_a_drafter_that_knows_the_answer_hits_always(target: Decoder, tmp_path: Path) -> None:
    """A target whose next token is a function of the last: training finds it at every step."""
    successor = copying_target()
    text = Corpus.of(
        [([(7 * (i + 5 * d)) % VOCAB for i in range(20)], [True] * 20) for d in range(10)]
    )
    settings = config(tmp_path, steps=100, draft_vocab_size=VOCAB, lr=1e-2, save_every=500)
    trainer = Trainer(settings, successor, text)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["loss"] < before["loss"]
    assert min(after["acceptance"]) > 0.95, after
    assert after["accept_length"] > 3.8, "a chain of 3 drafts and the bonus"


def copying_target() -> Decoder:
    """After token x it says 7 + x: attention and MLPs are silent, the head is a permutation."""
    torch.manual_seed(1)
    untied = dataclasses.replace(MODEL, tie_word_embeddings=False)
    model = Decoder(untied).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0 if parameter.dim() == 1 else 0.0)
    nn.init.orthogonal_(model.embed.weight)
    for x in range(VOCAB):
        model.head.weight[(x + 7) % VOCAB] = 4 * model.embed.weight[x]
    return model


def test_resume_is_exact(target: Decoder, tmp_path: Path) -> None:
    """Six steps, over more than one epoch, equal three steps, a new process, and three more."""
    text = corpus(8)
    whole = Trainer(config(tmp_path / "whole"), target, text)
    whole.train()
    assert whole.state.epoch >= 1, "the case must cross an epoch"
    half = config(tmp_path / "half")
    first = Trainer(half, target, text)
    interrupt(first, after=3)
    again = Trainer(dataclasses.replace(half, resume=True), target, text)
    assert again.state.step == 3
    again.train()
    for a, b in zip(whole.state.master.parameters(), again.state.master.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.state.master.target_ids, again.state.master.target_ids)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "half")
    ]
    keys = ("kind", "step", "loss", "acceptance", "grad_norm")
    kept = [[tuple(str(line[k]) for k in keys) for line in part] for part in lines]
    assert kept[0] == kept[1]


def interrupt(trainer: Trainer, after: int) -> None:
    """Train until the checkpoint of step `after` is written, then stop as a crash would."""
    save = TrainState.save

    def saving(state: TrainState, *args: object) -> None:
        save(state, *args)  # type: ignore[arg-type]
        if state.step == after:
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainState, "save", saving)
        with pytest.raises(InterruptedError):
            trainer.train()


def test_vocabulary_is_kept_on_resume(target: Decoder, tmp_path: Path) -> None:
    """The map comes from the checkpoint even where the text would now give another."""
    text = corpus(8)
    trainer = Trainer(config(tmp_path), target, text)
    kept = torch.arange(VOCAB - 24, VOCAB)
    assert not torch.equal(trainer.state.master.target_ids, kept)
    trainer.state.master.target_ids.copy_(kept)
    trainer.state.save(trainer.config.checkpoint_path, 0.0, trainer.plan)
    again = Trainer(config(tmp_path, resume=True), target, text)
    assert torch.equal(again.state.master.target_ids, kept)
    assert torch.equal(again.state.worker.target_ids, kept)


def test_resume_refuses_another_run(target: Decoder, tmp_path: Path) -> None:
    text = corpus(8)
    trainer = Trainer(config(tmp_path), target, text)
    trainer.state.save(trainer.config.checkpoint_path, 0.0, trainer.plan)
    with pytest.raises(CheckpointError, match="seed=7"):
        Trainer(config(tmp_path, resume=True, seed=7), target, text)
    with pytest.raises(ConfigError, match="norm_output"):
        Trainer(config(tmp_path, resume=True, norm_output=False), target, text)
    with pytest.raises(ConfigError, match="overwrite"):
        Trainer(config(tmp_path), target, text)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="readable"):
        Trainer(config(tmp_path, resume=True), target, text)


def test_states_that_are_not_finite_stop_the_run(target: Decoder, tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path), target, corpus(8))
    trainer.target = Decoder(MODEL).requires_grad_(False)
    for parameter in trainer.target.parameters():
        nn.init.constant_(parameter, float("nan"))
    with pytest.raises(TrainingError, match="captured state"):
        trainer.train()
    assert not trainer.config.checkpoint_path.exists(), "a spoilt state must not be saved"


def test_master_weights_are_float32_beside_a_16_bit_worker(target: Decoder) -> None:
    text = corpus(4)
    half = Decoder(MODEL).requires_grad_(False)
    half.load_state_dict(target.state_dict())
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    module = small_drafter(target, text)
    state = TrainState.of(module, torch.bfloat16, weight_decay=0.0)
    batch = one_pass(text, 120, 2)
    before = module.mlp.gate_up.weight.detach().clone()
    table = state.worker.rotary.table
    for _ in range(2):
        teacher = teach(half, state.worker, batch, chunk=64)
        outcome = training_time_test(state.worker, batch, teacher, steps=2, decay=0.8, chunk=64)
        torch.autograd.backward(outcome.loss)
        assert torch.isfinite(state.update(1e-3, 1.0))
    assert table.dtype == torch.float32, "rotary tables stay exact"
    assert module.mlp.gate_up.weight.dtype == torch.float32
    assert not torch.equal(module.mlp.gate_up.weight, before)
    assert torch.equal(state.worker.mlp.gate_up.weight, module.mlp.gate_up.weight.bfloat16())


def small_drafter(target: Decoder, text: Corpus) -> Eagle3:
    """A drafter built without a trainer."""
    shape = drafter_config(TrainConfig(draft_vocab_size=24), target.config)
    return new_drafter(shape, choose_vocabulary(text, VOCAB, 24), target, seed=0)


def test_a_fresh_drafters_head_is_the_targets(target: Decoder) -> None:
    module = small_drafter(target, corpus())
    x = torch.randn(3, 32)
    want = (x * target.norm.weight) @ target.head.weight[module.target_ids].T
    assert module.head is not None
    torch.testing.assert_close(module.head(x), want)


def test_learning_rate_and_settings() -> None:
    settings = TrainConfig(lr=1.0, warmup=0.1, final_lr=0.2)
    assert learning_rate(settings, 0.05) == pytest.approx(0.5)
    assert learning_rate(settings, 0.1) == pytest.approx(1.0)
    assert learning_rate(settings, 1.0) == pytest.approx(0.2)
    assert resolve_attention("auto", CPU, torch.bfloat16) == "loop"
    with pytest.raises(ConfigError, match="flash"):
        resolve_attention("flash", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="stage"):
        TrainConfig(stage="nonsense")
    with pytest.raises(ConfigError, match="float16"):
        TrainConfig(dtype="float16")
    with pytest.raises(ConfigError, match="unknown key"):
        TrainConfig.from_dict({"nonsense": 1})


def test_time_limit_ends_a_run(target: Decoder, tmp_path: Path) -> None:
    trainer = Trainer(config(tmp_path, max_minutes=1e-6, steps=1000), target, corpus(8))
    trainer.train()
    assert trainer.state.step == 1
    assert trainer.config.checkpoint_path.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA GPU")
def test_flash_and_loop_train_alike_without_waiting(target: Decoder, tmp_path: Path) -> None:
    """On a GPU: same losses from both attentions, and no step reads the device."""
    model = Decoder(MODEL).requires_grad_(False)
    model.load_state_dict(target.state_dict())
    model = model.to("cuda")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    losses = []
    for attention in ("flash", "loop"):
        settings = config(tmp_path / attention, attention=attention, dtype="bfloat16")
        trainer = Trainer(settings, model, corpus(8))
        seen: list[torch.Tensor] = []
        for batch, _ in zip(trainer.passes(), range(4), strict=False):
            torch.cuda.set_sync_debug_mode("error" if seen else "default")
            try:
                _, outcome = trainer.forward(batch)
                torch.autograd.backward(outcome.loss)
                trainer.state.update(1e-3, 1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen.append(outcome.loss.detach())
        losses.append(torch.stack(seen).cpu())
    torch.testing.assert_close(losses[0], losses[1], rtol=0.03, atol=0.03)
