"""Attention over whole documents laid side by side: training, without a cache.

A pass is T flat rows; documents are runs of them, and no row sees another document. Layer rows
past T are padding. `flash` runs torch's variable-length flash attention (CUDA, 16-bit), where the
heads are of a size it takes; `loop` takes one document after the other in plain torch on any device
and is the oracle. Values may be narrower than keys, as in latent attention.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): at step s row i attends to the step-0
keys j <= i of its document and to its own keys of steps 1..s. The causal part and the own keys
are merged by their log-sum-exps; handed the MERGED output and log-sum-exp, flash attention's
backward yields the exact gradient of the causal part (the identity ring attention rests on).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from eyas.attention.rope import Rope, rotate
from eyas.model_config import AttentionShape

BACKENDS = ("flash", "loop")
FLASH_HEADS = range(8, 257, 8)
"""Head sizes that torch's flash attention takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where the documents of a pass lie; their lengths add up to T."""

    starts: torch.Tensor
    """int32[docs + 1] on the rows' device: first row of each document, then T."""
    lengths: tuple[int, ...]
    """Host copy of the documents' lengths."""
    backend: str
    """`flash` or `loop`."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, backend: str) -> Documents:
        """Lay out documents of the given positive `lengths`; copies without waiting."""
        assert backend in BACKENDS, f"backend {backend!r} is none of {BACKENDS}"
        assert min(lengths) > 0, f"documents must not be empty, got lengths {lengths}"
        starts = torch.tensor((0, *lengths), dtype=torch.int64).cumsum(0).int()
        if device.type == "cuda":
            starts = starts.pin_memory().to(device, non_blocking=True)
        return cls(starts=starts, lengths=lengths, backend=backend)

    @property
    def num_rows(self) -> int:
        """T."""
        return sum(self.lengths)

    def flash_args(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Starts of queries and keys and their longest document, as flash attention takes them."""
        longest = max(self.lengths)
        return self.starts, self.starts, longest, longest


def causal_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within documents, and within the latest `window` rows if that is not 0.

    q, k [T, H, D] and v [T, H, Dv] of one dtype, Dv <= D. Returns the output [T, H, Dv] and the
    log-sum-exp of the scores times `scale`, float32 [H, T].
    """
    if _by_flash(docs, q):
        narrow, older = v.shape[-1], window - 1 if window else None
        args = (q, k, _widen(v, q.shape[-1]), *docs.flash_args(), 0.0, True, False)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *args, scale=scale, window_size_left=older
        )
        assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}"
        return out[..., :narrow], lse
    outs, lses = [], []
    parts = (x.transpose(0, 1).split(docs.lengths, dim=1) for x in (q, k, v))
    for qd, kd, vd in zip(*parts, strict=True):
        scores = _causal_scores(qd, kd, scale, window)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp() @ vd.float())
        lses.append(lse)
    return torch.cat(outs, 1).transpose(0, 1).contiguous().to(v.dtype), torch.cat(lses, 1)


def causal_backward(
    grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    docs: Documents,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k [T, H, D] and v [T, H, Dv] for probabilities exp(scores - lse).

    `grad` and `out` [T, H, Dv] and `lse` [H, T] may be those of an attention with further keys:
    the result is then the causal keys' share of its gradient.
    """
    q, k, v = qkv
    if _by_flash(docs, q):
        narrow = v.shape[-1]
        grad, v, out = (_widen(x, q.shape[-1]) for x in (grad, v, out))
        # Without dropout the kernel draws nothing: any generator state of the right type will do.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *docs.flash_args(), 0.0, True, state, unused, scale=scale
        )
        return dq, dk, dv[..., :narrow]
    delta = (grad.float() * out.float()).sum(-1).transpose(0, 1)
    heads = [x.transpose(0, 1).split(docs.lengths, dim=1) for x in (q, k, v, grad)]
    rows = [x.split(docs.lengths, dim=1) for x in (lse, delta)]
    grads: list[tuple[torch.Tensor, ...]] = []
    for qd, kd, vd, gd, lsed, deltad in zip(*heads, *rows, strict=True):
        probs = (_causal_scores(qd, kd, scale) - lsed.unsqueeze(-1)).exp()
        dscores = probs * (gd.float() @ vd.float().mT - deltad.unsqueeze(-1)) * scale
        dv = probs.mT @ gd.float()
        grads.append((dscores @ kd.float(), dscores.mT @ qd.float(), dv))
    dq, dk, dv = (torch.cat(g, 1).transpose(0, 1).to(q.dtype) for g in zip(*grads, strict=True))
    return dq, dk, dv


def _by_flash(docs: Documents, q: torch.Tensor) -> bool:
    """Whether flash attention runs for heads like those of q [T, H, D]."""
    return docs.backend == "flash" and q.shape[-1] in FLASH_HEADS


def _widen(x: torch.Tensor, size: int) -> torch.Tensor:
    """Heads `x[T, H, n]` with zeros appended up to `size`: they change no score and no value."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _causal_scores(q: torch.Tensor, k: torch.Tensor, scale: float, window: int = 0) -> torch.Tensor:
    """Scaled scores float32 [H, L, L] of one document's q, k [H, L, D], hidden keys at -inf."""
    scores = (q.float() @ k.float().mT) * scale
    every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    hidden = every.triu(1) | every.tril(-window) if window else every.triu(1)
    return scores.masked_fill(hidden, float("-inf"))


