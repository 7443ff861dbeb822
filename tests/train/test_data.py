"""Training text: what is written, masked, kept out, stored and packed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config import SamplingParams
from eyas.errors import CheckpointError, ConfigError
from eyas.train.corpus import Corpus, choose_vocabulary, coverage, pack, plan_passes
from eyas.train.data import ChatPieces, TextConfig, normalise, read_turns, trim_loop, write_text
from eyas.train.evaluate import context_prompts, evaluate, measure

END = 0
"""End of turn; 1 begins one; words follow."""


class WordTokenizer:
    """Words and newlines are tokens; `<e>` ends a turn, `<b>` begins one; `<s>` leads a prompt."""

    eos_ids: tuple[int, ...] = (END,)

    def __init__(self) -> None:
        self.words = ["<e>", "<b>", "<s>"]

    def encode(self, text: str) -> list[int]:
        """The special leading token, then one id a word."""
        return [2, *self.plain(text)]

    def plain(self, text: str) -> list[int]:
        """One id a word or newline."""
        ids = []
        for word in re.findall(r"\n|<.>|[^\s<]+", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Words with spaces, special ones left out."""
        return " ".join(self.words[i] for i in ids if i > 2)

    def chat_text(self, messages: Sequence[dict[str, Any]]) -> str:
        """A ChatML-like template with a default system turn."""
        turns = [{"role": "system", "content": "be kind"}, *messages]
        text = "".join(f"<b>{m['role']}\n{m['content']}<e>\n" for m in turns)
        return text + "<b>assistant\n"

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of `chat_text`."""
        return self.plain(self.chat_text(messages))


@dataclass
class Made:
    """An output of the scripted writer."""

    token_ids: list[int]
    finish_reason: str
    accept_lengths: list[int]


class ScriptedWriter:
    """User turns are `question K ...`; answers `answer to <last word of the question> ...`."""

    def __init__(self) -> None:
        self.tokenizer = WordTokenizer()
        self.count = 0
        self.calls: list[list[tuple[list[int], SamplingParams]]] = []

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: bool = False,
    ) -> list[Made]:
        """Write what the prompt's last header asks for."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        lists = [[int(i) for i in p] for p in prompts]
        self.calls.append(list(zip(lists, each, strict=True)))
        return [self.one(ids, p) for ids, p in zip(lists, each, strict=True)]

    def one(self, ids: list[int], params: SamplingParams) -> Made:
        """One request."""
        tokenizer = self.tokenizer
        header = len(ids) - 1 - ids[::-1].index(1)
        if tokenizer.words[ids[header + 1]] == "user":
            self.count += 1
            number = self.count // 2  # every turn is written twice: duplicates must go
            written = tokenizer.plain(f"question about things number {number} please")
        else:
            written = tokenizer.plain("this is an answer that explains it at some length")
        written = [*written, END]
        if params.max_tokens < len(written):
            return Made(written[: params.max_tokens], "length", [1])
        return Made(written, "stop", [2, 3, 1, 5])


def settings(folder: Path, **changes: Any) -> TextConfig:
    """A tiny amount of text."""
    base: dict[str, Any] = {
        "folder": str(folder),
        "conversations": 40,
        "round_size": 16,
        "max_length": 300,
        "long_share": 0.3,
        "opening_share": 0.0,
    }
    return TextConfig(**(base | changes))


def write(folder: Path, **changes: Any) -> tuple[ScriptedWriter, Corpus]:
    """Everything a run writes."""
    writer = ScriptedWriter()
    path = folder / "text.safetensors"
    rounds = list(write_text(writer, settings(folder, **changes), path))
    loaded = Corpus.load(path)
    for name in ("tokens", "mask", "offsets"):
        assert np.array_equal(getattr(loaded, name), getattr(rounds[-1], name))
    return writer, loaded


def texts(writer: ScriptedWriter, corpus: Corpus) -> list[str]:
    """Documents as text, special tokens included."""
    words = writer.tokenizer.words
    return [" ".join(words[i] for i in corpus.document(d)[0]) for d in range(len(corpus))]


