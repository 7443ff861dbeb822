"""Names for the parts of a cycle, shared by every record, table and picture.

A component says what a kernel is for, a stage says which step of the cycle it belongs to.
"""

from __future__ import annotations

ALL_REDUCE = "all-reduce"
ATTENTION = "attention"
MOE = "MoE"
DENSE = "dense linear"
NORM = "norm/rope/elementwise"
KV_WRITE = "KV write"
LM_HEAD = "LM head"
SAMPLING = "sampling/acceptance"
METADATA = "metadata"
COPIES = "copies"
UNKNOWN = "unknown"
GRAPH_LAUNCH = "graph launch"
IDLE = "idle"

DEVICE = (
    ALL_REDUCE,
    ATTENTION,
    MOE,
    DENSE,
    NORM,
    KV_WRITE,
    LM_HEAD,
    SAMPLING,
    METADATA,
    COPIES,
    UNKNOWN,
)
"""Components a device spends time in, in the order they are shown."""

COMPONENTS = (*DEVICE, GRAPH_LAUNCH, IDLE)
"""All of them; `all-reduce` stands for every collective."""

PREFILL, DRAFT, VERIFY, DECODE, ACCEPT, COMMIT, EXTEND, COLLECT, HOST = (
    "prefill",
    "draft",
    "verify",
    "decode",
    "accept",
    "commit",
    "extend",
    "collect",
    "host",
)
STAGES = (PREFILL, DRAFT, VERIFY, DECODE, ACCEPT, COMMIT, EXTEND, COLLECT, HOST)
"""Stages in the order they are shown."""
