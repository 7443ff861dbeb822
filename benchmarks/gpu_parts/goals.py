"""Figures by name, and what each is held against: goal, floor, best peer.

Floors are counts (weights and keys over the read bandwidth). Peers are SGLang 0.5.15.post1 and
vLLM 0.24.0, measured alone on one H200 in the same setting (`docs/performance.md`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

READ_BANDWIDTH = 4.39e12
"""Bytes a second that one H200 reads."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is held against, in its unit."""

    goal: float | None = None
    """At most this."""
    floor: float | None = None
    peer: float | None = None


BLANK = Goal()
GOALS = {
    "llama-3.1-8b decode B=1": Goal(4.30, 3.42, 4.78),
    "llama-3.1-8b K=3 B=1": Goal(4.90, 3.9, 5.80),
    "llama-3.1-8b K=7 B=1": Goal(5.50, None, 7.00),
    "llama-3.1-8b tree 5-4-16 B=1": Goal(5.6, None, 9.2),
    "llama-3.1-8b decode B=8": Goal(5.09 * 0.9, None, 5.09),
    "llama-3.1-8b K=3 B=8": Goal(6.17 * 0.9, None, 6.17),
    "llama-3.1-8b K=7 B=8": Goal(7.47 * 0.9, None, 7.47),
    "llama-3.1-8b decode B=32": Goal(5.72 * 0.9, None, 5.72),
    "llama-3.1-8b K=3 B=32": Goal(7.37 * 0.9, None, 7.37),
    "llama-3.1-8b K=7 B=32": Goal(10.74 * 0.9, None, 10.74),
    "llama-3.1-8b K=3 B=1 / decode": Goal(1.13, None, 1.19),
    "llama-3.1-8b K=7 B=1 / decode": Goal(1.28, None, 1.43),
    "llama-3.1-8b verify(4)/(1)": Goal(1.03),
    "llama-3.1-8b start to first token": Goal(20.0, None, 50.0),
    "llama-3.1-8b default graphs": Goal(15.0),
    "smollm2-135m decode B=1": Goal(0.80, None, 1.25),
    "smollm2-135m K=3 B=1": Goal(1.10, None, 2.97),
    "deepseek-v2-lite decode B=1": Goal(2.2, 1.12, 3.19),
    "deepseek-v2-lite K=3 B=1": Goal(4.2, 2.9, 6.63),
    "deepseek-v2-lite verify(4)/(1) over that of bytes": Goal(1.2),
}
"""Name of a row -> what it is held against: ms, seconds and ratios."""
PATTERNS = (
    (re.compile(r".* host gap"), Goal(3.0)),
    (re.compile(r".* eager cycles"), Goal(0.0)),
    (re.compile(r".* host waits"), Goal(0.0)),
    (re.compile(r".* copies to the host a step"), Goal(1.0)),
    (re.compile(r"attention .* N=\d+ .* / N=1"), Goal(1.15)),
    (re.compile(r".* 8-bit drafter, accept length lost"), Goal(1.0)),
    (re.compile(r".* texts that differ from one rank's"), Goal(0.0)),
    (re.compile(r".* ranks apart"), Goal(0.0)),
    (re.compile(r".* collectives off two a layer and two"), Goal(0.0)),
)
"""The same for rows of any shape: the first whose pattern is the whole name."""


def goal_of(name: str) -> Goal:
    """What the row `name` is held against."""
    if name in GOALS:
        return GOALS[name]
    return next((goal for pattern, goal in PATTERNS if pattern.fullmatch(name)), BLANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    floor: float | None = None
    peer: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        return None if self.goal is None else self.value <= self.goal


def row(name: str, value: float, unit: str = "ms") -> Row:
    """A figure beside its goals."""
    found = goal_of(name)
    return Row(
        name=name, value=value, unit=unit, goal=found.goal, floor=found.floor, peer=found.peer
    )
