"""A cycle of a CPU's engine taken apart: watched cycles beside ones that nobody watches.

Watched and unwatched cycles take turns within the same answers. A cycle's cells are means over the
quieter watched cycles, since other processes only ever add; what it takes is the same mean of the
unwatched ones, so that the cost of watching shows as what the parts have too much. Nothing is
scaled. Cycles are taken until both means are known well enough, or for three times as long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from eyas.engine.engine import Engine
from eyas.report.components import DECODE, DEVICE, HOST, IDLE, STAGES, VERIFY
from eyas.report.explaining.log import Log, Segment, bars, collectives, events, segments
from eyas.report.explaining.ranges import watched
from eyas.report.explaining.workload import Step, Workload
from eyas.spans import NoSpans

BLOCK = 4
"""Cycles of a kind before the other kind has its turn; the first one of a turn warms up."""
QUIET = 0.05, 0.45
"""The share of cycles by length that means are over."""
PRECISE, LONGEST = 0.005, 3
"""Noise that is small enough; times as many cycles at most."""
RESAMPLED = 100
"""Times that cycles are drawn anew to see how much their mean varies."""


T = TypeVar("T", Step, "Watched")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A cycle that was watched."""

    noted: list[Any]
    """See `Log`."""
    launch: int
    """Which step of the workload it was."""

    @property
    def ms(self) -> float:
        """From the first mark to the last."""
        return float(self.noted[-2] - self.noted[1]) / 1e6

    def segments(self) -> list[Segment]:
        """The cycle in segments."""
        return segments(events(self.noted))

    def collectives_ms(self) -> list[float]:
        """Of each of its collectives, in order."""
        return collectives(events(self.noted))


@contextmanager
def logged(engine: Engine, log: Log) -> Iterator[None]:
    """Within it, steps of `engine` are noted in `log`."""
    with watched(engine.runner.parts, log):
        engine.runner.spans = log
        try:
            yield
        finally:
            engine.runner.spans = NoSpans()


def sample(workload: Workload, count: int) -> tuple[list[Step], list[Watched]]:
    """At least `count` unwatched cycles of the whole group and as many watched ones, in turns."""
    plain: list[Step] = []
    seen: list[Watched] = []
    size = max(len(prompts) for prompts, _ in workload.groups)
    while not _enough(plain, seen, count):
        for i in range(BLOCK):
            step = workload.step()
            if i and step is not None and step.requests == size:
                plain.append(step)
        log = Log()
        with logged(workload.engine, log):
            for i in range(BLOCK):
                log.mark(None)
                step = workload.step(watched=True)
                log.mark(None)
                noted = log.take()
                if not i or step is None or step.requests != size:
                    continue
                seen.append(Watched(noted=noted, launch=workload.launches - 1))
    return plain, seen


def _enough(plain: Sequence[Step], seen: Sequence[Watched], count: int) -> bool:
    fewest = min(len(plain), len(seen))
    if fewest < count or fewest >= LONGEST * count:
        return fewest >= count
    return noise(plain, seen) < PRECISE


def noise(plain: Sequence[Step], seen: Sequence[Watched]) -> float:
    """How far the difference of watched and unwatched cycles may be off by chance, as a share.

    One standard deviation, by drawing cycles anew (Efron's bootstrap).
    """
    generator = np.random.default_rng(0)
    variance = 0.0
    for found in (plain, seen):
        ms = np.array([one.ms for one in found])
        drawn = np.sort(generator.choice(ms, (RESAMPLED, len(ms))), axis=1)
        low, high = (round(share * len(ms)) for share in QUIET)
        means = drawn[:, low:high].mean(axis=1)
        variance += float((means.std() / means.mean()) ** 2)
    return variance**0.5


def quieter(found: Sequence[T]) -> list[T]:
    """Cycles of the quieter half, the very quickest left out."""
    ordered = sorted(found, key=lambda one: one.ms)
    low, high = (round(share * len(ordered)) for share in QUIET)
    return ordered[low:high]


def account(plain: Sequence[Step], seen: Sequence[Watched], single: bool) -> dict[str, Any]:
    """The cycle's parts under the keys of `eyas trace`; `single`: verify is a decode step."""
    chosen, quiet = quieter(seen), quieter(plain)
    cycle = sum(one.ms for one in quiet) / len(quiet)
    cells, idle, gaps = _sums(chosen, single)
    stages: dict[str, Any] = {}
    for name in STAGES:
        parts = {part: cells[name, part] for part in DEVICE if cells[name, part] > 0}
        if parts or idle[name] > 0:
            device = sum(parts.values())
            stages[name] = {"device_ms": device, "idle_ms": idle[name], "components": parts}
    device = sum(one["device_ms"] for one in stages.values())
    idle_ms = sum(idle.values())
    components = {
        part: sum(one["components"].get(part, 0.0) for one in stages.values()) for part in DEVICE
    }
    watched_ms = sum(one.ms for one in chosen) / len(chosen)
    return {
        "cycle_ms": cycle,
        "device_ms": device,
        "busy_ms": device,
        "overlap_ms": 0.0,
        "idle_ms": idle_ms,
        "idle": {"host": idle_ms},
        "components": {part: ms for part, ms in components.items() if ms > 0},
        "stages": stages,
        "gaps": gaps,
        "unexplained_ms": cycle - device - idle_ms,
        "unexplained_fraction": (cycle - device - idle_ms) / cycle,
        "classified_fraction": 1.0,
        "watching": {
            "how": "ranges around the engine's own functions, watched and unwatched cycles in turn",
            "watched_ms": watched_ms,
            "unwatched_ms": cycle,
            "overhead": watched_ms / cycle - 1,
            "noise": noise(plain, seen),
            "watched_cycles": len(seen),
            "unwatched_cycles": len(plain),
        },
        "timeline": _timeline(chosen),
    }


def _sums(
    chosen: Sequence[Watched], single: bool
) -> tuple[Counter[tuple[str, str]], Counter[str], list[dict[str, Any]]]:
    """ms of each (stage, component); idle ms before each stage's work; gaps, longest first."""
    cells: defaultdict[tuple[str, str], float] = defaultdict(float)
    idle: defaultdict[str, float] = defaultdict(float)
    gaps: defaultdict[tuple[str, str], float] = defaultdict(float)
    number: Counter[tuple[str, str]] = Counter()

    def named(stage: str) -> str:
        return DECODE if single and stage == VERIFY else stage

    each = 1e6 * len(chosen)
    for one in chosen:
        for segment in one.segments():
            stage, after = named(segment.stage), named(segment.following)
            if segment.part == IDLE:
                idle[HOST] += segment.length / each
                continue
            cells[stage, segment.part] += (segment.length - segment.waited) / each
            if segment.waited:
                idle[after] += segment.waited / each
                gaps[stage, after] += segment.waited / each
                number[stage, after] += 1
    found = [
        {"from": a, "to": b, "cause": "host", "ms": ms, "count": number[a, b] / len(chosen)}
        for (a, b), ms in sorted(gaps.items(), key=lambda item: -item[1])
    ]
    return Counter(cells), Counter(idle), found


def _timeline(chosen: Sequence[Watched]) -> dict[str, Any]:
    """The cycle of median length as bars."""
    one = sorted(chosen, key=lambda w: w.ms)[len(chosen) // 2]
    return {"length_ms": one.ms, "streams": {"0": bars(one.segments())}}
