"""Training text as token ids: its file, its vocabulary, and packed passes.

A corpus holds documents and, per token, whether the target wrote it (the loss mask). A pass is a
fixed number of rows filled with whole documents; what is left over is padding without loss. The
order of documents is a pure function of (seed, epoch), so a run is resumed from counters alone.
It knows neither models nor devices beyond copying a pass to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eyas.attention.dense import Documents
from eyas.errors import CheckpointError, ConfigError

FORMAT = "eyas-corpus-1"
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents side by side; document d is `[offsets[d], offsets[d + 1])`."""

    tokens: NDArray[np.int32]
    """int32[total]."""
    mask: NDArray[np.bool_]
    """bool[total]: the target wrote this token."""
    offsets: Ints
    """int64[docs + 1]."""

    @classmethod
    def of(cls, documents: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Corpus:
        """Build from (tokens, mask) of each document."""
        tokens, mask, offsets = [], [], [0]
        for ids, written in documents:
            assert len(ids) == len(written), "a document's mask must cover its tokens"
            tokens.append(np.asarray(ids, dtype=np.int32))
            mask.append(np.asarray(written, dtype=np.bool_))
            offsets.append(offsets[-1] + len(ids))
        return cls(
            tokens=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            mask=np.concatenate(mask) if mask else np.zeros(0, np.bool_),
            offsets=np.asarray(offsets, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """(tokens, mask) of a document."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[span], self.mask[span]

    def split(self, held_out: int) -> tuple[Corpus, Corpus]:
        """(training, held out): the last documents are held out; they follow no order of kind."""
        if not 0 < held_out < len(self):
            raise ConfigError(
                f"{held_out} held-out documents of {len(self)}",
                "both parts need at least one document",
                "write more text or hold out fewer documents",
            )
        cut = len(self) - held_out
        edge = self.offsets[cut]
        first = Corpus(
            tokens=self.tokens[:edge], mask=self.mask[:edge], offsets=self.offsets[: cut + 1]
        )
        last = Corpus(
            tokens=self.tokens[edge:], mask=self.mask[edge:], offsets=self.offsets[cut:] - edge
        )
        return first, last

    @classmethod
    def merge(cls, parts: Sequence[Corpus], seed: int) -> Corpus:
        """All documents of `parts`, shuffled."""
        documents = [part.document(i) for part in parts for i in range(len(part))]
        order = np.random.default_rng(seed).permutation(len(documents))
        return cls(
            tokens=np.concatenate([documents[i][0] for i in order]),
            mask=np.concatenate([documents[i][1] for i in order]),
            offsets=np.cumsum([0, *(len(documents[i][0]) for i in order)]),
        )

    def save(self, path: Path, notes: dict[str, str]) -> None:
        """Write a safetensors file: uint16 tokens where they fit, packed mask, offsets."""
        small = self.tokens.size == 0 or int(self.tokens.max()) < 2**16
        arrays: dict[str, NDArray[np.generic]] = {
            "tokens": self.tokens.astype(np.uint16) if small else self.tokens,
            "mask": np.packbits(self.mask),
            "offsets": self.offsets,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(arrays, partial, metadata={"format": FORMAT, **notes})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote; raises `CheckpointError` for anything else."""
        try:
            with safe_open(path, framework="numpy") as file:
                found = (file.metadata() or {}).get("format")
                if found != FORMAT:
                    raise CheckpointError(
                        f"{path} of format {found!r}",
                        f"a corpus has format {FORMAT!r}",
                        "write it with `eyas train --stage data`",
                    )
                tokens = file.get_tensor("tokens").astype(np.int32)
                mask = np.unpackbits(file.get_tensor("mask"), count=tokens.size).astype(np.bool_)
                return cls(tokens=tokens, mask=mask, offsets=file.get_tensor("offsets"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: {error}", "the corpus must be readable", "write it again"
            ) from error


def choose_vocabulary(corpus: Corpus, vocab_size: int, draft_vocab_size: int) -> torch.Tensor:
    """Target ids int64[Vd] of the draft vocabulary, ascending.

    The most frequent tokens the target wrote; filled with the lowest unused ids when it wrote
    fewer kinds. Ties go to the lower id.
    """
    if draft_vocab_size > vocab_size:
        raise ConfigError(
            f"draft_vocab_size={draft_vocab_size}",
            f"must not exceed the target's {vocab_size} tokens",
            "give a smaller draft vocabulary",
        )
    counts = np.bincount(corpus.tokens[corpus.mask], minlength=vocab_size)
    ranked = np.argsort(-counts, kind="stable")[:draft_vocab_size]
    return torch.from_numpy(np.sort(ranked).astype(np.int64))


def coverage(corpus: Corpus, target_ids: torch.Tensor) -> float:
    """Share of the tokens the target wrote that lie in the draft vocabulary."""
    written = corpus.tokens[corpus.mask]
    return float(np.isin(written, target_ids.numpy()).mean()) if written.size else 0.0


def plan_passes(lengths: Ints, rows: int, seed: int, epoch: int) -> list[Ints]:
    """Document indices of each pass of an epoch: shuffled, then filled up to `rows` in order."""
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    passes: list[Ints] = []
    start, filled = 0, 0
    for place, length in enumerate(lengths[order]):
        if filled + length > rows:
            passes.append(order[start:place])
            start, filled = place, 0
        filled += int(length)
    passes.append(order[start:])
    return [ids for ids in passes if len(ids)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """T rows of whole documents on a device."""

    tokens: torch.Tensor
    """int64[T]."""
    positions: torch.Tensor
    """int64[T]: position within the document."""
    predicted: torch.Tensor
    """int64[M]: rows of the tokens that carry loss, ascending."""
    docs: Documents
    """Extent of each document, padding included."""
    num_tokens: int
    """Rows that are not padding."""


def pack(
    corpus: Corpus, ids: Ints, *, rows: int, skip: int, device: torch.device, backend: str
) -> Pass:
    """Lay documents `ids` into `rows` rows and copy them to `device` without waiting.

    A token carries loss if the target wrote it and its document holds at least `skip` tokens
    before it (row t at step s predicts token t + 2 + s, so `skip` = steps + 1 gives every step
    the same tokens). Padding is laid out as documents no longer than the longest.
    """
    lengths = [int(n) for n in corpus.lengths[ids]]
    used = sum(lengths)
    assert used <= rows, f"documents of {used} tokens do not fit {rows} rows"
    longest = max(lengths)
    left = rows - used
    padding = [longest] * (left // longest) + [left % longest] * (left % longest > 0)
    positions = np.concatenate([np.arange(n) for n in (*lengths, *padding)])
    tokens, mask = np.zeros(rows, np.int64), np.zeros(rows, np.bool_)
    parts = [corpus.document(int(i)) for i in ids]
    tokens[:used] = np.concatenate([part[0] for part in parts])
    mask[:used] = np.concatenate([part[1] for part in parts])
    predicted = np.flatnonzero(mask & (positions >= skip))
    arrays = (torch.from_numpy(a) for a in (tokens, positions, predicted))
    if device.type == "cuda":
        arrays = (a.pin_memory().to(device, non_blocking=True) for a in arrays)
    on_device = tuple(arrays)
    docs = Documents.of((*lengths, *padding), device, backend)
    return Pass(
        tokens=on_device[0],
        positions=on_device[1],
        predicted=on_device[2],
        docs=docs,
        num_tokens=used,
    )
