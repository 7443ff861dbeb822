"""Accept length of an exported drafter, measured by the engine itself.

Prompt files give accept length by task, held-out conversations by context length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eyas.config import SamplingParams
from eyas.train.corpus import Corpus
from eyas.train.data import read_turns

BUCKET = 512
"""Tokens of context per row of the report."""


class Chat(Protocol):
    """What is asked of a tokenizer."""

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, generation prompt included."""


class Answer(Protocol):
    """A finished request."""

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens committed by each cycle."""


class Speculator(Protocol):
    """What is asked of the engine."""

    @property
    def tokenizer(self) -> Chat:
        """The target's tokenizer."""

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams,
        progress: bool = False,
    ) -> Sequence[Answer]:
        """Answer all prompts, in order."""


def context_prompts(corpus: Corpus, per_bucket: int, longest: int) -> list[list[int]]:
    """Prefixes of conversations up to an answer: at most `per_bucket` per `BUCKET` of context.

    None is longer than `longest` tokens.
    """
    found: dict[int, list[list[int]]] = {}
    for index in range(len(corpus)):
        tokens, mask = corpus.document(index)
        begins = np.flatnonzero(mask & ~np.concatenate(([True], mask[:-1])))
        for end in begins[begins <= longest][::-1]:
            kept = found.setdefault(int(end) // BUCKET, [])
            if len(kept) < per_bucket:
                kept.append([int(t) for t in tokens[:end]])
    return [prompt for bucket in sorted(found) for prompt in found[bucket]]


def measure(
    llm: Speculator, prompts: list[list[int]], params: SamplingParams, depth: int
) -> dict[str, Any]:
    """Accept length of `prompts`: overall, by draft position, by context length.

    `acceptance_by_position[i]` is the share of cycles that accepted draft i among those that
    accepted all before it; the bonus token counts in `accept_length`.
    """
    answers = llm.generate(prompts, params, progress=True)
    lengths = [n for answer in answers for n in answer.accept_lengths]
    reached = [sum(n > i for n in lengths) for i in range(depth + 1)]
    by_context: dict[int, list[int]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        at = len(prompt)
        for n in answer.accept_lengths:
            by_context.setdefault(at // BUCKET * BUCKET, []).append(n)
            at += n
    return {
        "prompts": len(prompts),
        "cycles": len(lengths),
        "accept_length": _mean(lengths),
        "acceptance_by_position": [
            round(after / before, 4) if before else None
            for before, after in itertools.pairwise(reached)
        ],
        "by_context": {
            f"{start}..{start + BUCKET}": {"cycles": len(part), "accept_length": _mean(part)}
            for start, part in sorted(by_context.items())
        },
    }


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def evaluate(
    llm: Speculator,
    files: Sequence[str],
    held_out: Corpus | None,
    *,
    params: SamplingParams,
    depth: int,
    longest: int,
    per_bucket: int = 32,
) -> dict[str, Any]:
    """`measure` of the first turn of each row of every prompt file, and of held-out text.

    Held-out prompts have at most `longest` tokens, so that an answer fits the context.
    """
    report: dict[str, Any] = {}
    for file in files:
        turns = [row[0] for row in read_turns(Path(file))]
        prompts = [llm.tokenizer.chat([{"role": "user", "content": turn}]) for turn in turns]
        name = f"{Path(file).parent.name}/{Path(file).stem}"
        report[name] = measure(llm, prompts, params, depth)
    if held_out is not None:
        prompts = context_prompts(held_out, per_bucket, longest)
        report["held_out"] = measure(llm, prompts, params, depth)
    return report
