"""Logits to tokens: filters and keyed Gumbel noise; pure functions of tensors.

Every draw is `argmax(filtered log p / T + noise)`, where noise is a function of the request's
seed, the index of the drawn token in its sequence, and the token id (Gumbel-max). The same request
therefore draws the same tokens alone or in a batch, with or without speculation, and a drafter that
adds the same noise to its own scores agrees with the target as often as a shared-noise coupling
allows (Daliri, Musco, Suresh, arXiv 2408.07978). Greedy rows are those of temperature 0: no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters, one row per request; see `SamplingParams` for meanings."""

    temperature: torch.Tensor
    """float32[B]"""
    top_k: torch.Tensor
    """int64[B], 0 keeps all"""
    top_p: torch.Tensor
    """float32[B]"""
    min_p: torch.Tensor
    """float32[B]"""
    seed: torch.Tensor
    """int64[B]"""

    def repeat(self, times: int) -> SamplingRows:
        """Every row `times` times, for the nodes of a request."""
        return SamplingRows(
            temperature=self.temperature.repeat_interleave(times),
            top_k=self.top_k.repeat_interleave(times),
            top_p=self.top_p.repeat_interleave(times),
            min_p=self.min_p.repeat_interleave(times),
            seed=self.seed.repeat_interleave(times),
        )


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Avalanche of int32 words, with wrapping products (the finaliser of MurmurHash3)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    """A 32-bit word as int32 reads it."""
    return word - (word >> 31 << 32)


def uniform_noise(seed: torch.Tensor, index: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Even noise float32 [R, M] for seed int64[R], index int64[R], ids int64[M | R, M].

    Between 0 and 1, neither included. A pure function of (seed, index, id): 31 hashed bits a draw.
    """
    low = _mix(_mix(seed.int()) ^ index.int())
    high = _mix(low + (seed >> 32).int() + _signed(0x9E3779B9))
    spread = ids.int() * _signed(0x9E3779B1)
    bits = _mix(_mix(spread + low[:, None]) ^ high[:, None]) & 0x7FFFFFFF
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel_noise(seed: torch.Tensor, index: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise float32 [R, M]: what `uniform_noise` gives for the same arguments."""
    return uniform_noise(seed, index, ids).neg_().log1p_().neg_().log_().neg_()


def filter_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Scaled logits float32 [R, V] with dropped tokens at -inf: top-k, then top-p, then min-p.

    top-p works on the mass that top-k left; a token is kept while the mass before it is below
    top_p, so the likeliest always stays. Ties are broken by the lower id.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(rows.top_k > 0, rows.top_k, logits.shape[-1])
    keep = ranks < limit[:, None]
    probs = order.values.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    keep &= (before < rows.top_p[:, None]) | (ranks == 0) | (rows.top_p >= 1.0)[:, None]
    keep &= probs >= rows.min_p[:, None] * probs[:, :1]
    kept = torch.zeros_like(keep).scatter_(-1, order.indices, keep)
    return logits.masked_fill(~kept, -torch.inf)


def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    index: torch.Tensor,
    *,
    sampled: bool,
    filtered: bool,
) -> torch.Tensor:
    """Tokens int64[R] from logits [R, V]; row r draws the token at sequence index `index[r]`.

    `sampled` and `filtered` say, from the host, whether any row needs noise or filters.
    """
    if not sampled:
        return likeliest(logits)
    scores = scale(logits, rows)
    if filtered:
        scores = filter_logits(scores, rows)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return likeliest(perturb(scores, rows, index, ids))


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """Id int64[R] of the greatest score of each row of [R, V].

    `max` and not `argmax`: on a CPU it is four times faster over a vocabulary.
    """
    return scores.max(-1).indices


def scale(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Logits float32 [R, V] over the temperature; greedy rows unchanged.

    Temperatures below a millionth count as that: smaller ones would make the scores infinite.
    """
    greedy = rows.temperature <= 0
    return logits.float() / torch.where(greedy, 1.0, rows.temperature.clamp(min=1e-6))[:, None]


def perturb(
    scores: torch.Tensor, rows: SamplingRows, index: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Scores [R, M] of token ids int64[M] plus their noise; greedy rows get none."""
    noise = gumbel_noise(rows.seed, index, ids)
    return torch.where((rows.temperature > 0)[:, None], scores + noise, scores)
