"""Verify that attends as decode does beside verify that attends as prefill does, by context."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.config import SpeculationConfig
from gpu_parts.builds import Builds
from gpu_parts.goals import Row, row
from gpu_parts.record import NO_TIME, Record
from gpu_parts.timing import running, step_ms, verify_ms

CONTEXTS = (512, 8192, 32768)
MODES = ("decode", "prefill")
DRAFTS = 3
STEPS = 20
ROOM = 512
"""Positions behind the longest prompt."""
LONG_SECONDS = 15.0
"""What a context may take at most, about."""


def modes(shape: str, builds: Builds, record: Record) -> Iterator[Row]:
    """One request: a verify pass and a cycle of either mode, and the ratio of the modes."""
    longest = max(CONTEXTS) + ROOM
    if builds.target(shape).max_position < longest:
        record.skip(f"{shape} attention modes", f"it has no {longest} positions")
        return
    config = builds.config(1, context_length=longest)
    for context in CONTEXTS:
        if not record.clock.fits(LONG_SECONDS):
            record.skip(f"{shape} attention modes C={context}", NO_TIME)
            continue
        verify = f"{shape} verify({DRAFTS + 1}) B=1 C={context}"
        cycle = f"{shape} K={DRAFTS} B=1 C={context}"
        for mode in MODES:
            spec = SpeculationConfig.chain(DRAFTS, attention_mode=mode)
            engine = builds.engine(shape, spec, config)
            with running(engine, 1, context) as requests:
                yield row(named(cycle, mode), step_ms(engine, STEPS))
                value = verify_ms(engine, [requests[0].slot], DRAFTS + 1)
                yield row(named(verify, mode), value)
        for name in (verify, cycle):
            own, other = (record.value(named(name, mode)) for mode in MODES)
            if own and other:
                yield row(f"{named(name, MODES[1])} / as decode", other / own, "x")


def named(name: str, mode: str) -> str:
    """A figure's name; that of the usual mode is the plain one."""
    return name if mode == MODES[0] else f"{name} as {mode}"
