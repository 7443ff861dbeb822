"""Training text written by the target itself.

The target continues its own chat template: first user turns (sampled at temperature 1 after the
user header, some begun with a line of `openings.py`), then answers to them and to prompts of given
files, at several temperatures; a share of the conversations goes on until it is long. One round is
one `generate` call over everything that can be written at that moment, so the device stays full.
User turns that occur in the files to exclude are never answered.

It knows the engine only as a `Writer`, and neither models nor losses.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eyas.config import SamplingParams, Strict, option, require
from eyas.errors import CheckpointError
from eyas.train.corpus import Corpus
from eyas.train.openings import OPENINGS

TEMPERATURES = (0.5, 0.7, 1.0)
"""Of the answers that are not greedy, in equal shares."""
SENTINELS = ("QfirstQ", "QsecondQ", "QthirdQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(Strict):
    """What text the target writes, and how much."""

    model: str = option("smollm2", "target: folder, GGUF file, hub id, or smollm2")
    folder: str = option("drafter-run", "where text, checkpoints and results go")
    device: str = option("auto", "cpu, cuda or auto")
    seed: int = option(0, "seed of text, order and initial weights")
    prompts: tuple[str, ...] = option((), "JSON lines files with further prompts to answer")
    exclude: tuple[str, ...] = option((), "JSON lines files whose user turns must stay out")
    conversations: int = option(60_000, "conversations begun with a user turn of the target's")
    write_minutes: float = option(0.0, "start no round that would end later; 0: no limit")
    round_size: int = option(8192, "conversations begun per round")
    writers: int = option(1024, "requests decoded together")
    write_prefill: int = option(16_384, "prompt tokens prefilled per step")
    user_tokens: int = option(160, "longest user turn")
    answer_tokens: int = option(640, "longest answer")
    max_length: int = option(2048, "longest conversation")
    opening_share: float = option(0.6, "share of user turns begun with a prepared opening")
    greedy_share: float = option(0.5, "share of answers written greedily")
    long_share: float = option(0.1, "share of conversations continued until they are long")

    def __post_init__(self) -> None:
        for name in ("opening_share", "greedy_share", "long_share"):
            value = getattr(self, name)
            require(0.0 <= value <= 1.0, f"{name}={value}", "is a share", "give 0 to 1")
        for name in ("round_size", "writers", "write_prefill", "user_tokens", "answer_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")


class Output(Protocol):
    """A finished request, as the engine reports it."""

    @property
    def token_ids(self) -> list[int]:
        """Written tokens, the stop token included."""

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`."""


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def chat_text(self, messages: Sequence[dict[str, Any]]) -> str:
        """A conversation in the checkpoint's template, generation prompt included."""


class Writer(Protocol):
    """What is asked of the engine."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The target's tokenizer."""

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        progress: bool = False,
    ) -> Sequence[Output]:
        """Answer all prompts, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPieces:
    """Token ids of a chat template around the texts of a conversation."""

    start: list[int]
    """Before the first user turn."""
    to_answer: list[int]
    """Between a user turn and its answer."""
    to_user: list[int]
    """Between an answer and the next user turn; begins with the token that ends an answer."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> ChatPieces:
        """Cut a rendered conversation at marked texts; raises `CheckpointError` if it can't be."""
        first, second, third = SENTINELS
        messages = [("user", first), ("assistant", second), ("user", third)]
        text = tokenizer.chat_text([{"role": r, "content": c} for r, c in messages])
        parts = re.split("|".join(SENTINELS), text)
        alone = tokenizer.chat_text([{"role": "user", "content": first}]).split(first)
        if len(parts) != 4 or alone != [parts[0], parts[1]] or parts[1] != parts[3]:
            raise CheckpointError(
                f"chat template that renders {text!r}",
                "turns must be wrapped alike wherever they stand",
                "use an instruct model with a plain chat template",
            )
        start, to_answer, to_user = (plain_ids(tokenizer, part) for part in parts[:3])
        return cls(start=start, to_answer=to_answer, to_user=to_user)


def plain_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Ids of `text` without the tokens that the checkpoint puts before a plain prompt."""
    return tokenizer.encode(text)[len(tokenizer.encode("")) :]


def read_turns(path: Path) -> list[list[str]]:
    """User turns of each row of a JSON lines file.

    A row is `{"prompt": ...}`, `{"turns": [...]}` or `{"conversations": [{"role", "content"}]}`.
    Raises `CheckpointError` naming the row that is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path}: {error}", "prompt files must be readable UTF-8", "check the file"
        ) from error
    return [_row_turns(path, i, line) for i, line in enumerate(lines) if line.strip()]


