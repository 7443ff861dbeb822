"""Drafters: what proposes the tokens of a cycle.

A drafter sees tensors only: which slots run, how long their committed KV is, the tokens just
committed and the target's hidden states for them. It never reads a value on the host, so it can
be captured in a graph with the rest of the cycle. Between cycles it keeps its own rows per slot.

Invariant of a drafter with a KV cache: its KV length equals the target's committed KV length, and
every kept entry was computed from target states (draft entries are overwritten).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.attention import PagedAttention, paged_attention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SpeculationConfig
from eyas.kv.pool import KVPool
from eyas.layers.linear import Embedding
from eyas.models.eagle3 import Eagle3
from eyas.sampling import SamplingRows, gumbel_noise, scale
from eyas.speculate.tree import Draft, chain_draft, select_nodes, tree_draft

QUICK_ROWS = 3
"""Most rows of a pass for which 8-bit weights are faster (2-core CPU, AVX512-VNNI)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """The running requests as a drafter sees them; B rows."""

    slots: torch.Tensor
    """int64[B]: rows of per-slot state."""
    roots: torch.Tensor
    """int64[B]: last committed token, in no KV cache yet."""
    kv_lens: torch.Tensor
    """int64[B]: committed KV length; the root's index in its sequence."""
    page_table: torch.Tensor
    """int64[B, P]"""
    history: torch.Tensor
    """int64[S, M]: every slot's tokens; row `slots[b]` is known up to the root."""
    rows: SamplingRows
    sampled: bool
    """Whether any row draws with noise."""
    max_kv_len: int
    """Host upper bound of KV length with everything the cycle may write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Tokens a pass committed: M rows a request, of which the first `counts` mean something."""

    tokens: torch.Tensor
    """int64[B, M]: the token after each row's position."""
    aux: torch.Tensor | None
    """[B, M, num_aux * E]: target states at each row's position."""
    counts: torch.Tensor
    """int64[B]: rows that count, at least 1."""


