"""Collectives of several ranks, aligned: how long they transfer, how long ranks wait in them.

Ranks run the same collectives in the same order. In the k-th one every rank's kernel ends when all
have arrived and the data is there, so the rank that arrives last has the shortest kernel: that is
the transfer, and what another rank's kernel takes longer is its wait. Clocks are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eyas.report.components import ALL_REDUCE, DEVICE
from eyas.report.traces.cycles import Cycles
from eyas.report.traces.trace import Floats, Ints, Trace


def collectives(
    traces: Sequence[Trace], codes: Sequence[Ints], cycles: Sequence[Cycles | None]
) -> dict[str, Any] | None:
    """Transfer and waiting, in ms a cycle; None if there is one rank, or no collective.

    `transfer_ms` is the same for all ranks; `waiting_ms`, by rank, is spent in collectives until
    the last rank comes. `last` counts how often each rank came last, `caused_ms` for how long the
    others waited for it then. `aligned` collectives a cycle
    could be matched between ranks; a cycle whose ranks differ in their number is left out.
    """
    if len(traces) < 2 or any(c is None for c in cycles):
        return None
    found = [c for c in cycles if c is not None]
    num_cycles = min(len(c.steady) for c in found)
    # ranks may start to record within different cycles, but stop together
    tables = []
    for k in range(num_cycles, 0, -1):
        if all(c.steady[-k] for c in found):
            rows = [_of_cycle(*one, -k) for one in zip(traces, codes, found, strict=True)]
            if len({len(row) for row in rows}) == 1 and len(rows[0]):
                tables.append(np.stack(rows))
    if not tables:
        return None
    return shares(tables, [str(t.rank) for t in traces]) | {"left_out": num_cycles - len(tables)}


def shares(tables: Sequence[Floats], ranks: Sequence[str]) -> dict[str, Any]:
    """The figures of `collectives`, of tables [ranks, collectives] in us, one a cycle."""
    durations = np.concatenate(tables, axis=1)
    transfer = durations.min(axis=0)
    waiting = durations - transfer
    total = 1e3 * len(tables)
    late = durations.argmin(axis=0)
    last = Counter(late.tolist())
    caused = np.bincount(late, weights=waiting.max(axis=0), minlength=len(ranks))
    return {
        "aligned": durations.shape[1] / len(tables),
        "cycles": len(tables),
        "transfer_ms": float(transfer.sum()) / total,
        "waiting_ms": {r: float(w.sum()) / total for r, w in zip(ranks, waiting, strict=True)},
        "last": {r: last.get(i, 0) / durations.shape[1] for i, r in enumerate(ranks)},
        "caused_ms": {r: float(ms) / total for r, ms in zip(ranks, caused, strict=True)},
        "median_us": float(np.median(transfer)),
    }


def _of_cycle(trace: Trace, code: Ints, cycles: Cycles, k: int) -> Floats:
    """us of each collective of cycle `k`, counted from the end, in order of start."""
    own = slice(int(cycles.cuts[k - 1]), int(cycles.cuts[k:][0]))
    return trace.work.dur[own][code[own] == DEVICE.index(ALL_REDUCE)]


def latest(shared: Mapping[str, Any]) -> str:
    """The rank that others wait for most."""
    found: Mapping[str, float] = shared.get("caused_ms") or shared["last"]
    return max(found, key=lambda rank: found[rank])