def _row_turns(path: Path, number: int, line: str) -> list[str]:
    try:
        row = json.loads(line)
        if "prompt" in row:
            return [str(row["prompt"])]
        if "turns" in row:
            return [str(turn) for turn in row["turns"]]
        return [str(t["content"]) for t in row["conversations"] if t["role"] == "user"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} line {number + 1}",
            "a row is a JSON object with prompt, turns or conversations",
            "mend the row",
        ) from error


def normalise(text: str) -> str:
    """Words of `text` in lower case: what counts as the same user turn."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def trim_loop(ids: Sequence[int], longest: int = 64) -> list[int]:
    """`ids` without the repetitions of a loop at their end; two periods of it stay.

    A loop is at least 4 periods and 32 tokens of one period of at most `longest` tokens.
    """
    kept, total = list(ids), len(ids)
    for period in range(1, min(longest, total // 4) + 1):
        run = 0
        while run + period < total and kept[-1 - run] == kept[-1 - run - period]:
            run += 1
        if run + period >= max(4 * period, 32):
            return kept[: total - run + period]
    return kept


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A conversation being written."""

    ids: list[int]
    mask: list[bool]
    temperature: float
    grows: bool
    turns: int = 0

    def add(self, ids: Sequence[int], written: bool) -> None:
        """Append tokens; `written` says that they are an answer's."""
        self.ids.extend(ids)
        self.mask.extend([written] * len(ids))