def test_conversations_follow_the_template_and_mask_answers(tmp_path: Path) -> None:
    writer, corpus = write(tmp_path)
    assert len(corpus) > 10
    answer = "this is an answer that explains it at some length <e>"
    turn = r"<b> user \n question about things number \d+ please <e> \n "
    turn += rf"<b> assistant \n {answer}"
    whole = re.compile(rf"<b> system \n be kind <e> \n {turn}( \n {turn})*")
    for index, text in enumerate(texts(writer, corpus)):
        assert whole.fullmatch(text), text
        tokens, mask = corpus.document(index)
        words = writer.tokenizer.words
        written = " ".join(words[i] for i in tokens[mask])
        assert written == " ".join([answer] * text.count(answer))
    firsts = [re.findall(r"number (\d+)", text)[0] for text in texts(writer, corpus)]
    assert len(set(firsts)) == len(firsts), "a user turn begins one conversation only"
    assert corpus.lengths.max() >= 84, "a share of the conversations must have grown"
    assert corpus.lengths.max() <= 300


def test_prompts_match_the_tokenizers_chat(tmp_path: Path) -> None:
    """What training shows the target is what serving shows it, special tokens included."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "  Tell me of far lands "}) + "\n")
    writer, _ = write(tmp_path, prompts=(str(prompts),), conversations=0)
    ((ids, params),) = writer.calls[0]
    assert ids == writer.tokenizer.chat([{"role": "user", "content": "Tell me of far lands"}])
    assert params.max_tokens == 300 - len(ids)


def test_excluded_turns_are_never_answered(tmp_path: Path) -> None:
    exclude = tmp_path / "eval.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "Question about things, number 3 please!"},
        {"turns": ["Tell me of far lands", "QUESTION about  things number 5 please"]},
        {"conversations": [{"role": "user", "content": "question about things number 7 please"}]},
    ]
    exclude.write_text("\n".join(map(json.dumps, rows)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "tell me of FAR lands?"}\n{"prompt": "Tell me of near lands"}\n')
    changes = {"exclude": (str(exclude),), "prompts": (str(prompts),)}
    writer, corpus = write(tmp_path, **changes)
    seen = "\n".join(texts(writer, corpus))
    for banned in ("number 3 ", "number 5 ", "number 7 ", "far", "FAR"):
        assert banned not in seen
    assert "number 4 " in seen
    assert "near lands" in seen


def test_temperatures_and_seeds(tmp_path: Path) -> None:
    writer, _ = write(tmp_path, conversations=200, round_size=100, long_share=0.0)
    params = [p for call in writer.calls for _, p in call]
    answers = [p.temperature for p in params if p.max_tokens != 160]
    greedy = sum(t == 0 for t in answers) / len(answers)
    assert 0.3 < greedy < 0.7, "5 sigma around one half for 90 draws"
    assert {0.0, 0.5, 0.7, 1.0} == set(answers)
    seeds = [p.seed for p in params]
    assert len(set(seeds)) == len(seeds)


def test_time_limit_stops_between_rounds(tmp_path: Path) -> None:
    writer, _ = write(tmp_path, write_minutes=1e-9, conversations=1000)
    assert len(writer.calls) == 1


def test_chat_pieces_refuse_a_template_that_treats_turns_unlike() -> None:
    class Odd(WordTokenizer):
        def chat_text(self, messages: Sequence[dict[str, Any]]) -> str:
            last = messages[-1]["content"]
            return "history " * len(messages) + last + " answer:"

    with pytest.raises(CheckpointError, match="wrapped alike"):
        ChatPieces.of(Odd())


def test_trim_loop() -> None:
    head = list(range(100, 150))
    assert trim_loop(head) == head
    assert trim_loop(head + [7] * 40) == [*head, 7, 7]
    assert trim_loop(head + [1, 2, 3] * 20) == head + [1, 2, 3] * 2
    assert trim_loop(head + [1, 2, 3] * 3) == head + [1, 2, 3] * 3, "too short to be a loop"
    cycle = list(range(30))
    assert trim_loop(head + cycle * 5) == head + cycle * 2
    assert trim_loop(head + cycle * 3) == head + cycle * 3
    assert trim_loop([]) == []


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n')
    assert read_turns(path) == [["a"], ["b", "c"]]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        read_turns(path)
    with pytest.raises(CheckpointError, match="readable"):
        read_turns(tmp_path / "none.jsonl")
    assert normalise(" What's  this?\n") == normalise("what s THIS")


def test_corpus_file_is_small_and_checked(tmp_path: Path) -> None:
    corpus = Corpus.of([([1, 2, 3], [False, True, True]), ([49_151], [True])])
    path = tmp_path / "deep" / "text.safetensors"
    corpus.save(path, {"model": "tiny"})
    again = Corpus.load(path)
    assert again.document(1)[0].tolist() == [49_151]
    assert again.mask.tolist() == [False, True, True, True]
    path.write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="readable"):
        Corpus.load(path)
    with pytest.raises(ConfigError, match="held-out"):
        corpus.split(2)


def test_vocabulary_is_the_most_frequent_written_tokens_ascending() -> None:
    corpus = Corpus.of([([9, 9, 9, 5, 5, 7, 2, 2, 2, 2], [True] * 6 + [False] * 4)])
    assert choose_vocabulary(corpus, 10, 2).tolist() == [5, 9]
    assert choose_vocabulary(corpus, 10, 5).tolist() == [0, 1, 5, 7, 9], "lowest unused ids fill up"
    assert coverage(corpus, torch.tensor([5, 9])) == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="draft_vocab_size=11"):
        choose_vocabulary(corpus, 10, 11)


def test_passes_hold_every_document_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    plans = [plan_passes(lengths, 100, seed=3, epoch=e) for e in (0, 0, 1)]
    for plan in plans:
        assert sorted(np.concatenate(plan).tolist()) == list(range(200))
        assert all(lengths[ids].sum() <= 100 for ids in plan)
    assert all(np.array_equal(a, b) for a, b in zip(plans[0], plans[1], strict=True))
    assert not np.array_equal(np.concatenate(plans[0]), np.concatenate(plans[2]))
    waste = 1 - lengths.sum() / (100 * len(plans[0]))
    assert waste < 0.25


def test_pack_lays_out_documents_and_loss() -> None:
    corpus = Corpus.of([([5, 6, 7, 8], [False, False, True, True]), ([9, 10], [True, True])])
    batch = pack(
        corpus, np.asarray([1, 0]), rows=11, skip=2, device=torch.device("cpu"), backend="loop"
    )
    assert batch.tokens.tolist() == [9, 10, 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert batch.docs.lengths == (2, 4, 4, 1)
    assert batch.docs.starts.tolist() == [0, 2, 6, 10, 11]
    assert batch.predicted.tolist() == [4, 5], "document 1 is too short for two draft steps"
    assert batch.num_tokens == 6


def test_evaluation_counts_cycles_by_position_and_context() -> None:
    writer = ScriptedWriter()
    prompt = writer.tokenizer.chat([{"role": "user", "content": "word " * 492}])
    assert len(prompt) == 507
    report = measure(writer, [prompt], SamplingParams(max_tokens=99), depth=4)
    assert report["accept_length"] == 2.75
    assert report["acceptance_by_position"] == [0.75, 0.6667, 0.5, 1.0]
    assert {k: v["cycles"] for k, v in report["by_context"].items()} == {
        "0..512": 2,
        "512..1024": 2,
    }


def test_evaluation_prompts_come_from_files_and_held_out_text(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "question.jsonl").write_text('{"turns": ["one two three", "four"]}\n')
    corpus = Corpus.of([([5, 6, 7, 8, 9, 3], [False, False, True, True, False, True])])
    assert context_prompts(corpus, 5, 9) == [[5, 6, 7, 8, 9], [5, 6]]
    assert context_prompts(corpus, 5, 4) == [[5, 6]], "longer ones leave no room for an answer"
    writer = ScriptedWriter()
    held_out = Corpus.of([(writer.tokenizer.plain("<b>assistant\nyes"), [False] * 3 + [True])])
    files = [str(folder / "question.jsonl")]
    params = SamplingParams(max_tokens=64)
    report = evaluate(writer, files, held_out, params=params, depth=4, longest=999)
    assert set(report) == {"gsm8k/question", "held_out"}
    assert report["gsm8k/question"]["prompts"] == 1


def test_merged_text_holds_every_document_once() -> None:
    """Texts of several runs are mixed; nothing is lost, and a document keeps its own mask."""
    first = Corpus.of([([1, 2, 3], [False, True, True]), ([4], [True])])
    second = Corpus.of([([5, 6], [False, False])])
    merged = Corpus.merge([first, second], seed=3)
    found = sorted((ids.tolist(), mask.tolist()) for ids, mask in map(merged.document, range(3)))
    assert found == [
        ([1, 2, 3], [False, True, True]),
        ([4], [True]),
        ([5, 6], [False, False]),
    ]


def test_prompt_rows_end_at_newlines_alone(tmp_path: Path) -> None:
    """A line separator inside a JSON string does not end the row."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n{"prompt": "three"}\n', encoding="utf-8")
    assert read_turns(path) == [["one\u2028two"], ["three"]]


def test_prompt_file_of_other_encoding_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are the user's to mend, not a stack trace."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(CheckpointError, match="UTF-8"):
        read_turns(path)
