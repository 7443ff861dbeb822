"""What a drafter's accept lengths say; pure functions of a list of integers.

An accept length is the tokens one cycle committed, bonus included: 1 .. depth + 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def summarise(lengths: Sequence[int], depth: int) -> dict[str, Any]:
    """Accept length, its histogram, and acceptance by position for drafts up to `depth`.

    `acceptance_by_position[k]` is the share of cycles whose draft k + 1 was accepted,
    `conditional_acceptance[k]` the same among cycles whose drafts before it were (None if none
    were). `histogram[k]` counts cycles of length k + 1. In a tree a position is a depth.
    """
    count = len(lengths)
    found = Counter(lengths)
    reached = [sum(n for length, n in found.items() if length > k) for k in range(depth + 1)]
    return {
        "cycles": count,
        "accept_length": sum(lengths) / count if count else None,
        "acceptance_by_position": [r / count if count else None for r in reached[1:]],
        "conditional_acceptance": [
            now / before if before else None for before, now in pairwise(reached)
        ],
        "histogram": [found[length] for length in range(1, depth + 2)],
    }
