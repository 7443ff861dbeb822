"""When the kernels of a stream have their turn: what counts where kernels are launched early.

With programmatic dependent launch a kernel may begin while the one before it in its stream still
runs (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"). A profile shows
both from start to end, so the wait of the second counts as its work. It cannot have done its work
before those it follows had ended; what it fetches ahead is a gain, not its time. So a kernel's own
time counts from the later of its start and the end of all that began before it in its stream.

Knows streams as the profile names them: branches that a profile puts in one stream wait here too.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from eyas.report.traces.trace import Floats, Trace, Work


def turns(work: Work) -> tuple[Floats, Floats]:
    """Start and duration, us, of each kernel's turn; none overlaps another of its stream.

    A kernel that ends before those it follows has a turn of no length.
    """
    start, end = work.start.copy(), work.end
    for stream in np.unique(work.stream):
        own = np.flatnonzero(work.stream == stream)
        ended = np.maximum.accumulate(end[own])
        start[own[1:]] = np.maximum(start[own[1:]], ended[:-1])
    return start, np.maximum(end - start, 0.0)


def in_turn(trace: Trace) -> Trace:
    """The trace with each kernel as long as its turn, in the same order.

    Gaps between kernels, and what runs at once on several streams, stay as they were.
    """
    start, dur = turns(trace.work)
    return dataclasses.replace(trace, work=dataclasses.replace(trace.work, start=start, dur=dur))


def waits(work: Work, chosen: np.ndarray) -> float:
    """us that chosen kernels wait, while they run, for those before them in their stream."""
    return float((work.dur - turns(work)[1])[chosen].sum())
