"""Which component each kernel belongs to: by its name, and where that says little, by its place.

Place means order on the same stream. An LM head is the last matmul before a sampling kernel with no
attention between them. A generic kernel between two kernels of layers, or right before one, is
element-wise work of that layer; behind an LM head it belongs to sampling; elsewhere it prepares a
pass and is metadata.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.report.components import (
    ALL_REDUCE,
    ATTENTION,
    COPIES,
    DENSE,
    DEVICE,
    KV_WRITE,
    LM_HEAD,
    METADATA,
    MOE,
    NORM,
    SAMPLING,
)
from eyas.report.traces.rules import FOLLOWS, GENERIC, by_name
from eyas.report.traces.trace import Floats, Ints, Trace

CODES = {name: i for i, name in enumerate((*DEVICE, GENERIC, FOLLOWS))}
LAYER = [CODES[name] for name in (ALL_REDUCE, ATTENTION, MOE, DENSE, NORM, KV_WRITE)]
ROUTERS = 0.5
"""A matmul before a sampling-like kernel is a router, no LM head, if it occurs this often for each
attention kernel and is shorter than most matmuls: an LM head is long, and stands behind many
layers, or behind the one layer of a drafter whose target has many."""


def components(trace: Trace) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """int64[work]: index into `DEVICE` of each kernel, in the order of `trace.work`.

    And bool[work]: which of them only their place tells.
    """
    work = trace.work
    named = np.array([CODES[by_name(kind.name)] for kind in trace.kinds], dtype=np.int64)
    code = named[work.kind]
    by_place = code == CODES[GENERIC]
    for stream in np.unique(work.stream):
        at = np.flatnonzero(work.stream == stream)
        code[at] = _placed(code[at], work.kind[at], work.dur[at])
    return code, by_place


def _placed(code: Ints, kind: Ints, dur: Floats) -> Ints:
    """Codes of one stream's kernels in order, with places taken into account."""
    code = code.copy()
    head, router = _heads(code, kind, dur)
    code[router] = CODES[MOE]
    code[head] = CODES[LM_HEAD]
    matmul = np.isin(code, (CODES[DENSE], CODES[LM_HEAD], CODES[MOE]))
    before = _last(matmul)
    follows = np.flatnonzero(code == CODES[FOLLOWS])
    code[follows] = np.where(before[follows] >= 0, code[before[follows]], CODES[DENSE])
    generic = code == CODES[GENERIC]
    told = ~generic & ~np.isin(code, (CODES[COPIES], CODES[METADATA]))
    last, following = _last(told), _next(told)
    here = np.flatnonzero(generic)
    previous = np.where(last[here] >= 0, code[last[here]], -1)
    upcoming = np.where(following[here] >= 0, code[following[here]], -1)
    in_layer = np.isin(previous, LAYER) & np.isin(upcoming, [*LAYER, CODES[LM_HEAD]])
    in_layer |= np.isin(np.append(code, -1)[here + 1], LAYER)
    behind_head = previous == CODES[LM_HEAD]
    between_draws = (previous == CODES[SAMPLING]) & (upcoming == CODES[SAMPLING])
    code[here] = np.select(
        [in_layer, behind_head | between_draws], [CODES[NORM], CODES[SAMPLING]], CODES[METADATA]
    )
    return code


def _heads(code: Ints, kind: Ints, dur: Floats) -> tuple[Ints, Ints]:
    """Places of LM heads, and places of routers with the sampling-like kernels behind them."""
    matmul, attention = _last(code == CODES[DENSE]), _last(code == CODES[ATTENTION])
    draws = np.flatnonzero(code == CODES[SAMPLING])
    draws = draws[(matmul[draws] >= 0) & (matmul[draws] > attention[draws])]
    heads, inverse = np.unique(matmul[draws], return_inverse=True)
    count = np.bincount(kind[heads], minlength=int(kind.max(initial=0)) + 1)
    num_attention = int((code == CODES[ATTENTION]).sum())
    is_router = (count[kind[heads]] > ROUTERS * num_attention) & (num_attention > 0)
    is_router &= dur[heads] < np.median(dur[code == CODES[DENSE]]) if len(heads) else False
    routers = np.concatenate([heads[is_router], draws[is_router[inverse]]])
    return heads[~is_router], routers


def _last(wanted: npt.NDArray[np.bool_]) -> Ints:
    """Index of the last wanted element strictly before each, -1 if there is none."""
    index = np.where(wanted, np.arange(len(wanted)), -1)
    index = np.maximum.accumulate(index) if len(index) else index
    return np.concatenate([[-1], index[:-1]]).astype(np.int64)[: len(wanted)]


def _next(wanted: npt.NDArray[np.bool_]) -> Ints:
    """Index of the next wanted element strictly after each, -1 if there is none."""
    found = _last(wanted[::-1])[::-1]
    return np.where(found >= 0, len(wanted) - 1 - found, -1)
