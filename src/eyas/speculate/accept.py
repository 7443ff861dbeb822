"""Acceptance: follow the tree while the token drawn from the target is one of the children.

The target draws one token at every node by the rule plain decoding uses there. The walk from the
root goes to the child that carries the drawn token; where there is none, the drawn token is the
bonus. The committed tokens are thus the target's own draws for any drafter: lossless by
construction, with greedy as the case without noise. The arithmetic is `eyas.kernels.accept`'s.
"""

from __future__ import annotations

import torch

from eyas.kernels.accept import Settled, Slots, settle
from eyas.speculate.tree import Draft


def accept(draft: Draft, drawn: torch.Tensor, slots: Slots) -> Settled:
    """Walk every tree; `drawn` int64[B, N] is the target's draw at each node.

    Moves the slots' rows forward: tokens behind the roots, new roots, longer KV.
    """
    return settle(draft.tokens, draft.parents, drawn, draft.depth, slots)
