"""Rows handed to an operation a fixed number at a time.

An operation may take another kernel, and another order of sums, for another number of rows: a
matrix library does as it likes. In calls of fixed rows all that a kernel could be chosen by is the
same whatever a pass holds: shape, memory layout, alignment. What is left of a row's company is its
place in the call. Knows nothing of the operation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def in_calls(
    x: torch.Tensor, rows: int, run: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`run` of rows x [..., K] to [..., N], each on its own: [..., N].

    With `rows` in calls of so many contiguous rows [rows, K], the last one filled up with zeros;
    0: in one call, as x is.
    """
    if rows == 0:
        return run(x)
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    flat = F.pad(flat, (0, 0, 0, -count % rows)) if count % rows else flat.contiguous()
    parts = [run(part) for part in flat.split(rows)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:count].view(*x.shape[:-1], -1)
