"""What of a trace file matters, as columns: device work, calls of the host, named spans.

A file holds one rank, or several devices of one process; each becomes a `Trace`. Device work is
sorted by start. Times are microseconds since the first event kept. Fifty bytes a kernel are kept,
whatever else the file holds. Field names are Kineto's (pytorch/kineto, output_json.cpp).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eyas.errors import RecordError
from eyas.report.traces.events import REMEDY, TraceEvents

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
SPANS = {"user_annotation"}

GRAPH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
SYNC = re.compile(
    r"^(cuda|cu|hip)(Stream|Event|Device|Ctx)Synchronize|^(cuda|hip)Memcpy$|^cuMemcpy.*H_v2$"
)
LAUNCH = re.compile(r"^(cuda|cu|hip)\w*(Launch|Memcpy|Memset)")

ITEM_BYTES = {
    "BFloat16": 2,
    "Half": 2,
    "Float": 4,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
}
"""Bytes of an element by the type names of torch's `ParamCommsUtils.hpp`."""


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


def read_trace(path: Path) -> list[Trace]:
    """The traces of a file, one a device that did something, in order of device.

    Raises `RecordError` for a file that is no trace, or holds no device work.
    """
    events = TraceEvents(path)
    reader = _Reader()
    for event in events:
        reader.take(event)
    if "schema" in events.header:
        raise RecordError(str(path), f"is a record of {events.header['schema']}", REMEDY)
    if not reader.devices:
        where = f" ({events.ended})" if events.ended else ""
        raise RecordError(
            str(path),
            f"holds {reader.count} events and none is of a GPU{where}",
            "profile with ProfilerActivity.CUDA, and let the profiled run reach the GPU",
        )
    return reader.traces(path, events)


class _Columns:
    """Growing columns of equal length: doubles first, then integers."""

    def __init__(self, doubles: int, integers: int) -> None:
        self.doubles = [array("d") for _ in range(doubles)]
        self.integers = [array("q") for _ in range(integers)]

    def add(self, doubles: Iterable[float], integers: Iterable[int]) -> None:
        for column, value in zip(self.doubles, doubles, strict=True):
            column.append(value)
        for number, integer in zip(self.integers, integers, strict=True):
            number.append(integer)

    def arrays(self) -> tuple[list[Floats], list[Ints]]:
        floats = [np.array(c, dtype=np.float64) for c in self.doubles]
        return floats, [np.array(c, dtype=np.int64) for c in self.integers]


