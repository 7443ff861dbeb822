"""The passes of the engine, as functions over device tensors.

`cycle` is one draft-verify-accept-commit-extend round of a batch; `prefill` is one pass over prompt
chunks. Neither reads a value on the host, and every shape follows from the host-chosen `PassShape`:
on a CPU they run eagerly, on a GPU the same functions can be captured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from eyas.attention import PagedAttention
from eyas.batch import ForwardBatch, ForwardMode, PassShape
from eyas.distributed.group import Group
from eyas.engine.state import DeviceState
from eyas.kernels.draw import draw
from eyas.kernels.move import keep_path
from eyas.kernels.rows import take_rows
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from eyas.spans import Spans
from eyas.speculate.accept import accept
from eyas.speculate.drafter import Committed, DraftContext, Drafter
from eyas.speculate.simulate import decree
from eyas.speculate.tree import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a pass works with."""

    target: Decoder
    pool: KVPool
    attention: PagedAttention
    drafter: Drafter
    state: DeviceState
    decreed: torch.Tensor | None = None
    """float32[depth]: acceptance rates by decree; None: acceptance is real."""

    @property
    def needs_bound(self) -> bool:
        """Whether work follows the host's bound on lengths: such a cycle can't be replayed."""
        return self.attention.needs_bound or self.drafter.needs_bound


def cycle(parts: Parts, slots: torch.Tensor, shape: PassShape, spans: Spans) -> torch.Tensor:
    """One cycle over `slots` int64[B].

    Returns int64[B, depth + 2]: the number of committed tokens, then the tokens (bonus last;
    columns past the count mean nothing). Updates the slots' rows, both KV caches and the drafter.
    """
    spans.mark("draft")
    context = _context(parts, slots, shape)
    group = parts.target.group
    draft = _agreed(group, parts.drafter.propose(context))
    spans.mark("verify")
    num_nodes = draft.tokens.shape[1]
    logits, aux, positions = _verify(parts, context, draft)
    spans.mark("accept")
    kind = {"sampled": shape.sampled, "filtered": shape.filtered}
    drawn = draw(logits, context.rows, positions, 1, **kind).view(-1, num_nodes)
    if parts.decreed is not None and num_nodes > 1:
        drawn = decree(draft, drawn, context.rows, context.kv_lens, parts.decreed)
    slot_rows = parts.state.to_settle(slots, context.kv_lens)
    settled = accept(draft, group.share(drawn), slot_rows)
    spans.mark("commit")
    if draft.parents is not None:
        table, path = context.page_table, settled.path
        keep_path(parts.pool, table, context.kv_lens, path, settled.counts)
    spans.mark("extend")
    committed = Committed(
        tokens=settled.tokens,
        positions=settled.positions,
        aux=None if aux is None else _along(draft, settled.rows, aux),
        counts=settled.counts,
        kv_lens=settled.kv_lens,
    )
    parts.drafter.update(context, committed, ForwardMode.DRAFT_EXTEND)
    spans.mark(None)
    return settled.out


