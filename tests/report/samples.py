"""Records of every kind, small and complete, for what reads them: pages, diffs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from eyas.report.foreign import analyse
from eyas.report.records import stamped
from tests.report.traces import writing as w


def bench_record() -> dict[str, Any]:
    """As `eyas bench` writes it."""
    acceptance = {
        "cycles": 40,
        "accept_length": 2.45,
        "acceptance_by_position": [0.8, 0.45, 0.2],
        "conditional_acceptance": [0.8, 0.5625, None],
    }
    plain = {"tok_per_s": 30.25, "end_to_end_tok_per_s": 29.0, "step_ms": 33.1, "tokens": 96}
    spec = {"tok_per_s": 67.5, "end_to_end_tok_per_s": 60.0, "step_ms": 36.3, "tokens": 96}
    stages = {"draft": 1.5, "verify": 31.0, "accept": 0.4, "commit": 0.3, "extend": 2.0}
    record = {
        "plain": plain | {"first_token_ms": 70.0},
        "spec": spec | {"first_token_ms": 71.0} | acceptance,
        "speedup": 2.23,
        "speedup_end_to_end": 2.07,
        "break_even": 1.1,
        "verify_over_decode": 1.02,
        "stages_ms": {
            "plain": {"verify": 30.3, "collect": 0.1, "host": 0.5},
            "spec": stages | {"collect": 0.2, "host": 0.9},
        },
        "histogram": [8, 14, 10, 8],
        "tokens_equal": True,
        "differing_pairs": [],
        "num_pairs": 4,
        "num_nodes": 4,
        "warmup": {},
        "flags": {"engine": {"dtype": "bfloat16", "tp": 1}, "model": "smollm2", "drafter": "auto"},
        "simulated": "",
        "seeds": [0, 1],
        "provenance": {"code": {"commit": "abc", "dirty": False}, "versions": {"torch": "2.13"}},
    }
    return stamped("bench", record)


def explain_record() -> dict[str, Any]:
    """As a run that was watched gives it, with floors and rates by context."""
    verify = {"attention": 0.4, "dense linear": 3.8, "all-reduce": 0.7, "LM head": 0.25}
    draft = {"dense linear": 0.3, "LM head": 0.13, "graph launch": 0.02}
    parts = {n: verify.get(n, 0.0) + draft.get(n, 0.0) for n in {**verify, **draft}}
    device = sum(parts.values())
    fingerprint = {"where": {"host": "a"}, "results": {"torch": "2.11"}, "speed": {"nccl": "2.28"}}
    record = {
        "cycle_ms": device + 0.3,
        "device_ms": device,
        "idle_ms": 0.3,
        "idle": {"host": 0.2, "inside graphs": 0.1},
        "components": parts,
        "floors": {"dense linear": 3.42, "attention": 0.1, "LM head": 0.3},
        "stages": {
            "verify": {"device_ms": sum(verify.values()), "idle_ms": 0.1, "components": verify},
            "draft": {"device_ms": sum(draft.values()), "idle_ms": 0.2, "components": draft},
        },
        "accept_length": 2.4,
        "classified_fraction": 0.99,
        "unexplained_fraction": 0.01,
        "graph_fraction": 0.98,
        "launches": 3.0,
        "graph_launches": 1.0,
        "syncs": {},
        "copies_to_host": 1.0,
        "cells": [
            {"stage": "verify", "component": "dense linear", "ms": 3.8, "launches": 64.0}
            | {"gb": 14.0, "gflop": 60.0, "floor_ms": 3.4, "over_floor": 1.12},
            {"stage": "draft", "component": "metadata", "ms": 0.02, "launches": None}
            | dict.fromkeys(("gb", "gflop", "floor_ms", "over_floor")),
        ],
        "by_batch": [
            {"batch": 1, "tok_per_s": 240.0, "cycle_ms": 6.1, "accept_length": 2.4},
            {"batch": 8, "tok_per_s": 1600.0, "cycle_ms": 7.0, "accept_length": 2.4},
        ],
        "ranks": [
            {
                "rank": 0,
                "timeline": {
                    "length_ms": 6.1,
                    "streams": {
                        "7": [
                            [0.0, 0.5, "dense linear", "draft", 3],
                            [0.6, 5.2, "attention", "verify", 60],
                        ]
                    },
                },
            }
        ],
        "gpu_state": {
            "clock_mhz": 1980,
            "most_mhz": 1980,
            "power_w": 410.0,
            "celsius": 45,
            "held_by": [],
        },
        "lesson": {
            "stages": {
                "draft": {"host_ms": 0.9, "true_ms": 0.5},
                "verify": {"host_ms": 1.1, "true_ms": 5.2},
            },
            "words": "A host clock around each stage sees launches, not work.",
        },
        "decode": {
            "cycle_ms": 5.0,
            "device_ms": 4.9,
            "idle_ms": 0.1,
            "components": {"dense linear": 4.0, "attention": 0.9},
            "stages": {"decode": {"device_ms": 4.9, "idle_ms": 0.1, "components": {}}},
        },
        "rows": [
            {"option": "as measured", "costs": "", "decode_ms": 5.0, "cycle_ms": 6.0}
            | {"tok_per_s": 240.0, "speedup": 1.2, "break_even": 1.2},
            {"option": "no idle time", "costs": "work on the host", "decode_ms": 5.0}
            | {"cycle_ms": 5.7, "tok_per_s": 252.0, "speedup": 1.26, "break_even": 1.14},
        ],
        "by_context": [
            {"context": 512, "tok_per_s": 240.0},
            {"context": 2048, "tok_per_s": 231.5},
            {"context": 8192, "tok_per_s": 201.0},
        ],
        "acceptance": {
            "acceptance_by_position": [0.7, 0.4, 0.3],
            "conditional_acceptance": [0.7, 0.57, 0.75],
            "histogram": [3, 3, 1, 3],
        },
        "context": {"median": 2048, "longest": 8192},
        "flags": {"engine": {"tp": 2}, "drafter": "auto"},
        "provenance": {
            "code": {"commit": "abc"},
            "ranks": {
                "fingerprints": [copy.deepcopy(fingerprint), copy.deepcopy(fingerprint)],
                "mismatches": [],
            },
        },
        "verdict": "Speculation pays: 2.40 tokens a cycle against 1.21.",
    }
    return stamped("explain", record)


def plan_record() -> dict[str, Any]:
    """As `eyas plan` writes it: sorted by gain, so that what was asked is not first."""
    rows = [
        {"option": "NVLink", "decode_ms": 9.0, "cycle_ms": 14.0, "tok_per_s": 131.0},
        {"option": "as asked", "decode_ms": 12.0, "cycle_ms": 29.0, "tok_per_s": 60.0},
        {"option": "no graphs", "decode_ms": 20.0, "cycle_ms": 45.0, "tok_per_s": None},
    ]
    rest = {"costs": "another machine", "speedup": 0.73, "break_even": 2.42}
    return stamped("plan", {"rows": [row | rest for row in rows], "verdict": "NVLink first."})


def trace_record(folder: Path) -> dict[str, Any]:
    """Of a speculative run beside plain decoding, with a kernel that no rule knows."""
    odd = w.sglang_cycles(host_gap=1500.0)
    odd.launch(w.K("mystery_kernel<with<a, long>, name>", 31.0))
    decode = w.sglang_decode().save(folder / "decode <1>.json.gz")
    return analyse([odd.save(folder / "spec.json"), decode], accept_length=2.5)


def ranks_record(folder: Path) -> dict[str, Any]:
    """Of three ranks."""
    recorders = enumerate(w.tensor_parallel(1, ranks=3))
    return analyse([r.save(folder / f"rank{i}.json") for i, r in recorders])
