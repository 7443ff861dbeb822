"""What it costs that rows depend on no other rows: `deterministic` on, auto and off.

On needs networks of its own; off changes trees alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_parts.builds import SPECS, Builds
from gpu_parts.goals import Row, row
from gpu_parts.record import Record
from gpu_parts.timing import running, step_ms, verify_ms

SETTINGS = ("auto", "off", "on")
TREE = "tree 5-4-16"
POINTS = (("decode", 512), ("K=3", 512), (TREE, 512), (TREE, 8192), (TREE, 32768))
"""(run, context)."""
NODES = 4
STEPS = 20
ROOM = 512
"""Positions behind the longest prompt."""


def deterministic(shape: str, setting: str, builds: Builds, record: Record) -> Iterator[Row]:
    """Steps and cycles of one request with one setting, and their ratio to auto's."""
    most = builds.target(shape).max_position
    points = [(run, context) for run, context in POINTS if context + ROOM <= most]
    longest = max(context for _, context in points) + ROOM
    config = builds.config(1, context_length=longest, deterministic=setting)
    for run, context in points:
        engine = builds.engine(shape, SPECS[run], config)
        with running(engine, 1, context) as requests:
            name = f"{shape} {run} B=1 C={context}"
            yield from _over_auto(name, setting, record, step_ms(engine, STEPS))
            if run == "decode":
                value = verify_ms(engine, [requests[0].slot], NODES)
                name = f"{shape} verify({NODES}) B=1 C={context}"
                yield from _over_auto(name, setting, record, value)


def _over_auto(name: str, setting: str, record: Record, value: float) -> Iterator[Row]:
    yield row(f"{name} deterministic {setting}", value)
    auto = record.value(f"{name} deterministic {SETTINGS[0]}")
    if auto and setting != SETTINGS[0]:
        yield row(f"{name} deterministic {setting} / {SETTINGS[0]}", value / auto, "x")
