"""Linear layers that may hold several checkpoint tensors or a rank's share, and the row tile.

A layer declares where each checkpoint tensor goes (`Place`), whole or this rank's part of it; the
loader copies each to its place and proves that none is missing. The layers know nothing of files
or devices. With tensor parallelism a `ColumnParallel` layer holds some outputs and a `RowParallel`
layer some inputs, whose partial sums its all-reduce adds (Megatron-LM, arXiv 1909.08053).

Row tile: a library matmul may pick another reduction order for another number of rows. On a CPU
it does below a tile of rows (see docs/performance.md), so a pass pads its rows to that, and a
row's result then depends on neither the number of rows nor its place among them. On a GPU it rarely
does, but where a network is built deterministic its products take fixed numbers of rows
(`kernels/calls.py`), by which a row's company cannot change the kernel that computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from eyas.distributed.group import SOLO, Group
from eyas.errors import ConfigError
from eyas.kernels import planes, skinny
from eyas.kernels.calls import in_calls
from eyas.kernels.norm import Norm
from eyas.kernels.rows import embedded


class RowTile(NamedTuple):
    """The rows a pass is padded to: at least `least`, and a multiple of `step`."""

    least: int = 1
    step: int = 1
    call: int = 0
    """Rows of every product; 0: as they come."""


ANY_ROWS = RowTile()
"""No padding."""
CALL_ROWS = 64
"""Rows of a product where they are fixed: its weights are read once for so many."""


def row_tile(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> RowTile:
    """Padding by which a row's bits do not depend on the other rows of a matmul.

    On a CPU oneDNN's 16-bit products of one row differ from those of more, and MKL's float32
    products go by fours; on a GPU cuBLAS was row-independent for 1..32 rows in bfloat16, and
    `deterministic` fixes the rows of every call.
    """
    if device.type != "cpu":
        return RowTile(CALL_ROWS, CALL_ROWS, CALL_ROWS) if deterministic else ANY_ROWS
    return RowTile(4, 4) if dtype == torch.float32 else RowTile(2, 1)


def pad_rows(x: torch.Tensor, tile: RowTile) -> torch.Tensor:
    """`x[T, ...]` with zero rows appended as `tile` asks."""
    rows = x.shape[0]
    missing = max(tile.least - rows, -rows % tile.step)
    if not missing:
        return x
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes in a network."""

    into: torch.Tensor
    """The memory it fills: a view of a parameter, without gradient."""
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    start: int = 0
    """Along `dim` this rank takes indices from `start` on, as many as `into` holds."""
    order: torch.Tensor | None = None
    """int64: row i of `into` is row `order[i]` of the rank's part; None: rows keep their order."""

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole `tensor`, as `into` keeps it."""
        part = tensor.narrow(self.dim, self.start, self.into.shape[self.dim])
        return part if self.order is None else part[self.order]

    def give(self) -> torch.Tensor:
        """What `into` holds, as the checkpoint keeps it: the inverse of `take`."""
        return self.into if self.order is None else self.into[self.order.argsort()]


Places = dict[str, Place]
"""Checkpoint tensor name -> its place."""


def whole(parameter: torch.Tensor) -> Place:
    """The place of a tensor that is the whole parameter."""
    return Place(parameter.detach(), tuple(parameter.shape))


def share_of(size: int, group: Group, what: str) -> int:
    """`size / group.size`; raises `ConfigError` where it does not divide."""
    if size % group.size:
        fitting = max(n for n in range(1, group.size) if size % n == 0)
        raise ConfigError(
            f"tp={group.size} for {what} of {size}",
            "every rank takes the same share",
            f"use tp={fitting}",
        )
    return size // group.size


class Products(nn.Module):
    """A layer of products."""

    call_rows: int = 0
    """Rows of each of its products, or a kernel that keeps a row's bits for any number of rows; 0:
    whatever is fastest for the rows there are."""


def fix_rows(network: nn.Module, rows: int) -> None:
    """Set `call_rows` of every layer in `network`."""
    for part in network.modules():
        if isinstance(part, Products):
            part.call_rows = rows


class Linear(Products):
    """`y[T, out] = x[T, in] @ weight.T (+ bias)`, rows stacked from the named parts.

    `parts` maps a checkpoint name (without `.weight`) to its number of rows, in row order. Every
    rank holds all of it.
    """

    def __init__(self, parts: dict[str, int], in_features: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.counters = skinny.Counters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]`."""
        return in_calls(x, self.call_rows, self.product)

    def product(self, x: torch.Tensor, gates: bool = False) -> torch.Tensor:
        """`forward`, or `gated`, in one call and of this rank alone."""
        run = skinny.gated_linear if gates else skinny.linear
        return run(x, self.weight, self.bias, self.counters)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out / 2]`: `silu(gate) * up` of outputs that are gates first."""
        return in_calls(x, self.call_rows, partial(self.product, gates=True))

    def normed(
        self, x: torch.Tensor, norm: Norm, gates: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`forward`, or `gated`, of the normed rows, the rows before their norm)."""
        rows, x = norm(x)
        return (self.gated if gates else self.forward)(rows), x

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        return self._row_blocks(SOLO)

    def _row_blocks(self, group: Group) -> Places:
        """The parts one below the other, each rank with its share of every part's rows."""
        places: Places = {}
        row = 0
        for name, rows in self.parts.items():
            own = rows // group.size
            for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is not None:
                    into = parameter.detach()[row : row + own]
                    whole_shape = (rows, *into.shape[1:])
                    places[f"{name}.{kind}"] = Place(into, whole_shape, 0, group.rank * own)
            row += own
        return places


class ColumnParallel(Linear):
    """A linear layer of which each rank holds some outputs: its share of every part's rows."""

    def __init__(
        self, parts: dict[str, int], in_features: int, bias: bool = False, group: Group = SOLO
    ) -> None:
        for name, rows in parts.items():
            share_of(rows, group, name)
        super().__init__({n: rows // group.size for n, rows in parts.items()}, in_features, bias)
        self.parts, self.group = parts, group

    def places(self) -> Places:
        """Checkpoint tensor name -> the place of this rank's share."""
        return self._row_blocks(self.group)


class RowParallel(Linear):
    """A linear layer of which each rank holds some inputs; the partial sums are all-reduced."""

    def __init__(
        self, name: str, out_features: int, in_features: int, bias: bool, group: Group = SOLO
    ) -> None:
        super().__init__({name: out_features}, share_of(in_features, group, name), bias)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in / ranks] -> [..., out]`."""
        if self.group.size == 1:
            return super().forward(x)
        y = self.group.all_reduce(self._share(x))
        return y if self.bias is None else y + self.bias

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in / ranks] -> [..., out]`: this rank's term of the sum; without bias."""
        assert self.bias is None, "a bias belongs to the whole sum"
        return self._share(x)

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term, without bias."""
        return in_calls(
            x, self.call_rows, lambda part: skinny.linear(part, self.weight, None, self.counters)
        )

    def places(self) -> Places:
        """Checkpoint tensor name -> the place of this rank's share."""
        (name, rows), columns = next(iter(self.parts.items())), self.weight.shape[1]
        whole_shape = (rows, columns * self.group.size)
        weight = Place(self.weight.detach(), whole_shape, 1, self.group.rank * columns)
        places = {f"{name}.weight": weight}
        if self.bias is not None:
            places[f"{name}.bias"] = whole(self.bias)
        return places