class _Reader:
    """Sorts events into columns."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.kinds: dict[Kind, int] = {}
        self.devices: dict[int, _Columns] = {}
        self.calls, self.spans = _Columns(2, 2), _Columns(2, 1)
        self.processes: dict[str, int] = {}
        self.count = self.odd = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep what matters of one event."""
        self.count += 1
        category = event.get("cat")
        if category is None:
            if event.get("name") == "thread_name":
                name = str(_arguments(event).get("name"))
                self.processes[name] = self.processes.get(name, 0) + 1
            return
        category = str(category).lower()
        if event.get("ph") != "X" or category not in WORK | CALLS | SPANS:
            return
        try:
            times = float(event["ts"]), float(event["dur"])
            self._keep(category, event, times)
        except (KeyError, TypeError, ValueError):
            self.odd += 1

    def _keep(self, category: str, event: Mapping[str, Any], times: tuple[float, float]) -> None:
        if not all(map(np.isfinite, times)) or times[1] < 0:
            raise ValueError("no time")
        name, arguments = str(event["name"]), _arguments(event)
        if category in WORK:
            device = int(arguments.get("device", event.get("pid", 0)))
            stream = int(arguments.get("stream", event.get("tid", 0)))
            kind = Kind(name, tuple(arguments.get("grid", ())), _message(arguments))
            columns = self.devices.setdefault(device, _Columns(2, 3))
            number = self.kinds.setdefault(kind, len(self.kinds))
            columns.add(times, (stream, number, int(arguments.get("correlation", -1))))
        elif category in SPANS:
            self.spans.add(times, (self._name(name),))
        elif LAUNCH.match(name) or SYNC.match(name):
            self.calls.add(times, (self._name(name), int(arguments.get("correlation", -1))))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def traces(self, path: Path, events: TraceEvents) -> list[Trace]:
        """What was read, as one trace a device."""
        names, kinds = list(self.names), list(self.kinds)
        (call_start, call_dur), (call_name, correlation) = self.calls.arrays()
        (span_start, span_dur), (span_name,) = self.spans.arrays()
        found = {device: columns.arrays() for device, columns in sorted(self.devices.items())}
        starts = [call_start, span_start, *(floats[0] for floats, _ in found.values())]
        zero = min(one.min() for one in starts if len(one))
        is_graph = np.array([bool(GRAPH.match(n)) for n in names], dtype=np.bool_)
        is_sync = np.array([bool(SYNC.match(n)) for n in names], dtype=np.bool_)
        calls = Calls(
            start=call_start - zero,
            dur=call_dur,
            name=call_name,
            graph=is_graph[call_name] if names else np.zeros(0, np.bool_),
            sync=is_sync[call_name] if names else np.zeros(0, np.bool_),
        )
        spans = Spans(start=span_start - zero, dur=span_dur, name=span_name)
        ranks = _ranks(path, events.header, list(found))
        return [
            Trace(
                path=path,
                rank=rank,
                world_size=max(_world_size(events.header), len(found)),
                gpu=_gpu(events.header, device),
                process=_process(self.processes),
                names=names,
                kinds=kinds,
                work=_work(columns, zero, correlation),
                calls=calls,
                spans=spans,
                notes=_notes(path, events, self.odd),
            )
            for rank, (device, columns) in zip(ranks, found.items(), strict=True)
        ]


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _message(arguments: Mapping[str, Any]) -> int:
    """Bytes that a collective sends, 0 if this is none."""
    count = arguments.get("In msg nelems")
    if not isinstance(count, int):
        return 0
    return count * ITEM_BYTES.get(str(arguments.get("dtype")), 0)


def _work(columns: tuple[list[Floats], list[Ints]], zero: float, correlation: Ints) -> Work:
    (start, dur), (stream, kind, own) = columns
    order = np.argsort(start, kind="stable")
    by_id = np.argsort(correlation, kind="stable")
    sorted_ids = correlation[by_id]
    call = np.full(len(own), -1, dtype=np.int64)
    if len(sorted_ids):
        place = np.minimum(np.searchsorted(sorted_ids, own), len(sorted_ids) - 1)
        known = (sorted_ids[place] == own) & (own > 0)
        call[known] = by_id[place[known]]
    return Work(
        start=start[order] - zero,
        dur=dur[order],
        stream=stream[order],
        kind=kind[order],
        call=call[order],
    )


def _notes(path: Path, events: TraceEvents, odd: int) -> list[str]:
    notes = []
    if events.ended:
        notes.append(f"{path.name}: {events.ended}; what follows is of the part that is there")
    if events.num_broken + odd:
        notes.append(f"{path.name}: {events.num_broken + odd} events could not be read")
    return notes


def _world_size(header: Mapping[str, Any]) -> int:
    info = header.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    return size if isinstance(size, int) and size > 0 else 1


def _ranks(path: Path, header: Mapping[str, Any], devices: list[int]) -> list[int]:
    """Ranks of the devices of a file: as it says, as its name says, or as devices are numbered."""
    if len(devices) > 1:
        return devices
    info = header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int) and _world_size(header) > 1:
        return [rank]
    named = re.search(r"(?:TP|rank)[-_]?(\d+)", path.name, flags=re.IGNORECASE)
    return [int(named.group(1)) if named else 0]


def _gpu(header: Mapping[str, Any], device: int) -> str:
    properties = header.get("deviceProperties")
    for one in properties if isinstance(properties, list) else []:
        if isinstance(one, dict) and one.get("id") == device:
            return str(one.get("name", ""))
    return ""


def _process(names: Mapping[str, int]) -> str:
    """The host thread that a trace is of: the one named most, streams aside."""
    threads = [n for n in names if n.startswith("thread")]
    found = re.search(r"\((.+)\)", max(threads, key=lambda n: names[n])) if threads else None
    return found.group(1).strip() if found else ""
