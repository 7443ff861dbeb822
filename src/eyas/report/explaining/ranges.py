"""Which component an engine is working for: ranges put around the parts of a runner for a while.

Methods of the objects that a cycle calls are wrapped, on the objects themselves, and unwrapped
afterwards: a run that is not watched holds nothing of this. The innermost range counts; what no
range encloses has its stage's own component (`OWN`). Bits do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from eyas.attention import PagedAttention
from eyas.engine.cycle import Parts
from eyas.engine.watching import COLLECTIVES
from eyas.kernels.norm import Norm
from eyas.kv.pool import KVPool
from eyas.layers.linear import Int8Linear, Linear
from eyas.layers.mla import MLA
from eyas.layers.moe import RoutedMLP
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.report.components import (
    ACCEPT,
    ALL_REDUCE,
    ATTENTION,
    COLLECT,
    COMMIT,
    COPIES,
    DENSE,
    HOST,
    IDLE,
    KV_WRITE,
    LM_HEAD,
    METADATA,
    MOE,
    NORM,
    PREFILL,
    SAMPLING,
)
from eyas.speculate.eagle3 import Eagle3Drafter
from eyas.speculate.standalone import StandaloneDrafter

OWN = {ACCEPT: SAMPLING, COMMIT: KV_WRITE, COLLECT: COPIES, HOST: IDLE, PREFILL: NORM}
"""Component of what no range of a stage encloses; of other stages it is metadata."""


def own_part(stage: str) -> str:
    """Component of a stage's work outside of all ranges."""
    return OWN.get(stage, METADATA)


Method = Callable[..., Any]


class Ranges(Protocol):
    """Makes ranges: they are nested."""

    def wrap(self, method: Method, part: str, outer: bool) -> Method:
        """`method` as a range that works for `part`; `outer`: no other encloses it, usually."""


class Nested:
    """Ranges of who wants to know where they begin and end."""

    def enter(self, part: str) -> None:
        """Work for component `part` begins."""

    def leave(self) -> None:
        """The range that began last ends."""

    def wrap(self, method: Method, part: str, outer: bool) -> Method:
        """See `Ranges`."""
        del outer

        def run(*args: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return method(*args, **named)
            finally:
                self.leave()

        return run


class _Wrapping:
    """Puts ranges around methods of objects, and takes them off."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._changed: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, method: Any) -> None:
        """Let `owner.name` be `method`, unless it was changed before."""
        if name not in vars(owner):
            setattr(owner, name, method)
            self._changed.append((owner, name))

    def range(self, owner: Any, name: str, part: str, outer: bool = False) -> None:
        """A range around `owner.name`."""
        self.put(owner, name, self.ranges.wrap(getattr(owner, name), part, outer))

    def restore(self) -> None:
        """Take all of it off."""
        for owner, name in reversed(self._changed):
            delattr(owner, name)


@contextmanager
def watched(parts: Parts, ranges: Ranges) -> Iterator[None]:
    """Within it, `ranges` is told for which component a cycle of `parts` works."""
    wrapping = _Wrapping(ranges)
    try:
        _decoder(wrapping, parts.target)
        _attention(wrapping, parts.attention, parts.pool)
        _drafter(wrapping, parts.drafter)
        if parts.target.group.size > 1:
            for name in COLLECTIVES:
                wrapping.range(parts.target.group, name, ALL_REDUCE, outer=True)
        yield
    finally:
        wrapping.restore()


def _drafter(wrapping: _Wrapping, drafter: Any) -> None:
    if isinstance(drafter, Eagle3Drafter):
        for network in filter(None, (drafter.network, drafter.quick)):
            _eagle3(wrapping, network)
    elif isinstance(drafter, StandaloneDrafter):
        _decoder(wrapping, drafter.model)
    else:
        return
    _attention(wrapping, drafter.attention, drafter.pool)
    for name in ("start", "_draw", "_advance"):
        wrapping.range(drafter.growth, name, SAMPLING, outer=True)


def _decoder(wrapping: _Wrapping, network: Decoder) -> None:
    wrapping.range(network, "forward", NORM, outer=True)
    wrapping.range(network, "logits", LM_HEAD, outer=True)
    _layers(wrapping, network, network.head)


def _eagle3(wrapping: _Wrapping, network: Eagle3) -> None:
    for name, part in (("forward", NORM), ("last", NORM), ("fuse", NORM), ("score", LM_HEAD)):
        wrapping.range(network, name, part, outer=True)
    _layers(wrapping, network, network.head)


def _layers(wrapping: _Wrapping, network: nn.Module, head: nn.Module | None) -> None:
    """Linear layers but the head's, and experts with all that belongs to them."""
    routed = [m for m in network.modules() if isinstance(m, RoutedMLP)]
    within = {id(inner) for m in routed for inner in m.modules()}
    for experts in routed:
        wrapping.range(experts, "delta", MOE)
    for module in network.modules():
        if isinstance(module, MLA):
            for name in ("absorb", "values"):
                wrapping.range(module, name, DENSE)
        if not isinstance(module, Linear | Int8Linear) or id(module) in within or module is head:
            continue
        wrapping.put(module, "normed", _normed(wrapping, module))
        for name in ("forward", "gated", "partial"):
            if hasattr(module, name):
                wrapping.range(module, name, DENSE)


def _normed(wrapping: _Wrapping, layer: Linear | Int8Linear) -> Method:
    """`layer.normed`, whose norm is told apart."""
    norms = wrapping.ranges.wrap(Norm.__call__, NORM, False)

    def normed(x: torch.Tensor, norm: Norm, gates: bool = False) -> Any:
        rows, x = norms(norm, x)
        return (layer.gated if gates else layer.forward)(rows), x

    return normed


def _attention(wrapping: _Wrapping, attention: PagedAttention, pool: KVPool) -> None:
    wrap = wrapping.ranges.wrap
    begin: Any = wrap(attention.begin, METADATA, True)
    wrapping.put(attention, "begin", lambda batch: wrap(begin(batch), ATTENTION, False))
    wrapping.range(pool, "write", KV_WRITE)
