"""Which stage of a cycle each kernel belongs to, by the host's named spans or by structure.

Structure: an LM head ends a pass; passes with as many attention kernels as the target has layers
are the target's, shorter ones the drafter's. The first drafter pass behind a target pass extends,
later ones draft. What draws behind a target's LM head accepts. Spans, where they are, go first.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from eyas.report.components import (
    ACCEPT,
    ATTENTION,
    DECODE,
    DENSE,
    DEVICE,
    DRAFT,
    EXTEND,
    LM_HEAD,
    MOE,
    PREFILL,
    SAMPLING,
    STAGES,
    VERIFY,
)
from eyas.report.traces.trace import Ints, Trace

SPANS = (
    (r"^step\[(EXTEND|MIXED|PREFILL|SPLIT_PREFILL)\b", PREFILL),
    (r"^step\[DECODE\b", DECODE),
    (r"^step\[TARGET_VERIFY\b", VERIFY),
    (r"^step\[DRAFT_EXTEND|^draft_extend$", EXTEND),
    (r"^step\[DRAFT|^draft$", DRAFT),
)
"""Names of SGLang's spans (srt/model_executor/model_runner.py, srt/speculative)."""
CONTEXT = re.compile(r"^execute_context_\d+\((\d+)\)_generation_(\d+)\((\d+)\)")
"""Name of vLLM's spans (v1/worker): prompt tokens, requests past their prompt, their tokens."""
BATCH = re.compile(r"\bbs=(\d+)")
SPECULATES = re.compile(r"verify_?tree|tree_speculative|rejection", re.IGNORECASE)
SHORT = 0.4
"""A pass with fewer than this share of the most attention kernels is a drafter's; there is one to
every target pass in a speculative run, or nearly so."""
LONG = 1.5
"""A target pass of other matmuls than usual that takes this much longer is a prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Stages of a trace's kernels."""

    stage: Ints
    """int64[work]: index into `STAGES`, -1 where nothing tells"""
    target: Ints
    """int64: first kernel of each decode or verify pass that spans name, in order of start"""
    layers: int
    """Attention layers of a target pass; 0 if no pass was found."""
    batch: int | None
    """Requests in a pass; None if nothing tells."""
    nodes: float | None
    """Rows a request has in a verify pass; None if nothing tells."""


def staging(trace: Trace, code: Ints) -> Staging:
    """Stages of a trace whose kernels have the component indices `code`."""
    named, target, batch, nodes = _by_spans(trace)
    found, layers = _by_structure(trace, code, bool((named == STAGES.index(VERIFY)).any()))
    stage = np.where(named >= 0, named, found)
    return Staging(stage=stage, target=target, layers=layers, batch=batch, nodes=nodes)


def span_stage(name: str) -> tuple[str, int | None, float | None] | None:
    """Stage, requests and rows a request that a span's name tells; None for other names."""
    context = CONTEXT.match(name)
    if context:
        prompt, requests, tokens = map(int, context.groups())
        if prompt or not requests:
            return (PREFILL, None, None) if prompt else None
        return (VERIFY if tokens > requests else DECODE), requests, tokens / requests
    for pattern, stage in SPANS:
        if re.search(pattern, name):
            batch = BATCH.search(name)
            return stage, int(batch.group(1)) if batch else None, None
    return None


def _by_spans(trace: Trace) -> tuple[Ints, Ints, int | None, float | None]:
    """Stage of each kernel by the span that it was launched in, -1 outside; see `Staging`."""
    work, spans = trace.work, trace.spans
    stage = np.full(len(work.start), -1, dtype=np.int64)
    target: list[Ints] = []
    told = [(i, *found) for i, n in enumerate(trace.names) if (found := span_stage(n))]
    told = [one for one in told if (spans.name == one[0]).any()]
    # spans that hold others are longer: the inner ones overwrite them
    told.sort(key=lambda one: -float(spans.dur[spans.name == one[0]].mean()))
    known = np.flatnonzero(work.call >= 0)
    asked = trace.calls.start[work.call[known]]
    most, batch, nodes = 0, None, None
    for name, label, requests, rows in told:
        mine = np.flatnonzero(spans.name == name)
        mine = mine[np.argsort(spans.start[mine])]
        place = np.searchsorted(spans.start[mine], asked, side="right") - 1
        own = mine[np.maximum(place, 0)]
        inside = (place >= 0) & (asked < spans.start[own] + spans.dur[own])
        stage[known[inside]] = STAGES.index(label)
        if label in (DECODE, VERIFY):
            _, first = np.unique(place[inside], return_index=True)
            target.append(known[inside][first])
            if len(first) > most:
                most, batch, nodes = len(first), requests, rows
    firsts = np.sort(np.concatenate(target)) if target else np.zeros(0, np.int64)
    return stage, firsts, batch, nodes


