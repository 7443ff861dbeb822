"""Training of an EAGLE-3 drafter: `run` writes text, trains, exports and evaluates.

Nothing but text and checkpoints is stored: every step runs the target over one packed pass,
takes its states and distributions, and trains the drafter on them (`loss.py`). The loop reads the
device only when it reports. A run resumed from a checkpoint continues bit for bit where nothing is
limited by time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from eyas.checkpoint import read_config, resolve
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig, require
from eyas.engine.engine import LLM
from eyas.errors import ConfigError
from eyas.models.decoder import Decoder
from eyas.models.families import model_config
from eyas.models.registry import load_target, resolve_device, resolve_dtype
from eyas.train.corpus import Corpus, Ints, Pass, choose_vocabulary, coverage, pack, plan_passes
from eyas.train.data import write_text
from eyas.train.evaluate import evaluate
from eyas.train.export import export_specforge, export_speculators
from eyas.train.loss import Outcome, Teacher, accept_lengths, teach, training_time_test
from eyas.train.settings import TrainConfig, drafter_config, learning_rate, resolve_attention
from eyas.train.state import TrainState, new_drafter


class TrainingError(ConfigError):
    """Training cannot go on."""


class Tally:
    """Sums of what steps report, kept on the device until read."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(2 * steps + 4, dtype=torch.float64, device=device)
        self.steps, self.passes, self.predicted = steps, 0, 0

    @torch.no_grad()
    def add(self, batch: Pass, teacher: Teacher, outcome: Outcome, norm: torch.Tensor) -> None:
        """Take in one pass and its gradient norm."""
        lengths, rows = accept_lengths(batch, outcome.hits)
        broken = (~teacher.aux.isfinite()).any()
        scalars = torch.stack([x.double() for x in (norm, broken, lengths, rows)])
        hits = outcome.hits.sum(1, dtype=torch.float64)
        self.sums += torch.cat((outcome.step_losses.double(), hits, scalars))
        self.passes += 1
        self.predicted += batch.predicted.shape[0]

    def read(self) -> dict[str, Any]:
        """Means so far (waits for the device); raises `TrainingError` if anything is not finite."""
        values = self.sums.tolist()
        losses, rest = values[: self.steps], values[self.steps :]
        hits, (norm, broken, lengths, rows) = rest[: self.steps], rest[self.steps :]
        if broken or not all(map(math.isfinite, (*losses, norm))):
            what = "a captured state of the target" if broken else "the loss or its gradient"
            raise TrainingError(
                f"{what} is not finite",
                "NaN or infinity spoils every later step",
                "use bfloat16 or float32 and a lower lr; resume from the last checkpoint",
            )
        return {
            "loss": round(sum(losses) / self.passes, 4),
            "losses": [round(x / self.passes, 4) for x in losses],
            "acceptance": [round(x / max(1, self.predicted), 4) for x in hits],
            "accept_length": round(lengths / max(1.0, rows), 4),
            "grad_norm": round(norm / self.passes, 4),
        }