def prefill(
    parts: Parts,
    slots: torch.Tensor,
    chunk: torch.Tensor,
    next_tokens: torch.Tensor,
    counts: torch.Tensor,
    shape: PassShape,
) -> torch.Tensor:
    """One pass over B prompt chunks, padded to M = `shape.num_new` rows each.

    chunk int64[B, M]: tokens; counts int64[B]: rows that count; next_tokens int64[B]: the prompt
    token behind the chunk, or -1 where the prompt ends and it is to be drawn. Returns int64[B]: the
    token behind each chunk.
    """
    context = _context(parts, slots, shape)
    positions = context.kv_lens[:, None] + torch.arange(shape.num_new, device=slots.device)
    positions = positions.clamp(max=parts.state.history.shape[1] - 1)
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        tokens=chunk.flatten(),
        positions=positions.flatten(),
        prefix_lens=context.kv_lens,
        page_table=context.page_table,
        num_new=shape.num_new,
        max_kv_len=shape.max_kv_len,
    )
    hidden, aux = _target(parts, batch)
    last = (counts - 1)[:, None, None]
    hidden = hidden.view(-1, shape.num_new, hidden.shape[-1])
    hidden = hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))[:, 0]
    kv_lens = context.kv_lens + counts
    kind = {"sampled": shape.sampled, "filtered": shape.filtered}
    drawn = draw(parts.target.logits(hidden), context.rows, kv_lens, **kind)
    drawn = torch.where(next_tokens < 0, parts.target.group.share(drawn), next_tokens)
    behind = torch.cat((chunk[:, 1:], drawn[:, None]), dim=1).scatter(
        1, last[:, :, 0], drawn[:, None]
    )
    parts.state.write_history(slots, context.kv_lens, chunk)
    parts.state.write_history(slots, kv_lens, drawn[:, None])
    parts.state.kv_lens[slots] = kv_lens
    parts.state.roots[slots] = drawn
    if aux is not None:
        aux = aux.view(-1, shape.num_new, aux.shape[-1])
    committed = Committed(
        tokens=behind, positions=positions, aux=aux, counts=counts, kv_lens=kv_lens
    )
    parts.drafter.update(context, committed, ForwardMode.EXTEND)
    return drawn


def _context(parts: Parts, slots: torch.Tensor, shape: PassShape) -> DraftContext:
    roots, kv_lens, page_table, rows = parts.state.fetch(slots)
    return DraftContext(
        slots=slots,
        roots=roots,
        kv_lens=kv_lens,
        page_table=page_table,
        history=parts.state.history,
        rows=rows,
        sampled=shape.sampled,
        max_kv_len=shape.max_kv_len,
    )


def _agreed(group: Group, draft: Draft) -> Draft:
    """Rank 0's tree on every rank, by one collective; a root alone is known everywhere.

    Drafters are replicated, and the last bit of a score may differ between ranks. What the target
    draws is shared too, so nothing that ranks compute can make their sequences part.
    """
    if group.size == 1 or draft.tokens.shape[1] == 1:
        return draft
    if draft.parents is None or draft.ancestors is None:
        return dataclasses.replace(draft, tokens=group.share(draft.tokens))
    packed = torch.cat((draft.tokens, draft.positions, draft.parents, draft.ancestors), dim=1)
    tokens, positions, parents, ancestors = group.share(packed).chunk(4, dim=1)
    return dataclasses.replace(
        draft, tokens=tokens, positions=positions, parents=parents, ancestors=ancestors
    )


def _verify(
    parts: Parts, context: DraftContext, draft: Draft
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Target logits [B * N, V] of the tree, its aux states if the drafter wants them, positions."""
    num_nodes = draft.tokens.shape[1]
    batch = ForwardBatch(
        mode=ForwardMode.TARGET_VERIFY if num_nodes > 1 else ForwardMode.DECODE,
        tokens=draft.tokens.flatten(),
        positions=draft.positions.flatten(),
        prefix_lens=context.kv_lens,
        page_table=context.page_table,
        num_new=num_nodes,
        max_kv_len=context.max_kv_len,
        ancestors=None if draft.ancestors is None else draft.ancestors.flatten(),
    )
    hidden, aux = _target(parts, batch)
    return parts.target.logits(hidden), aux, batch.positions


def _target(parts: Parts, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states [T, E] and, in a buffer, the states the drafter asked for."""
    drafter, target = parts.drafter, parts.target
    aux = None
    if drafter.aux_layers:
        dtype = target.embed.weight.dtype
        aux = torch.empty(
            batch.tokens.shape[0], drafter.aux_size, dtype=dtype, device=batch.tokens.device
        )
    attend = parts.attention.begin(batch)
    hidden = target(batch.tokens, batch.positions, attend, aux, drafter.aux_layers)
    return hidden, aux


def _along(draft: Draft, rows: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """States [B, depth + 1, A] of the paths' rows int64[B, depth + 1], of aux [B * N, A].

    Past the counts they mean nothing: a chain's are taken as they are.
    """
    if draft.parents is not None:
        [aux] = take_rows(rows.flatten(), aux)
    return aux.view(*rows.shape, aux.shape[-1])
