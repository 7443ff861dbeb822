"""What a cycle does, counted while it runs eagerly and nobody times it.

Operators by stage and component, reads of device values on the host, and distinct experts of every
layer. Counts of experts stay on the device until they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.engine.cycle import Parts
from eyas.layers.moe import RoutedMLP
from eyas.report.components import COLLECT, HOST, PREFILL
from eyas.report.explaining.ranges import Nested, own_part

READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "equal",
    "allclose",
}
"""Functions of torch that wait for a device value."""
SHAPED_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators that do."""
BESIDE = (HOST, COLLECT, PREFILL)
"""Stages in which the host reads results by design."""


class Counts(Nested, TorchDispatchMode):
    """Counts operators of steps; is their spans and ranges too."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()
        """By stage and function."""
        self._stage = HOST
        self._parts: list[str] = []

    def mark(self, stage: str | None) -> None:
        """Start `stage`; what belongs to none is the host's."""
        self._stage = stage or HOST

    def enter(self, part: str) -> None:
        """See `Ranges`."""
        self._parts.append(part)

    def leave(self) -> None:
        """See `Ranges`."""
        self._parts.pop()

    def read(self, name: str) -> None:
        """Note that the host reads a value by the function `name`."""
        if self._stage not in BESIDE:
            self.reads[self._stage, name] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        part = self._parts[-1] if self._parts else own_part(self._stage)
        self.operators[self._stage, part] += 1
        name = func.overloadpacket.__name__
        if name in SHAPED_BY_DATA:
            self.read(name)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in READS and args and isinstance(args[0], torch.Tensor):
            self._counts.read(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """Within it, operators and reads of the host are counted."""
    with ExitStack() as stack:
        stack.enter_context(_Reads(counts))
        stack.enter_context(counts)
        yield


class ExpertCounts:
    """Distinct experts that each routed layer of the target used, pass by pass."""

    def __init__(self, parts: Parts) -> None:
        self.layers: list[tuple[str, Any]] = [
            (f"layer {i}", block.mlp.router)
            for i, block in enumerate(parts.target.blocks)
            if isinstance(block.mlp, RoutedMLP)
        ]
        self._found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in self.layers}
        self._new: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within it, passes are counted; they must not be replayed from a graph."""
        for name, router in self.layers:
            router.forward = self._noting(name, router.forward, router.config.num_experts)
        try:
            yield
        finally:
            for _, router in self.layers:
                del router.forward

    def _noting(self, name: str, route: Any, count: int) -> Any:
        def forward(x: torch.Tensor) -> Any:
            chosen = route(x)
            ids = chosen.ids
            # padding rows are zeros, and wake no expert
            used = (x != 0).any(1, keepdim=True).float().expand_as(ids).flatten()
            hit = torch.zeros(count, device=ids.device)
            hit = hit.scatter_reduce_(0, ids.flatten(), used, "amax")
            self._new.append((name, hit.sum()))
            return chosen

        return forward

    def keep(self, wanted: bool) -> None:
        """Take in what was counted since the last call, or forget it."""
        for name, count in self._new if wanted else ():
            self._found[name].append(count)
        self._new.clear()

    def record(self) -> dict[str, Any] | None:
        """Mean over passes, by layer and of all; None without routed layers."""
        if not self.layers or not all(self._found.values()):
            return None
        by_layer = {n: float(torch.stack(f).mean()) for n, f in self._found.items()}
        router = self.layers[0][1]
        return {
            "by_layer": by_layer,
            "mean": mean(by_layer.values()),
            "experts": router.config.num_experts,
            "top_k": router.config.top_k,
        }
