"""Training-time test of an EAGLE-3 drafter: teacher, loss, hits.

Row t of a pass pairs the embedding of token t + 1 with the fused target states of position t and
predicts token t + 2; at step s its token is t + 1 + s and it predicts token t + 2 + s, with the
drafter's own output of the step before as hidden state (arXiv 2503.01840, section 3.2). The loss
of a token is the cross-entropy of the drafter's distribution against the target's, both over the
draft vocabulary, weighted decay**s; tokens whose likeliest successor in the target lies outside
the draft vocabulary carry none. Rows are never shifted: each step picks the rows it is scored on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from eyas.attention.dense import DenseCausal, TrainingTimeTest
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.train.corpus import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """What the target says of a pass's M predicted tokens."""

    aux: torch.Tensor
    """[T, num_aux * Et]: captured states of every row."""
    embeds: torch.Tensor
    """[T, E]: embeddings of every row's own token."""
    probs: torch.Tensor
    """[M, Vd]: the target's distribution restricted to the draft vocabulary; float16 or float32."""
    best: torch.Tensor
    """int64[M]: draft id of the target's likeliest token; -1 outside the draft vocabulary."""


@torch.no_grad()
def teach(target: Decoder, drafter: Eagle3, batch: Pass, chunk: int) -> Teacher:
    """One forward of the target; its head runs over `chunk` rows at a time."""
    config = drafter.config
    weight = target.embed.weight
    aux = weight.new_empty(
        batch.tokens.shape[0], len(config.aux_layers) * config.target_hidden_size
    )
    attend = DenseCausal(batch.docs, target.config.attention_shape())
    hidden = target(batch.tokens, batch.positions, attend, aux, config.aux_layers)
    ids = drafter.target_ids
    draft_of = ids.new_full((target.config.vocab_size,), -1)
    draft_of[ids] = torch.arange(ids.shape[0], device=ids.device)
    kind = torch.float32 if weight.dtype == torch.float32 else torch.float16
    num = batch.predicted.shape[0]
    probs = torch.empty(num, ids.shape[0], dtype=kind, device=weight.device)
    best = torch.empty_like(batch.predicted)
    for start in range(0, num, chunk):
        part = slice(start, start + chunk)
        logits = target.logits(hidden[batch.predicted[part] - 1])
        best[part] = draft_of[logits.argmax(-1)]
        probs[part] = logits.index_select(1, ids).softmax(-1, dtype=torch.float32)
    own = drafter.embed if drafter.embed is not None else target.embed
    return Teacher(aux=aux, embeds=own(batch.tokens), probs=probs, best=best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Loss and hits of one pass."""

    loss: torch.Tensor
    """float32 []: weighted sum over steps of the masked mean cross-entropy."""
    step_losses: torch.Tensor
    """float32 [S]: masked mean cross-entropy of each step, detached."""
    hits: torch.Tensor
    """bool [S, M]: the drafter's likeliest token is the target's."""


def training_time_test(
    drafter: Eagle3, batch: Pass, teacher: Teacher, *, steps: int, decay: float, chunk: int
) -> Outcome:
    """Run `steps` draft steps over a pass; `batch` packed with `skip` >= steps + 1.

    The drafter and the teacher's states share one dtype (float32 or bfloat16).
    """
    assert drafter.head is not None, "a drafter in training has its own head"
    attend = TrainingTimeTest(batch.docs, drafter.config.attention_shape())
    counts = (teacher.best >= 0).float()
    row_weights = counts / counts.sum().clamp(min=1.0)
    hidden = drafter.fuse(teacher.aux)
    losses, hits = [], []
    for step in range(steps):
        embeds = teacher.embeds.roll(-1 - step, 0)
        normed, hidden = drafter(embeds, hidden, batch.positions + step, attend)
        rows = normed.index_select(0, batch.predicted - (2 + step))
        loss, guess = soft_cross_entropy(
            rows, drafter.head.weight, teacher.probs, row_weights, chunk
        )
        losses.append(loss)
        hits.append(guess == teacher.best)
    stacked = torch.stack(losses)
    weights = decay ** torch.arange(steps, device=stacked.device, dtype=torch.float32)
    return Outcome(loss=stacked @ weights, step_losses=stacked.detach(), hits=torch.stack(hits))


def accept_lengths(batch: Pass, hits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Simulated greedy accept length of chains as deep as `hits` bool [S, M] has steps.

    Returns (sum of accept lengths, number of rows a chain could start from), float64 [] each. A
    chain from row t is right for as long as steps 0, 1, ... hit tokens t + 2, t + 3, ...; only
    rows whose every step carries loss count, and the bonus token counts one.
    """
    steps, rows = hits.shape[0], batch.tokens.shape[0]
    hit = torch.zeros(steps, rows, dtype=torch.float64, device=hits.device)
    seen = torch.zeros_like(hit)
    for step in range(steps):
        starts = batch.predicted - (2 + step)
        hit[step, starts] = hits[step].double()
        seen[step, starts] = 1.0
    whole = seen.prod(0)
    return (whole * (1.0 + hit.cumprod(0).sum(0))).sum(), whole.sum()


def soft_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    probs: torch.Tensor,
    row_weights: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of softmax(hidden @ weight.T) against `probs`, and the argmax.

    hidden [M, E], weight [Vd, E], probs [M, Vd], row_weights float32 [M]. Returns (float32 [],
    int64 [M]). Logits exist for `chunk` rows at a time only: gradients are taken on the way (the
    fused linear cross-entropy of Liger Kernel, arXiv 2410.10989).
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _SoftCrossEntropy.apply
    return apply(hidden, weight, probs, row_weights, chunk)


class _SoftCrossEntropy(torch.autograd.Function):
    """See `soft_cross_entropy`; d loss / d logits = row weight * (softmax - probs)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        probs: torch.Tensor,
        row_weights: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, argmax, and kept gradients of `hidden` and `weight`."""
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        guess = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            rows, share = hidden[part], row_weights[part]
            logits = rows @ weight.T
            guess[part] = logits.argmax(-1)
            logq = logits.log_softmax(-1, dtype=torch.float32)
            loss -= share @ (probs[part] * logq).sum(-1)
            if any(ctx.needs_input_grad):
                dlogits = logq.exp_().sub_(probs[part]).to(hidden.dtype)
                dhidden[part] = (dlogits @ weight) * share.unsqueeze(-1)
                dweight += dlogits.T @ (rows * share.unsqueeze(-1)).to(hidden.dtype)
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        ctx.mark_non_differentiable(guess)
        return loss, guess

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        """Scale the kept gradients."""
        dhidden, dweight = ctx.saved_tensors
        return dhidden * grad, dweight * grad, None, None, None