class Drafter(Protocol):
    """Proposes drafts, and follows what was committed."""

    aux_layers: tuple[int, ...]
    """Target boundaries whose states the drafter wants; empty for none."""
    aux_size: int
    """Columns of `Committed.aux`."""
    needs_bound: bool
    """Whether shapes inside follow `DraftContext.max_kv_len`."""

    def propose(self, context: DraftContext) -> Draft:
        """The tree to verify."""

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Take in tokens committed behind `context.kv_lens` (a prompt chunk or a cycle's)."""


class NoDrafter:
    """Drafts nothing: the tree is the root alone, and a cycle is a plain decode step."""

    aux_layers: tuple[int, ...] = ()
    aux_size = 0
    needs_bound = False

    def propose(self, context: DraftContext) -> Draft:
        """The root."""
        return chain_draft(context.roots, context.roots.new_zeros(context.roots.shape[0], 0))

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Nothing to keep."""


class NGramDrafter:
    """Copies what followed the latest earlier occurrence of the current suffix.

    The longest matching suffix up to `max_match` tokens wins, then the latest place; a run that
    reaches the end of the text repeats from its start. Prompt-lookup decoding, on the device.
    """

    aux_layers: tuple[int, ...] = ()
    aux_size = 0
    needs_bound = False

    def __init__(self, num_drafts: int, max_match: int = 4) -> None:
        self.num_drafts, self.max_match = num_drafts, max_match

    def propose(self, context: DraftContext) -> Draft:
        """A chain looked up in each request's own text."""
        width = min(context.max_kv_len + 1, context.history.shape[1])
        text = context.history[context.slots, :width]
        last = context.kv_lens[:, None]
        ends = torch.arange(width, device=text.device)
        matched = torch.zeros_like(text)
        running = ends < last
        for back in range(self.max_match):
            suffix = text.gather(1, (last - back).clamp(min=0))
            shifted = text.roll(back, dims=1)
            running = running & (shifted == suffix) & (ends >= back)
            matched = matched + running
        best = (matched * width + ends * (matched > 0)).argmax(1, keepdim=True)
        period = (last - best).clamp(min=1)
        steps = torch.arange(self.num_drafts, device=text.device)
        drafts = text.gather(1, (best + 1 + steps % period).clamp(max=width - 1))
        return chain_draft(context.roots, drafts)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """The history is all it needs."""


class Eagle3Drafter:
    """EAGLE-3 drafting over the drafter network's own paged KV.

    A slot's row keeps what the last extend gave: the first candidates, their scores and the hidden
    state the tree grows from. Row t of the drafter embeds token t + 1 beside the target's state at
    t, at rotary position t (arXiv 2503.01840; EAGLE's `topK_genrate` for the tree).
    """

    def __init__(
        self,
        network: Eagle3,
        embedding: Embedding,
        pool: KVPool,
        speculation: SpeculationConfig,
        num_slots: int,
        quick: Eagle3 | None = None,
    ) -> None:
        """`embedding` is the target's, used unless the network has its own.

        `quick` is the network with rounded weights: it takes the place of `network` in passes of
        few draft rows. KV of committed tokens always comes from `network`.
        """
        self.network, self.pool, self.config = network, pool, speculation
        self.quick = quick
        self.embedding = embedding if network.embed is None else network.embed
        self.attention: PagedAttention = paged_attention(pool)
        self.needs_bound = self.attention.needs_bound
        self.aux_layers = network.config.aux_layers
        self.aux_size = len(self.aux_layers) * network.config.target_hidden_size
        device, topk = pool.k.device, speculation.eagle_topk
        hidden = network.config.hidden_size
        self.hidden = torch.zeros(num_slots, hidden, dtype=embedding.weight.dtype, device=device)
        self.tokens = torch.zeros(num_slots, topk, dtype=torch.int64, device=device)
        self.scores = torch.zeros(num_slots, topk, device=device)

    def propose(self, context: DraftContext) -> Draft:
        """Grow the tree one level a pass from the kept candidates."""
        topk, steps = self.config.eagle_topk, self.config.num_steps
        frontier = self._first_level(context)
        tokens, scores, parents = [frontier.tokens], [frontier.scores], [frontier.parents]
        for step in range(1, steps):
            children, hidden = self._expand(context, frontier, step)
            base = topk + (step - 1) * topk * topk
            tokens.append(children.tokens)
            scores.append(children.scores)
            parents.append(children.parents)
            frontier = self._next_frontier(children, hidden, frontier, base, step)
        pool_tokens = torch.cat(tokens, dim=1)
        if topk == 1:
            return chain_draft(context.roots, pool_tokens)
        chosen, nodes = select_nodes(
            torch.cat(scores, dim=1), torch.cat(parents, dim=1), self.config.num_draft_tokens - 1
        )
        drafts = pool_tokens.gather(1, chosen)
        return tree_draft(context.roots, drafts, nodes, self.config.depth)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Extend the drafter's KV over the committed rows; keep the next first candidates."""
        assert committed.aux is not None, "an EAGLE-3 drafter needs the target's hidden states"
        count = committed.tokens.shape[1]
        positions = context.kv_lens[:, None] + torch.arange(count, device=self.hidden.device)
        positions = positions.clamp(max=context.history.shape[1] - 1)
        batch = ForwardBatch(
            mode=mode,
            tokens=committed.tokens.flatten(),
            positions=positions.flatten(),
            prefix_lens=context.kv_lens,
            page_table=context.page_table,
            num_new=count,
            max_kv_len=context.max_kv_len,
        )
        hidden = self._forward(self.network, batch, self.network.fuse(committed.aux.flatten(0, 1)))
        last = (committed.counts - 1)[:, None, None]
        hidden = hidden.view(-1, count, hidden.shape[-1])
        hidden = hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))[:, 0]
        logits, fed_back = self._drafting(hidden.shape[0]).score(hidden)
        drawn_index = context.kv_lens + committed.counts + 1
        tokens, scores = self._candidates(logits, context.rows, drawn_index, context.sampled)
        self.hidden[context.slots] = fed_back
        self.tokens[context.slots] = tokens
        self.scores[context.slots] = scores

    def _drafting(self, rows: int) -> Eagle3:
        """The network that drafts `rows` rows faster."""
        return self.network if self.quick is None or rows > QUICK_ROWS else self.quick

    def _forward(self, network: Eagle3, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        embeds = self.embedding(batch.tokens)
        return network(embeds, hidden, batch.positions, self.attention.begin(batch))

    def _first_level(self, context: DraftContext) -> _Frontier:
        slots, topk = context.slots, self.config.eagle_topk
        own = torch.ones(topk, dtype=torch.int64, device=slots.device)
        own = own << torch.arange(topk, device=slots.device)
        hidden = self.hidden[slots][:, None].expand(-1, topk, -1)
        tokens = self.tokens[slots]
        return _Frontier(
            tokens=tokens,
            scores=self.scores[slots],
            parents=torch.full_like(tokens, -1),
            pool_index=torch.arange(topk, device=slots.device).expand_as(tokens),
            hidden=hidden,
            bits=own.expand_as(tokens),
        )

    def _expand(
        self, context: DraftContext, frontier: _Frontier, step: int
    ) -> tuple[_Children, torch.Tensor]:
        """Run the frontier's nodes; children [B, topk * topk] and fed-back hidden states."""
        num_requests, topk = frontier.tokens.shape
        positions = (context.kv_lens + step - 1)[:, None].expand(-1, topk)
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT_DECODE,
            tokens=frontier.tokens.flatten(),
            positions=positions.flatten(),
            prefix_lens=context.kv_lens,
            page_table=context.page_table,
            num_new=topk,
            max_kv_len=context.max_kv_len,
            ancestors=frontier.bits.flatten() if topk > 1 else None,
            tail_offset=(step - 1) * topk,
        )
        network = self._drafting(num_requests * topk)
        x = self._forward(network, batch, frontier.hidden.flatten(0, 1))
        logits, hidden = network.score(x)
        rows = context.rows.repeat(topk) if topk > 1 else context.rows
        index = (context.kv_lens + step + 1).repeat_interleave(topk)
        tokens, scores = self._candidates(logits, rows, index, context.sampled)
        total = scores.view(num_requests, topk, topk) + frontier.scores[:, :, None]
        parents = frontier.pool_index[:, :, None].expand(-1, -1, topk)
        children = _Children(
            tokens=tokens.view(num_requests, -1),
            scores=total.flatten(1),
            parents=parents.flatten(1),
        )
        return children, hidden.view(num_requests, topk, -1)

    def _next_frontier(
        self,
        children: _Children,
        hidden: torch.Tensor,
        frontier: _Frontier,
        base: int,
        step: int,
    ) -> _Frontier:
        """The topk best children; `base` is the pool index of the first child."""
        topk = self.config.eagle_topk
        order = torch.sort(children.scores, dim=1, descending=True, stable=True).indices
        best = order[:, :topk]
        parent = best // topk
        own = torch.ones_like(best) << (step * topk + torch.arange(topk, device=best.device))
        return _Frontier(
            tokens=children.tokens.gather(1, best),
            scores=children.scores.gather(1, best),
            parents=children.parents.gather(1, best),
            pool_index=best + base,
            hidden=hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1])),
            bits=frontier.bits.gather(1, parent) | own,
        )

    def _candidates(
        self, logits: torch.Tensor, rows: SamplingRows, index: torch.Tensor, sampled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best topk target ids int64[R, topk] and their log scores of draft logits [R, Vd].

        With noise the score is the log-softmax of the perturbed logits: it ranks nodes by how
        surely the target, under the same noise, draws them.
        """
        topk = self.config.eagle_topk
        scores = scale(logits, rows) if sampled else logits.float()
        if sampled and self.config.shared_noise:
            noise = gumbel_noise(rows.seed, index, self.network.target_ids)
            scores = torch.where((rows.temperature > 0)[:, None], scores + noise, scores)
        if topk == 1:
            best = scores.max(-1, keepdim=True).indices
            return self.network.target_ids[best], torch.zeros_like(best, dtype=torch.float32)
        values, best = scores.log_softmax(-1).topk(topk, dim=-1)
        return self.network.target_ids[best], values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Children:
    """Candidates of one level, [B, topk * topk] each; parents index the pool."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frontier:
    """Nodes that grow next, [B, topk] each."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    pool_index: torch.Tensor
    hidden: torch.Tensor
    """[B, topk, E]: what the parent's pass fed back."""
    bits: torch.Tensor
    """int64: ancestors among the draft rows written so far, own row included."""
