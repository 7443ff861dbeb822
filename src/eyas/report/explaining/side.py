"""One engine taken apart: until it is steady, then timed, then counted.

On a CPU and on a GPU different clocks give the same keys (`host.py`, `device.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from time import perf_counter
from typing import Any

import numpy as np

from eyas.engine.engine import Engine
from eyas.engine.graphs import Reason
from eyas.engine.watching import RankNotes
from eyas.report.components import ALL_REDUCE, DECODE, VERIFY
from eyas.report.explaining import device, host
from eyas.report.explaining.counting import Counts, ExpertCounts, counting
from eyas.report.explaining.ranges import watched
from eyas.report.explaining.steady import steady_from
from eyas.report.explaining.workload import Group, Step, Workload
from eyas.report.traces.collectives import shares
from eyas.spans import NoSpans

MOST_CYCLES, MOST_SECONDS = 120, 8.0
"""How long a steady state is waited for."""
COUNTED = 4
"""Cycles whose operators and experts are counted."""


@dataclass(slots=True, kw_only=True)
class Side:
    """What was found of one engine."""

    workload: Workload
    values: dict[str, Any]
    """Keys of a cycle, as `eyas trace` has them."""
    quiet: list[Step]
    """Unwatched cycles that the cycle's time comes from."""
    steps: list[Step]
    """All unwatched cycles until then."""
    steady_from: int | None
    launches: dict[tuple[str, str], float]
    """Kernels, or operators on a CPU, by stage and component."""
    experts: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)

    @property
    def context(self) -> float:
        """Committed positions of a request, mean."""
        return mean(step.context for step in self.quiet)


def take_apart(engine: Engine, groups: Sequence[Group], count: int, folder: str) -> Side:
    """Run `engine` over `groups` and account for a cycle; traces go to `folder`."""
    workload = Workload(engine, groups)
    start = settle(workload)
    if engine.runner.device.type == "cuda":
        quiet, values, launches = device.take_apart(workload, count, folder)
    else:
        quiet, values = _on_a_cpu(workload, count, folder)
        launches = {}
    steps = list(workload.steps)
    counts, experts, cycles = count_work(workload)
    single = engine.speculation.num_nodes == 1
    if not launches:
        launches = {
            (_named(stage, single), part): n / cycles
            for (stage, part), n in counts.operators.items()
        }
    values["reads"] = {
        name: {"stage": _named(stage, single), "count": n / cycles}
        for (stage, name), n in counts.reads.items()
    }
    if values.get("copies_to_host") is None:
        values["copies_to_host"] = sum(one["count"] for one in values["reads"].values())
    values["graph_reasons"] = graph_reasons(engine)
    return Side(
        workload=workload,
        values=values,
        quiet=quiet,
        steps=steps,
        steady_from=start,
        launches=launches,
        experts=experts,
    )


def _named(stage: str, single: bool) -> str:
    return DECODE if single and stage == VERIFY else stage


def settle(workload: Workload) -> int | None:
    """Run until cycles are steady, or it has been tried for long; from which cycle on they are."""
    size = max(len(prompts) for prompts, _ in workload.groups)
    start = perf_counter()
    while True:
        whole = [step.ms for step in workload.steps if step.requests == size]
        found = steady_from(whole)
        late = len(whole) >= MOST_CYCLES or perf_counter() - start > MOST_SECONDS
        if (found is not None and len(whole) >= 2 * found) or late:
            return found
        workload.step()


def graph_reasons(engine: Engine) -> list[str]:
    """Why cycles ran without a graph, each with its number; staged ones are asked for."""
    counts = engine.runner.graphs.counts
    return [
        f"{key.value} ({n} cycles)"
        for key, n in counts.items()
        if isinstance(key, Reason) and key is not Reason.STAGED
    ]


def count_work(workload: Workload) -> tuple[Counts, dict[str, Any] | None, int]:
    """Operators, reads and experts of a few cycles, which run eagerly; and how many they were."""
    runner = workload.engine.runner
    experts, total, done = ExpertCounts(runner.parts), Counts(), 0
    size = max(len(prompts) for prompts, _ in workload.groups)
    workload.pause()
    with experts.counted():
        while done < COUNTED:
            counts = Counts()
            runner.spans = counts
            with watched(runner.parts, counts), counting(counts):
                step = workload.step(watched=True)
            runner.spans = NoSpans()
            whole = step is not None and step.requests == size
            experts.keep(whole)
            if not whole:
                continue
            done += 1
            total.operators += counts.operators
            total.reads += counts.reads
    workload.pause()
    return total, experts.record(), done


def _on_a_cpu(workload: Workload, count: int, folder: str) -> tuple[list[Step], dict[str, Any]]:
    runner = workload.engine.runner
    first = workload.launches
    runner.watch()
    quiet, seen = host.sample(workload, count)
    notes = runner.unwatch(folder)
    single = workload.engine.speculation.num_nodes == 1
    values = host.account(quiet, seen, single)
    timeline = values.pop("timeline")
    keys = ("cycle_ms", "device_ms", "idle_ms", "components")
    own = {"rank": 0, "timeline": timeline} | {key: values[key] for key in keys}
    values["ranks"] = [own, *(_rank(one) for one in notes)]
    values["collectives"] = _collectives(seen, notes, first)
    none = dict.fromkeys(("graph_fraction", "launches", "graph_launches", "copies_to_host"))
    return quiet, values | none | {"syncs": {}}


def _rank(notes: RankNotes) -> dict[str, Any]:
    """What another rank's clock said of a step."""
    took = [step.ms for step in notes.steps if step.collectives_ms]
    inside = [sum(step.collectives_ms) for step in notes.steps if step.collectives_ms]
    cycle, shared = (float(np.median(v)) if v else 0.0 for v in (took, inside))
    return {
        "rank": notes.rank,
        "timeline": None,
        "cycle_ms": cycle,
        "device_ms": cycle,
        "idle_ms": 0.0,
        "components": {ALL_REDUCE: shared},
    }


def _collectives(
    seen: Sequence[host.Watched], notes: Sequence[RankNotes], first: int
) -> dict[str, Any] | None:
    """Transfer and waiting of the watched cycles whose collectives match on all ranks."""
    tables = []
    for one in seen:
        own = one.collectives_ms() if notes else []
        others = [rank.steps[one.launch - first].collectives_ms for rank in notes]
        if own and {len(o) for o in others} == {len(own)}:
            tables.append(1e3 * np.array([own, *others]))
    if not tables:
        return None
    ranks = ["0", *(str(rank.rank) for rank in notes)]
    return shares(tables, ranks) | {"left_out": len(seen) - len(tables)}
