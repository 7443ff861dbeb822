"""The starting case: a verify of three tokens at 29 or 19 ms where decode takes 12, taken apart.

SGLang with Kimi-K2.5 over 8 x RTX PRO 6000 (PCIe) decoded in 12 ms and verified three tokens in 29,
after another start in 19. The planner predicts what such passes take from public constants of the
hardware, says which all-reduce or host stall the rest needs, and is held against every public
figure that it can express. Everything is computed from the presets; the page is written from the
record.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eyas.estimate import SGLANG, Prediction, Scenario, predict
from eyas.hardware import HardwareProfile, load_profile
from eyas.operations import BEHIND_MLP
from eyas.report import published
from eyas.report.published import CLIFF, NO_PEER, TUNED, UNTUNED, Figure, kimi
from eyas.report.records import stamped, value_text
from eyas.report.whatif import breakdown, plan

DRAFTS, ACCEPTED = 2, 2.0
"""Of the starting case: three rows a verify, about two tokens a cycle."""
DECODE_MS = 12.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A verify as it was observed, and the rate that went with it."""

    what: str
    verify_ms: float
    tok_per_s: float


OBSERVED = (
    Observed(
        "slow start: 29 .. 30 ms a cycle, 96 .. 97 % of it verify; 59 .. 61 tok/s", 28.5, 60.0
    ),
    Observed("earlier start: about 19 ms verify, 20 ms a cycle; 94 tok/s", 19.0, 94.0),
)
GROUPS: tuple[tuple[str, Callable[[], Iterable[Figure]]], ...] = (
    ("vLLM, three drafts, the whole verify in a graph", published.full_graph),
    ("Plain decoding", published.decoding),
    ("Several requests, no speculation", published.batches),
    ("Keys of a request shared among ranks", published.shared_keys),
    ("Three drafts in other settings", published.speculating),
    ("Engines on one H200", published.peers),
)


def starting_case() -> dict[str, Any]:
    """The record: terms, what the observations need, predictions beside public figures."""
    scenario = kimi(drafts=DRAFTS, accepted=ACCEPTED)
    found = predict(scenario)
    groups = {title: [_beside(figure) for figure in figures()] for title, figures in GROUPS}
    values = {
        "decode_ms": found.decode_ms,
        "verify_ms": found.verify.us / 1e3,
        "cycle_ms": found.cycle_ms,
        "tok_per_s": found.tok_per_s,
        "breakdown": breakdown(found),
        "decode_ms_with_triton": predict(scenario.change(latent_us=published.TRITON_MLA)).decode_ms,
        "all_reduces": all_reduces(found),
        "all_reduce_us": {n: _reduce_us(scenario, n) for n in (1, DRAFTS + 1)},
        "most_all_reduce_us": _most_reduce_us(scenario, found),
        "needed": [needed(observed, scenario, found) for observed in OBSERVED],
        "profiles": [_on_profile(name) for name in (TUNED, UNTUNED, NO_PEER, CLIFF)],
        "contexts": [_context(n) for n in (113, 1900)],
        "figures": groups,
        "left_out": [{"what": what, "why": why} for what, why in published.LEFT_OUT],
        "rows": plan(scenario)["rows"],
        "constants": _constants(load_profile(TUNED)),
        "engine": scenario.software.source,
    }
    return stamped("starting-case", values)


def all_reduces(found: Prediction) -> int:
    """All-reduces behind attention and MLP in one pass."""
    behind = (
        line.op for line in found.verify.lines if line.op.name.startswith("all-reduce behind")
    )
    return sum(op.times for op in behind)


def _reduce_us(scenario: Scenario, rows: int) -> float:
    message = rows * scenario.target.hidden_size * 2
    kind = scenario.software.all_reduce
    return scenario.profile.all_reduce_us(scenario.setting.ranks, message, kind)


def _most_reduce_us(scenario: Scenario, found: Prediction) -> float:
    """What an all-reduce of decode takes at most, if decode takes `DECODE_MS` in all."""
    count = all_reduces(found)
    rest = found.decode_ms - count * _reduce_us(scenario, 1) / 1e3
    return (DECODE_MS - rest) / count * 1e3


def needed(observed: Observed, scenario: Scenario, found: Prediction) -> dict[str, Any]:
    """What the observed verify has over the predicted one, and the rate that follows from it."""
    over = observed.verify_ms - found.verify.us / 1e3
    cycle = found.cycle_ms + over
    count = all_reduces(found)
    each = _reduce_us(scenario, DRAFTS + 1)
    return {
        "what": observed.what,
        "verify_ms": observed.verify_ms,
        "over_ms": over,
        "all_reduce_us": each + over / count * 1e3,
        "times": 1 + over / count * 1e3 / each,
        "stall_ms": over,
        "cycle_ms": cycle,
        "tok_per_s": scenario.accept_length / cycle * 1e3,
        "observed_tok_per_s": observed.tok_per_s,
        "accept_length_needed": observed.tok_per_s * cycle / 1e3,
    }


def _on_profile(name: str) -> dict[str, Any]:
    best = SGLANG if name == NO_PEER else published.SGLANG_BOX
    scenario = kimi(name, best, drafts=DRAFTS, accepted=ACCEPTED)
    found = predict(scenario)
    behind = next(line for line in found.verify.lines if line.op.name == BEHIND_MLP)
    return {
        "profile": name,
        "machine": scenario.profile.machine,
        "decode_ms": found.decode_ms,
        "verify_ms": found.verify.us / 1e3,
        "all_reduce_us": behind.us / behind.op.times,
        "tok_per_s": found.tok_per_s,
    }


def _context(positions: int) -> dict[str, Any]:
    found = predict(kimi(drafts=DRAFTS, accepted=ACCEPTED, context=positions))
    return {"context": positions, "cycle_ms": found.cycle_ms, "tok_per_s": found.tok_per_s}


def _beside(figure: Figure) -> dict[str, Any]:
    """`error` is against the middle of a published range."""
    value = figure.quantity(predict(figure.scenario))
    return {
        "what": figure.what,
        "low": figure.low,
        "high": figure.high,
        "unit": figure.unit,
        "predicted": value,
        "error": value / figure.middle - 1,
        "source": figure.source,
    }


def errors(record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Group -> (median, worst) of the errors' sizes."""
    found = {}
    for title, rows in record["figures"].items():
        sizes = [abs(row["error"]) for row in rows]
        found[title] = (statistics.median(sizes), max(sizes))
    return found


def _constants(profile: HardwareProfile) -> list[dict[str, Any]]:
    record = profile.to_json()
    rows = [
        {"name": name, "value": value_text(entry["value"]), "source": entry["source"]}
        for name, entry in record["constants"].items()
    ]
    for table in record["collectives"]:
        if table["ranks"] == profile.num_devices:
            name = f"all-reduce, {table['kind']}, {table['ranks']} ranks, us by bytes"
            rows.append({"name": name, "value": value_text(table["us"]), "source": table["source"]})
    return rows
