"""All-reduces of this machine, timed by all ranks together: each size, and waiting apart.

Ranks are processes as in an engine. All do the same rounds, so that their collectives meet; rank 0
keeps the figures. Waiting is what a collective takes behind other work beyond what both take alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from eyas.config import require
from eyas.distributed.control import Wire
from eyas.distributed.launch import spawn
from eyas.distributed.rank_group import RankGroup, Seat
from eyas.engine.ranks import rank_device
from eyas.hardware import Collective, Curve
from eyas.layers.linear import Linear
from eyas.report.timing import Timer

SIZES = tuple(2**n for n in range(12, 22))
"""Message bytes, 4 KB to 2 MB."""
ROUNDS = 20
WORK = (2048, 2048)
"""The linear layer in front of a collective when waiting is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What rank 0 saw."""

    kind: str
    us: tuple[tuple[float, float], ...]
    skew_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What every rank does; can be sent to a process."""

    device: str
    dtype: torch.dtype
    sizes: tuple[int, ...] = SIZES
    count: int = ROUNDS

    def __call__(self, wire: Wire) -> None:
        """The rounds of a rank other than 0, until rank 0 is through too."""
        self.run(wire.seat)
        wire.answer(None)
        while wire.listen() is not None:
            pass

    def run(self, seat: Seat) -> Measured:
        """All sizes, then the waiting."""
        device = rank_device(self.device, seat)
        group = RankGroup(seat, device)
        timer = Timer(device=device, rounds=self.count)
        points = []
        for size in self.sizes:
            x = torch.zeros(size // self.dtype.itemsize, dtype=self.dtype, device=device)
            points.append((float(size), timer.us([partial(group.all_reduce, x)] * 8)))
        skew = self._skew(group, device, timer)
        timer.wait()
        group.close()
        kind = "nccl" if device.type == "cuda" else "gloo"
        return Measured(kind=kind, us=tuple(points), skew_us=skew)

    def _skew(self, group: RankGroup, device: torch.device, timer: Timer) -> float:
        with torch.device("meta"):
            layer = Linear({"": WORK[0]}, WORK[1])
        weight = torch.zeros(WORK, dtype=self.dtype, device=device)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        x = torch.zeros(1, WORK[1], dtype=self.dtype, device=device)
        alone = timer.us([partial(layer, x)] * 8)
        reduce = timer.us([partial(group.all_reduce, x.clone())] * 8)
        both = timer.us([lambda: group.all_reduce(layer(x))] * 8)
        return max(0.0, both - alone - reduce)


def collectives(ranks: int, rounds: Rounds) -> tuple[tuple[Collective, ...], float]:
    """Tables of so many ranks, and their mean waiting; nothing for a single rank.

    Raises `RankError` for a rank that fails, `ConfigError` for one without a GPU.
    """
    if ranks == 1:
        return (), 0.0
    require(
        rounds.device == "cpu" or ranks <= torch.cuda.device_count(),
        f"tp={ranks}",
        f"every rank takes a GPU, and this machine has {torch.cuda.device_count()}",
        f"use tp<={torch.cuda.device_count()}",
    )
    hub = spawn(ranks, rounds)
    try:
        with hub.together():
            found = rounds.run(hub.seat)
            hub.hear()
    finally:
        hub.close()
    source = f"measured by eyas calibrate among {ranks} ranks in step, {found.kind}"
    table = Collective(kind=found.kind, ranks=ranks, us=Curve(found.us), source=source)
    return (table,), found.skew_us
