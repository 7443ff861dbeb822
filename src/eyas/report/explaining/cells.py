"""Measured times, counts and floors side by side: one row a stage and component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.report.components import DEVICE, STAGES
from eyas.report.traces.account import OTHER


def cells(
    stages: Mapping[str, Any],
    counts: Mapping[str, Mapping[str, Mapping[str, float]]],
    launches: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """Rows of `stage`, `component`, `ms`, `launches`, `gb`, `gflop`, `floor_ms`, `over_floor`.

    What nothing counts is None. `launches` are kernels on a GPU, operators on a CPU.
    """
    rows = []
    for stage in (*STAGES, OTHER):
        measured = stages.get(stage, {}).get("components", {})
        counted = counts.get(stage, {})
        for part in DEVICE:
            if part not in measured and part not in counted:
                continue
            ms, known = measured.get(part, 0.0), counted.get(part)
            floor = known["floor_ms"] if known else None
            rows.append(
                {
                    "stage": stage,
                    "component": part,
                    "ms": ms,
                    "launches": launches.get((stage, part)),
                    "gb": known["gb"] if known else None,
                    "gflop": known["gflop"] if known else None,
                    "floor_ms": floor,
                    "over_floor": ms / floor if floor else None,
                }
            )
    return rows


def floors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Floors by component, of a whole cycle."""
    found: dict[str, float] = {}
    for row in rows:
        if row["floor_ms"]:
            found[row["component"]] = found.get(row["component"], 0.0) + row["floor_ms"]
    return found
