"""The tensor-parallel group as layers see it: how many ranks, and three collectives.

A block's only collective is `all_reduce`. A group of one does nothing, so layers are the same code
with and without tensor parallelism. Layers know this class alone, not how ranks talk
(`rank_group.py`).

Every rank gets the same bits from every collective. What all ranks compute from such values by the
same operations is then the same on all of them; what they must agree on whatever happens, the
tokens of a cycle, is rank 0's by `share`.
"""

from __future__ import annotations

import torch


class Group:
    """A group of one rank: its collectives return what they are given."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `x`, with the same bits on every rank; may overwrite `x`.

        A row's sum depends neither on the other rows of `x` nor on its place among them.
        """
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x [..., n]` side by side along the last dimension, in rank order."""
        return x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank; may overwrite `x`."""
        return x


SOLO = Group()
"""No tensor parallelism."""