class Trainer:
    """One run over a corpus."""

    def __init__(self, config: TrainConfig, target: Decoder, corpus: Corpus) -> None:
        """Split the corpus, then build or restore the state (`config.resume`)."""
        self.config, self.target = config, target
        weight = target.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.backend = resolve_attention(config.attention, self.device, self.dtype)
        self.corpus, self.held_out = corpus.split(config.held_out)
        self._check_lengths(corpus)
        self.plan = {
            "rows": config.rows,
            "seed": config.seed,
            "held_out": config.held_out,
            "documents": len(corpus),
            "tokens": int(corpus.tokens.size),
        }
        self.log = Path(config.folder) / "metrics.jsonl"
        self.state = self._resume() if config.resume else self._begin()
        self.coverage = coverage(self.corpus, self.state.master.target_ids.cpu())

    def _begin(self) -> TrainState:
        config = self.config
        require(
            not config.checkpoint_path.exists(),
            f"a checkpoint in {config.folder}",
            "a new run would overwrite it",
            "resume it or give another folder",
        )
        shape = drafter_config(config, self.target.config)
        ids = choose_vocabulary(self.corpus, shape.vocab_size, shape.draft_vocab_size)
        master = new_drafter(shape, ids, self.target, config.seed)
        return TrainState.of(master, self.dtype, config.weight_decay)

    def _resume(self) -> TrainState:
        path = self.config.checkpoint_path
        state = TrainState.load(path, device=self.device, dtype=self.dtype, plan=self.plan)
        wanted = drafter_config(self.config, self.target.config)
        require(
            state.master.config == wanted,
            f"drafter {wanted}",
            f"the checkpoint holds {state.master.config}",
            "give the shape and switches of before, or train in another folder",
        )
        return state

    def _check_lengths(self, corpus: Corpus) -> None:
        longest = int(corpus.lengths.max())
        limit = min(self.config.rows, self.target.config.max_position - self.config.ttt_steps)
        require(
            longest <= limit,
            f"a conversation of {longest} tokens",
            f"must fit rows={self.config.rows} and the target's positions less ttt_steps",
            f"give more rows, or text of at most {limit} tokens",
        )

    def pack(self, corpus: Corpus, ids: Ints) -> Pass:
        """Documents `ids` of `corpus` as a pass for this run."""
        return pack(
            corpus,
            ids,
            rows=self.config.rows,
            skip=self.config.ttt_steps + 1,
            device=self.device,
            backend=self.backend,
        )

    def passes(self) -> Iterator[Pass]:
        """Passes from the state's position on, epoch after epoch; advances the position."""
        state = self.state
        while True:
            plan = plan_passes(self.corpus.lengths, self.config.rows, self.config.seed, state.epoch)
            while state.place < len(plan):
                batch = self.pack(self.corpus, plan[state.place])
                state.place += 1
                yield batch
            state.epoch, state.place = state.epoch + 1, 0

    def forward(self, batch: Pass) -> tuple[Teacher, Outcome]:
        """Target and training-time test over a pass."""
        config, worker = self.config, self.state.worker
        teacher = teach(self.target, worker, batch, config.loss_chunk)
        outcome = training_time_test(
            worker,
            batch,
            teacher,
            steps=config.ttt_steps,
            decay=config.decay,
            chunk=config.loss_chunk,
        )
        return teacher, outcome

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Losses, acceptance and simulated accept length on held-out text."""
        tally = Tally(self.config.ttt_steps, self.device)
        zero = torch.zeros((), device=self.device)
        for ids in plan_passes(self.held_out.lengths, self.config.rows, self.config.seed, 0):
            batch = self.pack(self.held_out, ids)
            tally.add(batch, *self.forward(batch), zero)
        return tally.read()

    def train(self) -> None:
        """Steps until `steps` or `max_minutes` are reached, then a last evaluation and checkpoint.

        Raises `TrainingError` when states or losses are not finite; the checkpoint on disk is
        then that of the last report before.
        """
        config, state = self.config, self.state
        clock = Clock(config, state.elapsed)
        tally, tokens = Tally(config.ttt_steps, self.device), 0
        columns = (BarColumn(bar_width=12), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("starting", total=1.0)
            for batch in self.passes():
                progress = clock.progress(state.step + 1)
                teacher, outcome = self.forward(batch)
                torch.autograd.backward(outcome.loss)
                norm = state.update(learning_rate(config, progress), config.clip)
                tally.add(batch, teacher, outcome, norm)
                state.step += 1
                tokens += batch.num_tokens
                ends = state.step >= config.steps or clock.over
                if ends or self._due(config.log_every, config.eval_every, config.save_every):
                    record = tally.read()
                    rate = clock.rate(tokens)
                    self._report("train", {**record, "tokens_per_s": rate, "progress": progress})
                    bar.update(task, completed=progress, description=_line(state, record, rate))
                    tally, tokens = Tally(config.ttt_steps, self.device), 0
                if ends or self._due(config.eval_every):
                    self._report("held_out", self.evaluate())
                    clock.restart()
                if ends or self._due(config.save_every):
                    state.save(config.checkpoint_path, clock.elapsed, self.plan)
                    clock.restart()
                if ends:
                    return

    def _due(self, *every: int) -> bool:
        return any(self.state.step % n == 0 for n in every)

    def _report(self, kind: str, record: dict[str, Any]) -> None:
        state = self.state
        line = {"kind": kind, "step": state.step, "epoch": state.epoch, **record}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Clock:
    """Time of a run: how far it is, how fast it goes."""

    def __init__(self, config: TrainConfig, before: float) -> None:
        self.config, self.before = config, before
        self.start = self.mark = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.before + time.monotonic() - self.start

    @property
    def over(self) -> bool:
        """Whether the time limit is reached."""
        return 0 < self.config.max_minutes * 60 <= self.elapsed

    def progress(self, step: int) -> float:
        """Share of the run that is done with `step`: by steps or by time, whichever is further."""
        share = step / self.config.steps
        if self.config.max_minutes:
            share = max(share, self.elapsed / (60 * self.config.max_minutes))
        return min(1.0, share)

    def rate(self, tokens: int) -> float:
        """Tokens per second since the last call or restart."""
        span = time.monotonic() - self.mark
        self.restart()
        return round(tokens / max(span, 1e-9), 1)

    def restart(self) -> None:
        """Leave out the time since the last report."""
        self.mark = time.monotonic()


def _line(state: TrainState, record: dict[str, Any], rate: float) -> str:
    acceptance = " ".join(f"{x:.2f}" for x in record["acceptance"])
    return (
        f"step {state.step} epoch {state.epoch} loss {record['loss']:.3f} "
        f"acceptance {acceptance} length {record['accept_length']:.2f} {rate:,.0f} tok/s"
    )


def write_stage(config: TrainConfig) -> None:
    """Let the target write `config.text_path`."""
    engine = EngineConfig(
        device=config.device,
        dtype=config.dtype,
        max_running_requests=config.writers,
        context_length=config.max_length,
        chunked_prefill_size=config.write_prefill,
        seed=config.seed,
    )
    llm = LLM(config.model, drafter=None, config=engine)
    for _ in write_text(llm, config, config.text_path):
        pass


def load_text(config: TrainConfig) -> Corpus:
    """The run's own text, with that of `config.texts` mixed in."""
    own = Corpus.load(config.text_path)
    others = [Corpus.load(Path(path)) for path in config.texts]
    return Corpus.merge([own, *others], config.seed) if others else own


