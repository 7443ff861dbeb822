"""Rotary embedding of heads, as attention backends apply it to the queries and keys they are given.

Half-split (neox) order; the tables come from `eyas.layers.rotary.Rotary`. It is the reference of
kernels that rotate on the way.
"""

from __future__ import annotations

import torch

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a pass's rows, float32 [..., 1, R] each."""


def rotate(x: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """The last R numbers of heads `x[..., H, D]` rotated, in float32; without rope only float32.

    The sines of the first half of R carry the minus sign.
    """
    x = x.float()
    if rope is None:
        return x
    size = rope[0].shape[-1]
    turned = x[..., x.shape[-1] - size :]
    turned = torch.addcmul(turned * rope[0], turned.roll(size // 2, -1), rope[1])
    if size == x.shape[-1]:
        return turned
    return torch.cat((x[..., : x.shape[-1] - size], turned), dim=-1)
