"""From which cycle on a run is steady, and what its start would have told.

A run is steady from the first cycle on whose neighbours take what the second half takes. Pure
functions of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from eyas.report.explaining.workload import Step

WINDOW = 5
"""Cycles whose median must agree with the second half's."""
AGREES = 0.1
FEWEST = 16
"""Cycles before anything is said to be steady."""
BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Upper ends of ranges of context length."""


def steady_from(ms: Sequence[float]) -> int | None:
    """Index of the first steady cycle; None if there is none yet."""
    if len(ms) < FEWEST:
        return None
    usual = median(ms[len(ms) // 2 :])
    for i in range(len(ms) // 2 + 1):
        here = median(ms[i : i + WINDOW])
        if abs(here - usual) <= AGREES * usual and abs(ms[i] - usual) <= 3 * AGREES * usual:
            return i
    return None


def startup(steps: Sequence[Step], start: int | None) -> dict[str, Any]:
    """What came before the steady state, and how far it was from it."""
    ms = [step.ms for step in steps]
    early, late = steps[:start], steps[start:] if start is not None else []
    record: dict[str, Any] = {
        "steady_from": start,
        "cycles": len(steps),
        "early_cycles": len(early),
        "early_ms": median(s.ms for s in early) if early else None,
        "slowest_early_ms": max((s.ms for s in early), default=None),
        "steady_ms": median(s.ms for s in late) if late else median(ms) if ms else None,
        "early_tok_per_s": rate(early),
        "steady_tok_per_s": rate(late),
    }
    return record | {"words": _words(record)}


def _words(found: dict[str, Any]) -> str:
    if found["steady_from"] is None:
        return f"No steady state in {found['cycles']} cycles: a busy machine?"
    if not found["early_cycles"]:
        return "Steady from the first cycle on."
    plural = "s" if found["early_cycles"] > 1 else ""
    return (
        f"Start-up: the first {found['early_cycles']} cycle{plural} took "
        f"{found['early_ms']:.2f} ms (up to {found['slowest_early_ms']:.2f}), "
        f"{found['early_tok_per_s']:.1f} tok/s, where the steady ones take "
        f"{found['steady_ms']:.2f} ms, {found['steady_tok_per_s']:.1f} tok/s."
    )


def rate(steps: Sequence[Step]) -> float | None:
    """Tokens per second of steps, all requests together."""
    seconds = sum(s.ms for s in steps) / 1e3
    return sum(s.tokens for s in steps) / seconds if seconds > 0 else None


def figures(steps: Sequence[Step]) -> dict[str, Any]:
    """Rate, median cycle and tokens a cycle of each request."""
    return {
        "cycles": len(steps),
        "tok_per_s": rate(steps),
        "cycle_ms": median(s.ms for s in steps),
        "accept_length": sum(s.tokens for s in steps) / sum(s.requests for s in steps),
    }


def by_context(steps: Sequence[Step], plain: Sequence[Step]) -> list[dict[str, Any]]:
    """Rows of ranges of context length, those of plain decoding beside; `context` is the mean."""
    rows = []
    for low, high in zip((0, *BUCKETS), BUCKETS, strict=False):
        own = [s for s in steps if low <= s.context < high]
        if not own:
            continue
        beside = [s for s in plain if low <= s.context < high]
        row = {"context": sum(s.context for s in own) / len(own), "from": low, "to": high}
        rows.append(row | figures(own) | {"plain_tok_per_s": rate(beside)})
    return rows


def by_batch(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Rows by requests that ran together."""
    sizes = sorted({s.requests for s in steps})
    return [{"batch": n} | figures([s for s in steps if s.requests == n]) for n in sizes]
