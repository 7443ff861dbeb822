"""Prompts answered step by step, with the time each step took.

One clock serves the bench, the demo and the streaming commands: the sum of the engine's own steps,
so that two engines may take turns and each still shows its own time. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from eyas.config import SamplingParams
from eyas.engine.engine import Engine
from eyas.engine.request import FinishReason, Request, Status
from eyas.spans import NoSpans, StageClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step."""

    seconds: float
    """Wall time; a step ends with its tokens on the host, so the device has been waited for."""
    tokens: int
    """Tokens written, all requests together."""
    decoding: bool
    """Whether the step was one cycle over every unfinished request, without prefill."""
    stages_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds by stage under `staged`; `host` is what the other stages leave of the step."""


class Answering:
    """Some prompts being answered together by one engine that does nothing else meanwhile."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        stream: bool = False,
    ) -> None:
        """Checks every prompt before the first is queued; raises `RequestError`."""
        for prompt, one in zip(prompts, params, strict=True):
            engine.check(prompt, one)
        self.engine = engine
        self.requests: list[Request] = [
            engine.add(prompt, one, stream) for prompt, one in zip(prompts, params, strict=True)
        ]
        self.steps: list[Step] = []
        self.first_token_seconds: list[float | None] = [None] * len(self.requests)
        self.seconds = 0.0
        self._shown = 0

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return all(r.status is Status.FINISHED for r in self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(len(r.output) for r in self.requests)

    def step(self) -> None:
        """Run one engine step."""
        unfinished = [r for r in self.requests if r.status is not Status.FINISHED]
        decoding = all(r.status is Status.RUNNING for r in unfinished)
        before = self.num_tokens
        start = perf_counter()
        self.engine.step()
        seconds = perf_counter() - start
        self.seconds += seconds
        for i, request in enumerate(self.requests):
            if request.output and self.first_token_seconds[i] is None:
                self.first_token_seconds[i] = self.seconds
        self.steps.append(
            Step(
                seconds=seconds,
                tokens=self.num_tokens - before,
                decoding=decoding,
                stages_ms=self._stages(seconds * 1e3),
            )
        )

    def run(self) -> Answering:
        """Step until every request has ended."""
        while not self.done:
            self.step()
        return self

    def new_text(self) -> str:
        """What the first prompt's answer has gained since the last call; needs `stream`."""
        request, start = self.requests[0], self._shown
        self._shown = max(start, request.safe_text_length())
        return request.text[start : self._shown]

    def abort(self) -> None:
        """End what is unfinished."""
        for request in self.requests:
            self.engine.abort(request)

    def decode_rate(self) -> float | None:
        """Tokens per second of the steps without prefill; None if there was none."""
        steps = [s for s in self.steps if s.decoding]
        seconds = sum(s.seconds for s in steps)
        return sum(s.tokens for s in steps) / seconds if seconds > 0 else None

    def end_to_end_rate(self) -> float:
        """Tokens per second from the first step to the last, prefill included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def accept_lengths(self) -> list[int]:
        """Tokens committed by each cycle, bonus included.

        The last cycle of an answer counts what was accepted, though a token limit cut it; where a
        stop inside it cut it, it is left out: behind the stop there is no text to agree on.
        """
        lengths: list[int] = []
        for request in self.requests:
            own = request.accept_lengths
            cut = sum(own) + 1 + request.num_preemptions > len(request.output)
            stopped = request.finish_reason is FinishReason.STOP
            lengths += own[:-1] if stopped and cut else own
        return lengths

    def _stages(self, step_ms: float) -> dict[str, float]:
        clock = self.engine.runner.spans
        if not isinstance(clock, StageClock):
            return {}
        stages = {name: sum(spans) for name, spans in clock.milliseconds().items()}
        stages.pop("host", None)
        return stages | {"host": step_ms - sum(stages.values())}


@contextmanager
def staged(engine: Engine) -> Iterator[None]:
    """Within it, steps of `engine` record their stages."""
    engine.runner.spans = StageClock(engine.runner.device)
    try:
        yield
    finally:
        engine.runner.spans = NoSpans()