class DenseCausal:
    """`Attend` of a target over whole documents; keeps nothing, no gradient through `flash`."""

    def __init__(self, docs: Documents, shape: AttentionShape) -> None:
        self.docs, self.shape = docs, shape

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Attend causally within documents; see `eyas.attention.Attend`."""
        rows, padded = self.docs.num_rows, q.shape[0]
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x[:rows].to(v.dtype) for x in (rotate(q, rope), rotate(k, rope), v))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        window = self.shape.window(layer)
        out, _ = causal_forward(q, k, v, self.docs, self.shape.scale, window)
        return _pad(out.flatten(1), padded)


class TrainingTimeTest:
    """`Attend` of a drafter's training-time test; every call is the next step.

    Keys and values of the calls so far are kept, so one instance serves one pass. Differentiable
    in all of them.
    """

    def __init__(self, docs: Documents, shape: AttentionShape) -> None:
        self.docs, self.shape = docs, shape
        self.kept: list[torch.Tensor] = []

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Attend to step 0 causally and to the row itself in later steps."""
        assert layer == 0, f"a drafter has one layer, got a call from layer {layer}"
        rows, padded = self.docs.num_rows, q.shape[0]
        q, k, v = (x[:rows].to(v.dtype) for x in (rotate(q, rope), rotate(k, rope), v))
        if not self.kept:
            groups = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        self.kept += (k, v)
        apply: Callable[..., torch.Tensor] = _Merged.apply
        out = apply(self.docs, self.shape.scale, q, *self.kept)
        return _pad(out.flatten(1), padded)


def _pad(out: torch.Tensor, rows: int) -> torch.Tensor:
    """`out` with zero rows appended up to `rows`."""
    missing = rows - out.shape[0]
    return torch.cat((out, out.new_zeros(missing, out.shape[1]))) if missing else out


class _Merged(torch.autograd.Function):
    """Causal attention over step-0 keys merged with each row's own later keys."""

    @staticmethod
    def forward(
        ctx: Any,
        docs: Documents,
        scale: float,
        q: torch.Tensor,
        k0: torch.Tensor,
        v0: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        """q, k0 [T, H, D] and v0 [T, H, Dv]; `own` is k1, v1, k2, v2, ... of Hkv heads each.

        Returns [T, H, Dv].
        """
        out, lse = causal_forward(q, k0, v0, docs, scale)
        if own:
            keys, values = own[::2], own[1::2]
            scores = _own_scores(q, keys, scale)
            total = torch.logaddexp(lse.T, scores.logsumexp(-1))
            merged = _grouped(out * (lse.T - total).exp().unsqueeze(-1), values[0])
            shares = _grouped((scores - total.unsqueeze(-1)).exp(), values[0])
            for j, value in enumerate(values):
                merged = merged.addcmul(shares[..., j : j + 1], value.unsqueeze(2))
            out, lse = merged.flatten(1, 2).to(q.dtype), total.T.contiguous()
        ctx.docs, ctx.scale = docs, scale
        ctx.save_for_backward(out, lse, q, k0, v0, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of q, k0, v0 and the own keys and values, each in its input's dtype."""
        out, lse, q, k0, v0, *own = ctx.saved_tensors
        grad = grad.contiguous()
        dq0, dk0, dv0 = causal_backward(grad, (q, k0, v0), out, lse, ctx.docs, ctx.scale)
        if not own:
            return None, None, dq0, dk0, dv0
        keys, values = own[::2], own[1::2]
        shares = _grouped((_own_scores(q, keys, ctx.scale) - lse.T.unsqueeze(-1)).exp(), keys[0])
        wide, query = _grouped(grad.float(), keys[0]), _grouped(q.float(), keys[0])
        dq = _grouped(dq0.float(), keys[0])
        delta = (wide * _grouped(out, keys[0])).sum(-1)
        down: list[torch.Tensor] = []
        for j, (key, value) in enumerate(zip(keys, values, strict=True)):
            share = shares[..., j : j + 1]
            gain = (wide * value.unsqueeze(2)).sum(-1) - delta
            dscore = share * gain.unsqueeze(-1) * ctx.scale
            dq = dq.addcmul(dscore, key.unsqueeze(2))
            down += ((dscore * query).sum(2).to(key.dtype), (share * wide).sum(2).to(key.dtype))
        return None, None, dq.flatten(1, 2).to(q.dtype), dk0, dv0, *down


def _grouped(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """`x[T, H, ...]` viewed as [T, Hkv, H / Hkv, ...] for `kv[T, Hkv, D]`."""
    return x.unflatten(1, (kv.shape[1], -1))


def _own_scores(q: torch.Tensor, keys: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    """Scaled scores float32 [T, H, S] of each row's query and its own S keys."""
    query = _grouped(q.float() * scale, keys[0])
    return torch.stack([(query * k.unsqueeze(2)).sum(-1).flatten(1) for k in keys], dim=-1)