class Int8Linear(nn.Module):
    """A linear layer whose weights are 8-bit integers with one scale per output.

    Reads half the bytes of 16 bits. Its products are those of the rounded weights, so it serves
    where verification follows. On a CPU it takes bfloat16, and rows one by one: faster up to about
    4 rows.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: Linear) -> None:
        """Round the weights of `linear`."""
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.register_buffer("bias", bias, persistent=False)
        wide = linear.weight.detach().float()
        scales = (wide.abs().amax(1) / 127).clamp(min=1e-12)
        weight = (wide / scales[:, None]).round().to(torch.int8)
        self.register_buffer("weight", weight, persistent=False)
        kind = scale_type(weight.device, linear.weight.dtype)
        self.register_buffer("scales", scales.to(kind), persistent=False)
        self.counters = skinny.Counters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]`."""
        return planes.int8_linear(x, self.weight, self.scales, self.bias, self.counters)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.gated`."""
        return planes.int8_linear(x, self.weight, self.scales, self.bias, self.counters, gates=True)

    def normed(
        self, x: torch.Tensor, norm: Norm, gates: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Linear.normed`."""
        layer = (self.weight, self.scales, self.bias, self.counters)
        return planes.int8_norm_linear(x, norm, *layer, gates)


def scale_type(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type of an `Int8Linear`'s scales: torch's operator on a CPU wants that of the rows."""
    return dtype if device.type == "cpu" else torch.float32


class Embedding(nn.Module):
    """`tokens int64[T] -> [T, E]`; each rank holds its share of the vocabulary's rows."""

    def __init__(self, vocab_size: int, hidden_size: int, group: Group = SOLO) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(
            torch.empty(share_of(vocab_size, group, "the vocabulary"), hidden_size)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of `tokens`, on every rank."""
        if self.group.size == 1:
            return embedded(tokens, self.weight)
        local = tokens - self.group.rank * self.weight.shape[0]
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = embedded(torch.where(mine, local, 0), self.weight)
        return self.group.all_reduce(torch.where(mine[..., None], rows, 0))

    def place(self) -> Place:
        """The place of this rank's rows of the whole table."""
        own, hidden = self.weight.shape
        return Place(
            self.weight.detach(), (own * self.group.size, hidden), 0, self.group.rank * own
        )
