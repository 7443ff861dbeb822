"""Growing a draft tree level by level: what drafters that run a network share.

A slot's row keeps what its last extend gave: the first candidates behind the root, their scores,
and the state they grow from. A chain is a tree of width 1; the tree is EAGLE-2's (arXiv 2406.16858,
section 4). Knows neither networks nor caches: a pass over draft rows is a function it is given.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SpeculationConfig
from eyas.kernels.draw import candidates
from eyas.kernels.grow import Frontier, advance, first_pool
from eyas.kernels.rows import put_rows, take_rows
from eyas.speculate.drafter import DraftContext
from eyas.speculate.tree import Draft, best_draft, chain_draft


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
        self._lanes = torch.arange(config.eagle_topk, device=device)
        self._own = torch.ones_like(self._lanes) << self._lanes

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
        index = context.kv_lens + counts if context.sampled else counts
        tokens, scores = self._candidates(logits, context, index, 1)
        kept = (self.hidden, self.tokens, self.scores)
        put_rows(context.slots, kept, (hidden, tokens, scores))

    def grow(self, context: DraftContext, prefix_lens: torch.Tensor) -> Draft:
        """Grow the tree one level a pass from the kept candidates.

        Draft rows are written behind `prefix_lens` int64[B], the entries that all of them see; a
        row's position is that of its level behind them.
        """
        kept = take_rows(context.slots, self.hidden, self.tokens, self.scores)
        grow = self._chain if self.config.eagle_topk == 1 else self._tree
        return grow(context, prefix_lens, *kept)

    def _chain(
        self,
        context: DraftContext,
        prefix_lens: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        scores: torch.Tensor,
    ) -> Draft:
        """A tree of width 1: every row's child is its likeliest token."""
        drafts = [tokens]
        for step in range(1, self.config.num_steps):
            positions = prefix_lens + (step - 1) if step > 1 else prefix_lens
            logits, hidden = self._pass(context, prefix_lens, tokens, positions, hidden, step)
            tokens, _ = self._candidates(logits, context, context.kv_lens, step + 1)
            drafts.append(tokens)
        return chain_draft(context.roots, torch.cat(drafts, dim=1))

    def _tree(
        self,
        context: DraftContext,
        prefix_lens: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        scores: torch.Tensor,
    ) -> Draft:
        """Every level's nodes are the best children of the last level's."""
        steps, topk = self.config.num_steps, tokens.shape[1]
        pool = first_pool(tokens, scores, steps)
        frontier = Frontier(
            tokens=tokens,
            scores=scores,
            pool_index=self._lanes.expand_as(tokens),
            bits=self._own.expand_as(tokens),
            positions=prefix_lens[:, None].expand_as(tokens),
            rows=self._lanes,
        )
        hidden = hidden.repeat_interleave(topk, dim=0)
        for step in range(1, steps):
            logits, states = self._pass(
                context,
                prefix_lens,
                frontier.tokens,
                frontier.positions,
                hidden,
                step,
                frontier.bits,
            )
            found = self._candidates(logits, context, context.kv_lens, step + 1)
            frontier = advance(*found, frontier, pool, prefix_lens, step)
            hidden = states.index_select(0, frontier.rows.flatten())
        return best_draft(context.roots, pool, self.config.num_draft_tokens, self.config.depth)

    def _pass(
        self,
        context: DraftContext,
        prefix_lens: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        step: int,
        bits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows of `tokens` int64[B, topk] over what was drafted; see `DraftPass`."""
        topk = tokens.shape[1]
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT_DECODE,
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            prefix_lens=prefix_lens,
            page_table=context.page_table,
            num_new=topk,
            max_kv_len=context.max_kv_len,
            ancestors=None if bits is None else bits.flatten(),
            tail_offset=(step - 1) * topk,
        )
        return self._run(batch, hidden)

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
