"""What of a trace matters, as columns: device work, calls of the host, named spans.

Device work is sorted by start. Times are microseconds since the first event of the file's that is
kept; a trace is one rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Kind(NamedTuple):
    """Device work that looks the same: one kernel in one shape."""

    name: str
    grid: tuple[int, ...]
    bytes: int
    """Bytes a collective sends, 0 where the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Kernels, copies and memsets of one device, by start; arrays of the same length."""

    start: Floats
    """us"""
    dur: Floats
    """us"""
    stream: Ints
    kind: Ints
    """index into `Trace.kinds`"""
    call: Ints
    """index into the `Calls` that launched it, -1 where the trace does not say"""

    @property
    def end(self) -> Floats:
        """us"""
        return self.start + self.dur


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the host asked for: launches, graph launches, copies, waits."""

    start: Floats
    """us"""
    dur: Floats
    """us"""
    name: Ints
    """index into `Trace.names`"""
    graph: npt.NDArray[np.bool_]
    sync: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Named spans of host code."""

    start: Floats
    """us"""
    dur: Floats
    """us"""
    name: Ints
    """index into `Trace.names`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's trace."""

    path: Path
    rank: int
    world_size: int
    gpu: str
    """Name of the device, empty where the trace does not say."""
    process: str
    """Name of the host's thread, empty where the trace does not say."""
    names: list[str]
    kinds: list[Kind]
    work: Work
    calls: Calls
    spans: Spans
    notes: list[str] = field(default_factory=list)
    """What is wrong with the file."""