def _by_structure(trace: Trace, code: Ints, speculates: bool) -> tuple[Ints, int]:
    """Stage of each kernel by the passes around it, and the target's attention layers."""
    work = trace.work
    stage = np.full(len(work.start), -1, dtype=np.int64)
    main = np.flatnonzero(work.stream == main_stream(trace))
    code = code[main]
    heads = np.flatnonzero(code == DEVICE.index(LM_HEAD))
    if not len(heads):
        return stage, 0
    tails = _tails(code, heads)
    starts = np.concatenate([[0], tails[:-1] + 1])
    attention = np.concatenate([[0], np.cumsum(code == DEVICE.index(ATTENTION))])
    depth = attention[heads + 1] - attention[starts]
    is_target = depth >= SHORT * depth.max()
    speculates |= bool((~is_target).sum() >= SHORT * is_target.sum())
    speculates |= any(SPECULATES.search(kind.name) for kind in trace.kinds)
    prompt = _prompts(trace, main, code, starts, heads, is_target)
    own = np.full(len(main), -1, dtype=np.int64)
    for i, (start, head, tail) in enumerate(zip(starts, heads, tails, strict=True)):
        behind_target = i > 0 and is_target[i - 1]
        if is_target[i]:
            label = PREFILL if prompt[i] else VERIFY if speculates else DECODE
        elif behind_target:
            label = PREFILL if prompt[i - 1] else EXTEND
        else:
            label = DRAFT
        own[start : head + 1] = STAGES.index(label)
        own[head + 1 : tail + 1] = STAGES.index(ACCEPT if label == VERIFY else label)
        if i:
            # what the last pass's graph still does belongs to that pass
            call = work.call[main[start - 1 : head + 1]]
            rest = int((call != call[0]).argmax()) - 1
            if rest > 0 and call[0] >= 0 and trace.calls.graph[call[0]]:
                own[start : start + rest] = own[start - 1]
    stage[main] = own
    # other streams do what the main stream is about
    others = np.flatnonzero(work.stream != main_stream(trace))
    before = np.searchsorted(work.start[main], work.start[others], side="right") - 1
    stage[others] = own[np.maximum(before, 0)]
    return stage, _layers(trace, main, code, starts[is_target], heads[is_target])


def _layers(trace: Trace, main: Ints, code: Ints, starts: Ints, heads: Ints) -> int:
    """How often the commonest attention kernel of most target passes runs in one."""
    names = [kind.name for kind in trace.kinds]
    found = []
    for start, head in zip(starts, heads, strict=True):
        inside = main[start : head + 1][code[start : head + 1] == DEVICE.index(ATTENTION)]
        count = Counter(names[kind] for kind in trace.work.kind[inside])
        found.append(max(count.values(), default=0))
    return Counter(found).most_common(1)[0][0]


def main_stream(trace: Trace) -> int:
    """The stream that works most."""
    streams, inverse = np.unique(trace.work.stream, return_inverse=True)
    return int(streams[np.bincount(inverse, weights=trace.work.dur).argmax()])


def _tails(code: Ints, heads: Ints) -> Ints:
    """Place of the last drawing kernel behind each LM head, before the next model kernel."""
    model = np.flatnonzero(np.isin(code, [DEVICE.index(n) for n in (DENSE, ATTENTION, MOE)]))
    stops = np.append(model, len(code))[np.searchsorted(model, heads)]
    stops = np.minimum(stops, np.append(heads[1:], len(code)))
    draws = np.concatenate([[-1], np.flatnonzero(code == DEVICE.index(SAMPLING))])
    last = draws[np.searchsorted(draws, stops) - 1]
    return np.maximum(last, heads)


def _prompts(
    trace: Trace, main: Ints, code: Ints, starts: Ints, heads: Ints, is_target: np.ndarray
) -> np.ndarray:
    """bool[passes]: target passes whose matmuls are others than usual, and that take longer."""
    mixed = np.random.default_rng(0).integers(1, 2**31, len(trace.kinds))
    names = {name: i for i, name in enumerate(sorted({k.name for k in trace.kinds}))}
    value = mixed[[names[kind.name] for kind in trace.kinds]][trace.work.kind[main]]
    value = np.where(code == DEVICE.index(DENSE), value, 0)
    sums = np.concatenate([[0], np.cumsum(value)])
    times = np.concatenate([[0], np.cumsum(trace.work.dur[main])])
    look = np.where(is_target, sums[heads + 1] - sums[starts], -1)
    took = times[heads + 1] - times[starts]
    looks, count = np.unique(look[is_target], return_counts=True)
    usual = is_target & (look == looks[count.argmax()])
    prompt: np.ndarray = is_target & ~usual & (took > LONG * np.median(took[usual]))
    return prompt
