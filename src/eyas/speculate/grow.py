"""Growing a draft tree level by level: what drafters that run a network share.

A slot's row keeps what its last extend gave: the first candidates behind the root, their scores,
and the state they grow from. A chain is a tree of width 1; the tree is EAGLE-2's (arXiv 2406.16858,
section 4). Knows neither networks nor caches: a pass over draft rows is a function it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SpeculationConfig
from eyas.kernels.draw import candidates
from eyas.speculate.drafter import DraftContext
from eyas.speculate.tree import Draft, chain_draft, select_nodes, tree_draft


class DraftPass(Protocol):
    """A network's pass over draft rows."""

    def __call__(
        self, batch: ForwardBatch, fed_back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, Vd] of the rows, and the states [T, F] that their children are run with.

        `fed_back` [T, F] is what the passes of the rows' parents returned.
        """


class Growth:
    """Every slot's first candidates, and the trees that grow from them."""

    def __init__(
        self,
        run: DraftPass,
        target_ids: torch.Tensor,
        config: SpeculationConfig,
        hidden: torch.Tensor,
    ) -> None:
        """`target_ids` int64[Vd] maps a logit's column to its token; `hidden` is zeros [S, F]."""
        self._run, self.target_ids, self.config = run, target_ids, config
        slots, device = hidden.shape[0], hidden.device
        self.hidden = hidden
        self.tokens = torch.zeros(slots, config.eagle_topk, dtype=torch.int64, device=device)
        self.scores = torch.zeros(slots, config.eagle_topk, device=device)

    def start(
        self,
        context: DraftContext,
        counts: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Keep the candidates behind the next root, which stands `counts` int64[B] further on.

        logits [B, Vd] and the fed-back state `hidden` [B, F] are those of the row that draws them.
        """
        tokens, scores = self._candidates(logits, context, context.kv_lens + counts, 1)
        self.hidden[context.slots] = hidden
        self.tokens[context.slots] = tokens
        self.scores[context.slots] = scores

    def grow(self, context: DraftContext, prefix_lens: torch.Tensor) -> Draft:
        """Grow the tree one level a pass from the kept candidates.

        Draft rows are written behind `prefix_lens` int64[B], the entries that all of them see; a
        row's position is that of its level behind them.
        """
        topk, steps = self.config.eagle_topk, self.config.num_steps
        frontier = self._first_level(context)
        tokens, scores, parents = [frontier.tokens], [frontier.scores], [frontier.parents]
        for step in range(1, steps):
            children, hidden = self._expand(context, prefix_lens, frontier, step)
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
        self, context: DraftContext, prefix_lens: torch.Tensor, frontier: _Frontier, step: int
    ) -> tuple[_Children, torch.Tensor]:
        """Run the frontier's nodes; children [B, topk * topk] and fed-back states [B, topk, F]."""
        num_requests, topk = frontier.tokens.shape
        positions = (prefix_lens + step - 1)[:, None].expand(-1, topk)
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT_DECODE,
            tokens=frontier.tokens.flatten(),
            positions=positions.flatten(),
            prefix_lens=prefix_lens,
            page_table=context.page_table,
            num_new=topk,
            max_kv_len=context.max_kv_len,
            ancestors=frontier.bits.flatten() if topk > 1 else None,
            tail_offset=(step - 1) * topk,
        )
        logits, hidden = self._run(batch, frontier.hidden.flatten(0, 1))
        tokens, scores = self._candidates(logits, context, context.kv_lens, step + 1)
        total = scores.view(num_requests, topk, topk) + frontier.scores[:, :, None]
        parents = frontier.pool_index[:, :, None].expand(-1, -1, topk)
        children = _Children(
            tokens=tokens.view(num_requests, -1),
            scores=total.flatten(1),
            parents=parents.flatten(1),
        )
        return children, hidden.view(num_requests, topk, hidden.shape[-1])

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
        self, logits: torch.Tensor, context: DraftContext, index: torch.Tensor, ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `candidates`."""
        return candidates(
            logits,
            self.target_ids,
            self.config.eagle_topk,
            context.rows,
            index,
            ahead,
            sampled=context.sampled,
            noise=self.config.shared_noise,
        )


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
    """[B, topk, F]: what the parent's pass fed back."""
    bits: torch.Tensor
    """int64: ancestors among the draft rows written so far, own row included."""
