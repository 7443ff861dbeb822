"""Steps of an engine over prompts, one after the other, each with its time, tokens and context.

Prompts are answered in groups, over and over, for as long as somebody asks for steps. Time is that
of the host from the end of a step to the end of the next on a GPU, where steps overlap, and of the
step alone on a CPU, where they don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from eyas.config import SamplingParams, require_request
from eyas.engine.engine import Engine
from eyas.engine.request import Status
from eyas.report.answering import Answering

LEAST, SHORT = 8, 2
"""Steps without which an answer is short; times that all answers may be so, one after the other."""
Group = tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]
"""Prompts answered together, and their parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A cycle over all unfinished requests of a group, nothing else."""

    ms: float
    tokens: int
    requests: int
    context: float
    """Committed positions of a request, mean."""


class Workload:
    """Groups of prompts that an engine answers in turn."""

    def __init__(self, engine: Engine, groups: Sequence[Group]) -> None:
        self.engine, self.groups = engine, groups
        self.finished: list[Answering] = []
        self.steps: list[Step] = []
        """Every cycle that nobody watched, in order, by runs of a group."""
        self.launches = 0
        """Steps so far, of any kind."""
        self._answering: Answering | None = None
        self._short = 0
        self._next = 0
        self._end: float | None = None

    @property
    def overlaps(self) -> bool:
        """Whether the device works on while the host looks at results."""
        return self.engine.overlap

    @property
    def running(self) -> int:
        """Requests of the next step if it is a cycle over all that is unfinished; else 0."""
        run = self._answering
        unfinished = [r for r in run.requests if r.status is not Status.FINISHED] if run else []
        decoding = all(r.status is Status.RUNNING for r in unfinished)
        return len(unfinished) if decoding else 0

    def step(self, watched: bool = False) -> Step | None:
        """Run a step; None if it was no cycle over all that is unfinished, or has no time.

        Raises `RequestError` when answer after answer is too short to be looked at.
        """
        run = self._answering or self._begin()
        unfinished = [r for r in run.requests if r.status is not Status.FINISHED]
        decoding = all(r.status is Status.RUNNING for r in unfinished)
        context = [r.kv_len for r in unfinished]
        before = run.num_tokens
        start = perf_counter()
        run.step()
        self.launches += 1
        end = perf_counter()
        if self.overlaps and self._end is not None:
            start = self._end
        first, self._end = self._end is None, end
        if run.done:
            self._finish()
        if not decoding or (first and self.overlaps):
            return None
        step = Step(
            ms=(end - start) * 1e3,
            tokens=run.num_tokens - before,
            requests=len(context),
            context=sum(context) / len(context),
        )
        if not watched:
            self.steps.append(step)
        return step

    def pause(self) -> None:
        """Forget when the last step ended: something else is done before the next one."""
        self._end = None

    def close(self) -> None:
        """End what is unfinished."""
        if self._answering is not None:
            self._answering.abort()
            self._finish()
        self.engine.step()  # what is under way is collected

    def accept_lengths(self) -> list[int]:
        """Of every answer so far."""
        runs = [*self.finished, *filter(None, (self._answering,))]
        return [length for run in runs for length in run.accept_lengths()]

    def _begin(self) -> Answering:
        prompts, params = self.groups[self._next % len(self.groups)]
        self._next += 1
        self._answering = Answering(self.engine, prompts, params)
        self._end = None
        return self._answering

    def _finish(self) -> None:
        assert self._answering is not None, "something was being answered"
        run, self._answering = self._answering, None
        self.finished.append(run)
        self._short = self._short + 1 if len(run.steps) < LEAST else 0
        require_request(
            self._short <= SHORT * len(self.groups),
            f"answers of {max(len(r.output) for r in run.requests)} tokens",
            "end before there is a steady cycle to look at",
            "raise max_tokens, or go on past the end with ignore_eos",
        )
