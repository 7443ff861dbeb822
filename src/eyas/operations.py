"""An operation of a pass, as counts: FLOPs, bytes, launches, messages.

Knows neither networks nor machines; `cost.py` lists the operations of passes, `estimate.py` says
what they take.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass

ALL_REDUCE, ATTENTION, MOE, LINEAR = "all-reduce", "attention", "MoE", "dense linear"
SMALL, HEAD = "norm/rope/elementwise", "LM head"
SAMPLING, METADATA = "sampling/acceptance", "metadata"
COMPONENTS = (ALL_REDUCE, ATTENTION, MOE, LINEAR, SMALL, HEAD, SAMPLING, METADATA)

BEHIND_MLP = "all-reduce behind MLP"
STEP_BOOKS, CYCLE_BOOKS, LEVEL_BOOKS = "step's own", "cycle's own", "draft level's own"
"""Device work outside of networks and draws: of a plain step, a cycle, a level of drafting."""
DRAW_LAUNCHES = 2
"""Tiles of the vocabulary, then rows; see `eyas.kernels.draw`."""

ACTIVATION = 2
"""Bytes of an activation."""


class Work(enum.Enum):
    """What bounds an operation's time."""

    LINEAR = "weights of a linear layer"
    EXPERTS = "weights of routed experts"
    HEADS = "keys and values of heads"
    NARROW = "keys and values of narrow heads"
    LATENT = "latents"
    SMALL = "a launch"
    SAMPLE = "scores of a vocabulary"
    REDUCE = "an all-reduce"
    GATHER = "half an all-reduce: a gather or a scatter"
    FIXED = "bookkeeping outside of networks"


class Joins(enum.Enum):
    """Small kernels that an engine may make part of another's launch."""

    GATE = "a gate, of the linear layer before it"
    CHOICE = "the choice of experts, of the router's product"
    EXPERTS = "shared experts, of the launches of the routed ones"
    HEADS = "what puts heads in place or norms latents, of the product that makes heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation that a pass does `times` times; all else is of one time, on one rank."""

    name: str
    component: str
    work: Work
    times: int = 1
    launches: int = 1
    rows: int = 0
    weights: float = 0.0
    """Bytes of weights read."""
    kv: float = 0.0
    """Bytes of committed keys and values read."""
    again: float = 0.0
    """Bytes of them read again, by a kernel that takes nodes for requests."""
    moved: float = 0.0
    """Bytes of activations read and written."""
    flops: float = 0.0
    message: float = 0.0
    """Bytes that a collective adds up or gathers, as every rank holds them afterwards."""
    walks: int = 0
    """Requests times KV heads, whose keys are walked apart."""
    side: int = 0
    """Rows that walk the keys of each side by side."""
    width: int = 0
    """Scores in a row that is sampled; positions that attention walks."""
    pairs: float = 0.0
    """Rows that a touched expert has on average."""
    normed: bool = False
    """Whether a linear layer's rows come from a norm that may be part of what prepares them."""
    joins: Joins | None = None
    layer: tuple[int, int, float] | None = None
    """Outputs, inputs and bits of a weight: a linear layer's, or of the one that an op may join."""

    @property
    def bytes(self) -> float:
        """All memory traffic, of what is read again only the first time."""
        return self.weights + self.kv + self.moved


def merged(ops: Iterable[Op]) -> list[Op]:
    """The same with equal operations counted together, in the order of their first places."""
    counts: dict[Op, int] = {}
    for op in ops:
        one = dataclasses.replace(op, times=1)
        counts[one] = counts.get(one, 0) + op.times
    return [dataclasses.replace(op, times=times) for op, times in counts.items()]


def linear(
    name: str, width: int, out: float, rows: int, bits: float, component: str = LINEAR
) -> Op:
    """A linear layer from `width` to `out` numbers, with weights of so many bits."""
    return Op(
        name=name,
        component=component,
        work=Work.LINEAR,
        rows=rows,
        weights=width * out * bits / 8,
        moved=rows * (width + out) * ACTIVATION,
        flops=2 * rows * width * out,
        layer=(round(out), width, bits),
    )


def mlp(
    name: str, hidden: int, size: int, rows: int, ranks: int, bits: float, component: str = LINEAR
) -> list[Op]:
    """A gated MLP of which a rank has its share of `size`."""
    own = size // ranks
    up = linear(f"{name}: gate and up", hidden, 2 * own, rows, bits, component)
    up = dataclasses.replace(up, normed=True)
    gate = small(f"{name}: gate", rows, 1.5 * own)
    down = linear(f"{name}: down", own, hidden, rows, bits, component)
    return [up, dataclasses.replace(gate, joins=Joins.GATE, layer=up.layer), down]


def logits(rows: int, hidden: int, vocab: int, ranks: int, bits: float) -> list[Op]:
    """Scores, gathered from the ranks, and one draw of each row."""
    ops = [linear("head", hidden, vocab / ranks, rows, bits, HEAD)]
    if ranks > 1:
        ops.append(collective("gather of logits", rows * vocab * ACTIVATION, Work.GATHER))
    draw = Op(
        name="draws",
        component=SAMPLING,
        work=Work.SAMPLE,
        launches=DRAW_LAUNCHES,
        rows=rows,
        moved=rows * vocab * ACTIVATION,
        width=vocab,
    )
    return [*ops, draw]


def norm(name: str, rows: int, size: int) -> Op:
    """RMSNorm with the residual added before it."""
    return small(name, rows, 2 * size)


def small(name: str, rows: int, size: float, times: int = 1, component: str = SMALL) -> Op:
    """An elementwise kernel that reads and writes rows of `size` numbers."""
    return Op(
        name=name,
        component=component,
        work=Work.SMALL,
        times=times,
        rows=rows,
        moved=2 * rows * size * ACTIVATION,
    )


def collective(name: str, message: float, work: Work = Work.REDUCE) -> Op:
    """A collective over `message` bytes."""
    return Op(name=name, component=ALL_REDUCE, work=work, message=message)
