"""Linear layers that may hold several checkpoint tensors, and the row tile.

A layer declares the checkpoint names of its row blocks (`parts`); the loader copies each block to
its rows and proves that none is missing. The layers know nothing of files or devices.

Row tile: a library matmul may pick another reduction order for another number of rows. On a CPU
it does below a tile of rows (see docs/performance.md), so a pass pads its rows to that, and a
row's result then depends on neither the number of rows nor its place among them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class RowTile(NamedTuple):
    """The rows a pass is padded to: at least `least`, and a multiple of `step`."""

    least: int = 1
    step: int = 1


ANY_ROWS = RowTile()
"""No padding."""


def row_tile(device: torch.device, dtype: torch.dtype) -> RowTile:
    """Padding by which a row's bits do not depend on the other rows of a matmul.

    On a CPU oneDNN's 16-bit products of one row differ from those of more, and MKL's float32
    products go by fours; on a GPU cuBLAS was row-independent for 1..32 rows in bfloat16.
    """
    if device.type != "cpu":
        return ANY_ROWS
    return RowTile(4, 4) if dtype == torch.float32 else RowTile(2, 1)


def pad_rows(x: torch.Tensor, tile: RowTile) -> torch.Tensor:
    """`x[T, ...]` with zero rows appended as `tile` asks."""
    rows = x.shape[0]
    missing = max(tile.least - rows, -rows % tile.step)
    if not missing:
        return x
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


class Linear(nn.Module):
    """`y[T, out] = x[T, in] @ weight.T (+ bias)`, rows stacked from the named parts.

    `parts` maps a checkpoint name (without `.weight`) to its number of rows, in row order.
    """

    def __init__(self, parts: dict[str, int], in_features: int, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in] -> [..., out]`."""
        return F.linear(x, self.weight, self.bias)

    def checkpoint_names(self) -> dict[str, tuple[nn.Parameter, int]]:
        """Checkpoint tensor name -> (parameter, first row it fills)."""
        names: dict[str, tuple[nn.Parameter, int]] = {}
        row = 0
        for name, rows in self.parts.items():
            names[f"{name}.weight"] = (self.weight, row)
            if self.bias is not None:
                names[f"{name}.bias"] = (self.bias, row)
            row += rows
        return names


class Int8Linear(nn.Module):
    """A linear layer without bias whose weights are 8-bit integers with one scale per output.

    Reads half the bytes of bfloat16 and takes rows one by one: faster up to about 4 rows. Its
    products are those of the rounded weights, so it serves where verification follows.
    """

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: Linear) -> None:
        """Round the weights of `linear`, which is bfloat16 on a CPU."""
        super().__init__()
        assert linear.bias is None, "a bias is not kept"
        wide = linear.weight.detach().float()
        scales = (wide.abs().amax(1) / 127).clamp(min=1e-12)
        weight = (wide / scales[:, None]).round().to(torch.int8)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scales", scales.to(linear.weight.dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`."""
        return torch._weight_int8pack_mm(x, self.weight, self.scales)


class Embedding(nn.Module):
    """`tokens int64[T] -> [T, E]`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Gather the rows of `tokens`."""
        return F.embedding(tokens, self.weight)
