"""Rotary tables: half-split order, with the frequency scalings of `RopeConfig`.

Knows nothing of heads or attention; `eyas.attention.rope` applies the tables.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from eyas.attention.rope import Rope
from eyas.kernels.rows import take_rows
from eyas.model_config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequencies, float32 [head_dim / 2]; llama3 scaling as in Llama 3.1's reference.

    Yarn's are those of arXiv 2309.00071, section 3.2, with transformers' rounding of the bounds.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freqs
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = (rope.original_max_position / wavelength - low) / (high - low)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * freqs / rope.factor + blend * freqs
    if rope.kind == "yarn":
        low, high = _yarn_bounds(rope, head_dim)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32)
        blend = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
        return blend * freqs / rope.factor + (1 - blend) * freqs
    return freqs


def _yarn_bounds(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Pairs up to the first are left alone, pairs from the second on are stretched fully."""

    def pair(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 * (low == high)


class Rotary(nn.Module):
    """Half-split rotary tables; `forward(positions)` gathers the rows a pass needs."""

    table: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_position).float(), rope_frequencies(rope, head_dim))
        cos, sin = angles.cos() * rope.table_factor, angles.sin() * rope.table_factor
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor) -> Rope:
        """Cosines and signed sines, float32 [..., 1, D] each, of `positions` int64[...]."""
        [rows] = take_rows(positions.flatten(), self.table)
        cos, sin = rows.view(*positions.shape, 1, -1).chunk(2, dim=-1)
        return cos, sin
