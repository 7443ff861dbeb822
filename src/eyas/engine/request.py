"""A request: its tokens, where it stands, and how it ends.

Only the scheduler changes a request. Ends are found here token by token: what a cycle committed
behind a stop is never appended, so it is neither shown, counted nor cached.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from eyas.config import SamplingParams, require_request
from eyas.tokenizer import Detokenizer


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, kw_only=True)
class Request:
    """One prompt and what has been written behind it."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int
    """Most tokens of prompt and output together."""
    detokenizer: Detokenizer | None
    """Present where text is wanted token by token (stop strings, streaming)."""
    output: list[int] = field(default_factory=list)
    text: str = ""
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int = -1
    ticket: int = -1
    """Number of its present stay in a slot: results of an earlier stay do not count."""
    num_coming: int = 0
    """Most tokens that steps still under way may bring."""
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    """Tokens each cycle committed, bonus included, before any cut at the end."""
    num_preemptions: int = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def kv_len(self) -> int:
        """Committed KV positions of a running request: all tokens but the root."""
        return self.length - 1

    @property
    def most_kv_len(self) -> int:
        """Bound on the KV positions that count, with everything under way committed."""
        longest = min(self.max_length, len(self.prompt) + self.params.max_tokens)
        return min(self.length + self.num_coming, longest) - 1

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at sequence indices [start, end)."""
        split = len(self.prompt)
        head = self.prompt[start : min(end, split)]
        return head + tuple(self.output[max(start - split, 0) : max(end - split, 0)])

    def append(self, token: int) -> None:
        """Append one token and see whether the request ends with it."""
        assert self.finish_reason is None, f"request {self.id} has ended"
        self.output.append(token)
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
            self._end_text("")
        elif self.detokenizer is not None and self._hits_stop(self.detokenizer.step(token)):
            self.finish_reason = FinishReason.STOP
        elif len(self.output) >= self.params.max_tokens or self.length >= self.max_length:
            self.finish_reason = FinishReason.LENGTH
            if self.detokenizer is not None and self._hits_stop(self.detokenizer.flush()):
                self.finish_reason = FinishReason.STOP

    def _end_text(self, piece: str) -> None:
        if self.detokenizer is not None:
            self.text += piece + self.detokenizer.flush()

    def _hits_stop(self, piece: str) -> bool:
        """Extend the text; cut it before the first stop string and say whether there was one."""
        longest = max((len(s) for s in self.params.stop), default=0)
        since = max(len(self.text) - longest + 1, 0)
        self.text += piece
        found = [at for at in (self.text.find(s, since) for s in self.params.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def safe_text_length(self) -> int:
        """Characters that no later token can turn into part of a stop string."""
        if self.finish_reason is not None:
            return len(self.text)
        held = 0
        for stop in self.params.stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held


def check_params(params: SamplingParams) -> None:
    """Raise `RequestError` for a value of a type that would fail only inside a step."""
    types: dict[str, tuple[type, str]] = dict.fromkeys(
        ("top_k", "max_tokens", "seed"), (Integral, "an integer")
    )
    types |= dict.fromkeys(("temperature", "top_p", "min_p"), (Real, "a number"))
    types |= dict.fromkeys(("stop", "stop_token_ids"), (Sequence, "a tuple"))
    for name, (kind, rule) in types.items():
        value = getattr(params, name)
        require_request(
            (isinstance(value, kind) and not isinstance(value, str))
            or (name, value) == ("seed", None),
            f"{name}={value!r}",
            f"must be {rule}",
            "mend its type",
        )
    require_request(
        params.top_k < 2**31, f"top_k={params.top_k}", "must be below 2**31", "give 0 to keep all"
    )
    require_request(
        all(isinstance(s, str) for s in params.stop),
        f"stop={params.stop!r}",
        "must hold strings",
        "give texts; tokens go to stop_token_ids",
    )
    require_request(
        all(isinstance(t, Integral) for t in params.stop_token_ids),
        f"stop_token_ids={params.stop_token_ids!r}",
        "must hold integers",
        "give token ids; texts go to stop",
    )