@dataclass(slots=True, kw_only=True)
class TextWriter:
    """Rounds of writing; see the module's docstring."""

    writer: Writer
    config: TextConfig
    pieces: ChatPieces
    known: set[str]
    """Normalised user turns that were used or are excluded."""
    fresh: list[str]
    """User turns to be answered next."""
    growing: list[Conversation] = field(default_factory=list)
    done: list[Conversation] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    """User turns that later turns are drawn from."""
    counter: int = 0
    """Requests so far; the seed of each."""

    @classmethod
    def of(cls, writer: Writer, config: TextConfig) -> TextWriter:
        """Read the prompt files and the files to exclude."""
        known: set[str] = set()
        for path in config.exclude:
            known |= {normalise(turn) for turns in read_turns(Path(path)) for turn in turns}
        made = cls(
            writer=writer,
            config=config,
            pieces=ChatPieces.of(writer.tokenizer),
            known=known,
            fresh=[],
        )
        for path in config.prompts:
            made.fresh += [t[0] for t in read_turns(Path(path)) if t and made.is_new(t[0])]
        return made

    def is_new(self, turn: str) -> bool:
        """Whether a user turn is usable and was not met before; it counts as met from now on."""
        key = normalise(turn)
        if len(key) < 8 or "\ufffd" in turn or key in self.known:
            return False
        self.known.add(key)
        return True

    def round(self, num_turns: int, rng: np.random.Generator) -> None:
        """Answer what is fresh or growing, and write `num_turns` user turns for the next round."""
        begun = [self._begin(turn, rng) for turn in self.fresh]
        self.used += self.fresh
        begun = [c for c in begun if self._room(c) >= 32]
        open_ = begun + [c for c in self.growing if self._continue(c, rng)]
        openings = [self._opening(rng) for _ in range(num_turns)]
        prompts = [c.ids for c in open_] + [self.pieces.start + ids for ids in openings]
        params = [self._answer_params(c) for c in open_]
        params += [self._params(1.0, self.config.user_tokens) for _ in openings]
        outputs = self._generate(prompts, params)
        self.growing, self.fresh = [], []
        for conversation, output in zip(open_, outputs[: len(open_)], strict=True):
            self._answered(conversation, output.token_ids)
        for ids, output in zip(openings, outputs[len(open_) :], strict=True):
            text = self.writer.tokenizer.decode([*ids, *output.token_ids]).strip()
            if output.finish_reason == "stop" and self.is_new(text):
                self.fresh.append(text)

    def corpus(self, rng: np.random.Generator) -> Corpus:
        """Everything written so far, shuffled."""
        documents = [*self.done, *self.growing]
        order = rng.permutation(len(documents))
        return Corpus.of((documents[i].ids, documents[i].mask) for i in order)

    def _begin(self, turn: str, rng: np.random.Generator) -> Conversation:
        greedy = rng.random() < self.config.greedy_share
        temperature = 0.0 if greedy else float(rng.choice(TEMPERATURES))
        grows = bool(rng.random() < self.config.long_share)
        made = Conversation(ids=[], mask=[], temperature=temperature, grows=grows)
        made.add(self.pieces.start, False)
        made.add(plain_ids(self.writer.tokenizer, turn.strip()), False)
        made.add(self.pieces.to_answer, False)
        return made

    def _continue(self, conversation: Conversation, rng: np.random.Generator) -> bool:
        """Append an earlier user turn; False if it does not fit: the conversation is done."""
        ended = conversation.ids[-1] in self.writer.tokenizer.eos_ids
        turn = self.used[int(rng.integers(len(self.used)))]
        ids = self.pieces.to_user[1:] if ended else self.pieces.to_user
        ids = [*ids, *plain_ids(self.writer.tokenizer, turn.strip()), *self.pieces.to_answer]
        if self._room(conversation) < len(ids) + 32:
            self.done.append(conversation)
            return False
        conversation.add(ids, False)
        return True

    def _answered(self, conversation: Conversation, ids: Sequence[int]) -> None:
        """Take in an answer; loops are cut short, conversations without any answer dropped."""
        kept = trim_loop(ids)
        if len(kept) < 4 and not conversation.turns:
            return
        conversation.add(kept, True)
        conversation.turns += 1
        looped = len(kept) < len(ids)
        whole = conversation.grows and not looped and self._room(conversation) >= 192
        (self.growing if whole else self.done).append(conversation)

    def _room(self, conversation: Conversation) -> int:
        return self.config.max_length - len(conversation.ids)

    def _opening(self, rng: np.random.Generator) -> list[int]:
        if rng.random() >= self.config.opening_share:
            return []
        return plain_ids(self.writer.tokenizer, OPENINGS[int(rng.integers(len(OPENINGS)))])

    def _answer_params(self, conversation: Conversation) -> SamplingParams:
        longest = min(self.config.answer_tokens, self._room(conversation))
        return self._params(conversation.temperature, longest)

    def _params(self, temperature: float, max_tokens: int) -> SamplingParams:
        self.counter += 1
        seed = self.config.seed * 2**32 + self.counter
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Output]:
        """Generate in an order that keeps like with like, and give back the caller's order.

        Long contexts go together (a step costs what its longest request costs), greedy before
        sampled, and the shortest requests last, so that little is left to drain at the end.
        """
        pairs = zip(prompts, params, strict=True)
        keys = [(-(len(p) // 256), -q.max_tokens, q.temperature) for p, q in pairs]
        order = sorted(range(len(prompts)), key=keys.__getitem__)
        sorted_params = [params[i] for i in order]
        made = self.writer.generate([prompts[i] for i in order], sorted_params, progress=True)
        outputs: list[Output | None] = [None] * len(order)
        for place, output in zip(order, made, strict=True):
            outputs[place] = output
        return [output for output in outputs if output is not None]


def write_text(writer: Writer, config: TextConfig, path: Path) -> Iterator[Corpus]:
    """Write text round by round; after each, the corpus so far is saved to `path` and yielded.

    Ends when `config.conversations` are begun and answered (conversations still growing stay as
    they are), or before a round that would end after `config.write_minutes`, judged by the longest
    round so far.
    """
    rng = np.random.default_rng((config.seed, 1))
    text = TextWriter.of(writer, config)
    begun, start, longest = 0, time.monotonic(), 0.0
    while begun < config.conversations or text.fresh:
        now = time.monotonic()
        num_turns = min(config.round_size, config.conversations - begun)
        text.round(num_turns, rng)
        begun += num_turns
        longest = max(longest, time.monotonic() - now)
        corpus = text.corpus(np.random.default_rng((config.seed, 2)))
        corpus.save(path, notes(corpus, config))
        yield corpus
        elapsed = time.monotonic() - start
        if config.write_minutes and elapsed + longest > 60 * config.write_minutes:
            return


def notes(corpus: Corpus, config: TextConfig) -> dict[str, str]:
    """What a corpus file says of itself."""
    lengths = corpus.lengths
    facts = {
        "model": config.model,
        "seed": config.seed,
        "documents": len(corpus),
        "tokens": int(lengths.sum()),
        "written_tokens": int(corpus.mask.sum()),
        "longest": int(lengths.max(initial=0)),
        "documents_over_1024": int((lengths > 1024).sum()),
        "prompt_files": [Path(p).name for p in config.prompts],
        "excluded_files": [Path(p).name for p in config.exclude],
    }
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
