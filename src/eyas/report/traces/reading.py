"""A trace file into columns; see `trace.py`.

A file holds one rank, or several devices of one process, or processes merged into one file whose
numbers SGLang marks, as `[TP01] 4711`. Each device of each process becomes a `Trace`. Fifty bytes a
kernel are kept, whatever else the file holds. Field names are Kineto's (pytorch/kineto,
output_json.cpp).
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import RecordError
from eyas.report.traces.events import REMEDY, TraceEvents
from eyas.report.traces.trace import Calls, Floats, Ints, Kind, Spans, Trace, Work

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


MERGED = re.compile(r"\[[^\]]*\]")
"""Mark of a process in a file that several were merged into."""


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
    if not any(process.devices for process in reader.processes.values()):
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


class _Process:
    """What one process of a file did."""

    def __init__(self) -> None:
        self.devices: dict[int, _Columns] = {}
        self.calls, self.spans = _Columns(2, 2), _Columns(2, 1)
        self.threads: Counter[str] = Counter()


class _Reader:
    """Sorts events into columns."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.kinds: dict[Kind, int] = {}
        self.processes: defaultdict[str, _Process] = defaultdict(_Process)
        self.count = self.odd = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Keep what matters of one event."""
        self.count += 1
        category = event.get("cat")
        merged = MERGED.match(str(event.get("pid")))
        process = merged.group(0) if merged else ""
        if category is None:
            if event.get("name") == "thread_name":
                self.processes[process].threads[str(_arguments(event).get("name"))] += 1
            return
        category = str(category).lower()
        if event.get("ph") != "X" or category not in WORK | CALLS | SPANS:
            return
        try:
            times = float(event["ts"]), float(event["dur"])
            self._keep(self.processes[process], category, event, times)
        except (KeyError, TypeError, ValueError):
            self.odd += 1

    def _keep(
        self,
        process: _Process,
        category: str,
        event: Mapping[str, Any],
        times: tuple[float, float],
    ) -> None:
        if not all(map(math.isfinite, times)) or times[1] < 0:
            raise ValueError("no time")
        name, arguments = str(event["name"]), _arguments(event)
        if category in WORK:
            device = int(arguments.get("device", event.get("pid", 0)))
            stream = int(arguments.get("stream", event.get("tid", 0)))
            kind = Kind(name, tuple(arguments.get("grid", ())), _message(arguments))
            number = self.kinds.setdefault(kind, len(self.kinds))
            columns = process.devices.setdefault(device, _Columns(2, 3))
            columns.add(times, (stream, number, int(arguments.get("correlation", -1))))
        elif category in SPANS:
            process.spans.add(times, (self._name(name),))
        elif LAUNCH.match(name) or SYNC.match(name):
            correlation = int(arguments.get("correlation", -1))
            process.calls.add(times, (self._name(name), correlation))

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def traces(self, path: Path, events: TraceEvents) -> list[Trace]:
        """What was read, as one trace a device of each process."""
        names, kinds = list(self.names), list(self.kinds)
        zero = min(
            (
                min(columns.doubles[0])
                for p in self.processes.values()
                for columns in (p.calls, p.spans, *p.devices.values())
                if columns.doubles[0]
            ),
            default=0.0,
        )
        found = [
            (label, device, process)
            for label, process in sorted(self.processes.items())
            for device in sorted(process.devices)
        ]
        ranks = _ranks(path, events.header, [(label, device) for label, device, _ in found])
        shared = {label: _host(p, names, zero) for label, p in self.processes.items()}
        return [
            Trace(
                path=path,
                rank=rank,
                world_size=max(_world_size(events.header), len(found)),
                gpu=_gpu(events.header, device),
                process=_thread(process.threads),
                names=names,
                kinds=kinds,
                work=_work(process, device, zero),
                calls=shared[label][0],
                spans=shared[label][1],
                notes=_notes(path, events, self.odd),
            )
            for rank, (label, device, process) in zip(ranks, found, strict=True)
        ]


def _host(process: _Process, names: list[str], zero: float) -> tuple[Calls, Spans]:
    """Calls and spans of a process."""
    (call_start, call_dur), (call_name, _) = process.calls.arrays()
    (span_start, span_dur), (span_name,) = process.spans.arrays()
    is_graph = np.array([bool(GRAPH.match(n)) for n in names] or [False], dtype=np.bool_)
    is_sync = np.array([bool(SYNC.match(n)) for n in names] or [False], dtype=np.bool_)
    calls = Calls(
        start=call_start - zero,
        dur=call_dur,
        name=call_name,
        graph=is_graph[call_name],
        sync=is_sync[call_name],
    )
    return calls, Spans(start=span_start - zero, dur=span_dur, name=span_name)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _message(arguments: Mapping[str, Any]) -> int:
    """Bytes that a collective sends, 0 if this is none."""
    count = arguments.get("In msg nelems")
    if not isinstance(count, int):
        return 0
    return count * ITEM_BYTES.get(str(arguments.get("dtype")), 0)


def _work(process: _Process, device: int, zero: float) -> Work:
    (start, dur), (stream, kind, own) = process.devices[device].arrays()
    _, (_, correlation) = process.calls.arrays()
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


def _ranks(path: Path, header: Mapping[str, Any], devices: list[tuple[str, int]]) -> list[int]:
    """Ranks of a file's (process, device)s: as marks or the file say, or as they are numbered."""
    if len(devices) > 1:
        marked = [re.search(r"\d+", label) for label, _ in devices]
        ranks = [int(m.group(0)) if m else d for m, (_, d) in zip(marked, devices, strict=True)]
        return ranks if len(set(ranks)) == len(ranks) else list(range(len(devices)))
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


def _thread(names: Mapping[str, int]) -> str:
    """The host thread that a trace is of: the one named most, streams aside."""
    threads = [n for n in names if n.startswith("thread")]
    found = re.search(r"\((.+)\)", max(threads, key=lambda n: names[n])) if threads else None
    return found.group(1).strip() if found else ""