def train_stage(config: TrainConfig) -> None:
    """Train on the written text and export the drafter in both formats, in bfloat16."""
    device = resolve_device(config.device)
    target = load_target(resolve(config.model), resolve_dtype(config.dtype, device), device)
    trainer = Trainer(config, target, load_text(config))
    trainer.train()
    master = trainer.state.master
    export_specforge(master, config.export_path, torch.bfloat16)
    folder = Path(config.folder) / "speculators"
    export_speculators(master, folder, config.model, torch.bfloat16, config.evaluate_drafts)
    facts = {"config": dataclasses.asdict(config), "coverage": trainer.coverage}
    facts |= {"steps": trainer.state.step, "epochs": trainer.state.epoch}
    (Path(config.folder) / "run.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def evaluate_stage(config: TrainConfig) -> dict[str, Any]:
    """Measure the exported drafter in the engine; writes and returns `evaluation.json`."""
    longest = model_config(read_config(resolve(config.model))).max_position
    engine = EngineConfig(
        device=config.device,
        dtype=config.dtype,
        max_running_requests=64,
        context_length=min(config.max_length + config.evaluate_tokens, longest),
        chunked_prefill_size=4096,
        seed=config.seed,
    )
    chain = SpeculationConfig.chain(config.evaluate_drafts)
    llm = LLM(config.model, drafter=str(config.export_path), speculation=chain, config=engine)
    held_out = None
    if config.text_path.exists():
        _, held_out = load_text(config).split(config.held_out)
    params = SamplingParams(max_tokens=config.evaluate_tokens)
    report = evaluate(
        llm,
        config.evaluate_prompts,
        held_out,
        params=params,
        depth=config.evaluate_drafts,
        longest=engine.context_length - config.evaluate_tokens,
    )
    path = Path(config.folder) / "evaluation.json"
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return report


def run(config: TrainConfig) -> None:
    """Run the stages `config.stage` names, in order: text, training and export, evaluation."""
    if config.stage in ("all", "data"):
        write_stage(config)
    if config.stage in ("all", "train"):
        train_stage(config)
    if config.stage in ("all", "evaluate"):
        evaluate_stage(config)
