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
from eyas.kernels.begin import Frontier, begin_chain, begin_tree
from eyas.kernels.draw import Kept, Scored, draw_into, keep_best
from eyas.kernels.grow import advance
from eyas.kernels.tree import Pool
from eyas.speculate.drafter import DraftContext
from eyas.speculate.tree import Draft, best_draft


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
        ahead: int = 0,
    ) -> None:
        """`target_ids` int64[Vd] maps a logit's column to its token; `hidden` is zeros [S, F].

        Drafts build on the committed entries and `ahead` more, and are written behind them.
        """
        self._run, self.target_ids, self.config, self._ahead = run, target_ids, config, ahead
        slots, topk = hidden.shape[0], config.eagle_topk
        tokens = torch.zeros(slots, topk, dtype=torch.int64, device=hidden.device)
        self.kept = Kept(hidden, tokens, torch.zeros(slots, topk, device=hidden.device))

    def start(
        self,
        context: DraftContext,
        kv_lens: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Keep the candidates behind the next root, which stands at kv_lens int64[B].

        logits [B, Vd] and the fed-back state `hidden` [B, F] are those of the row that draws them.
        """
        keep_best(self._scored(logits, context, kv_lens, 1), context.slots, self.kept, hidden)

    def grow(self, context: DraftContext) -> Draft:
        """Grow the tree one level a pass from the kept candidates.

        A row's position is that of its level behind the entries that all rows see.
        """
        prefix_lens = context.kv_lens + self._ahead if self._ahead else context.kv_lens
        grow = self._chain if self.config.eagle_topk == 1 else self._tree
        return grow(context, prefix_lens)

    def _chain(self, context: DraftContext, prefix_lens: torch.Tensor) -> Draft:
        """A tree of width 1: every row's child is its likeliest token."""
        depth = self.config.num_steps
        given = (context.slots, context.roots, context.kv_lens, self.kept)
        tokens, positions, hidden = begin_chain(*given, depth + 1)
        for step in range(1, depth):
            where = positions[:, step - 1 + self._ahead]
            batch = self._batch(context, prefix_lens, tokens[:, step : step + 1], where, step)
            logits, hidden = self._run(batch, hidden)
            self._draw(context, logits, step, tokens[:, step + 1])
        return Draft(tokens=tokens, positions=positions, depth=depth)

    def _tree(self, context: DraftContext, prefix_lens: torch.Tensor) -> Draft:
        """Every level's nodes are the best children of the last level's."""
        config = self.config
        frontier, pool = begin_tree(context.slots, prefix_lens, self.kept, config.num_steps)
        for step in range(1, config.num_steps):
            where = frontier.positions.flatten()
            batch = self._batch(context, prefix_lens, frontier.tokens, where, step, frontier.bits)
            found = self._run(batch, frontier.hidden)
            frontier = self._advance(context, found, frontier, pool, prefix_lens, step)
        given = (context.roots, context.kv_lens, pool)
        return best_draft(*given, config.num_draft_tokens, config.depth)

    def _draw(
        self, context: DraftContext, logits: torch.Tensor, step: int, tokens: torch.Tensor
    ) -> None:
        """Write the likeliest tokens behind the nodes of a chain's step into tokens int64[B]."""
        draw_into(self._scored(logits, context, context.kv_lens, step + 1), tokens)

    def _advance(
        self,
        context: DraftContext,
        found: tuple[torch.Tensor, torch.Tensor],
        frontier: Frontier,
        pool: Pool,
        prefix_lens: torch.Tensor,
        step: int,
    ) -> Frontier:
        """A level of trees, of what its pass `found`; see `advance`."""
        logits, states = found
        scored = self._scored(logits, context, context.kv_lens, step + 1)
        return advance(scored, frontier, pool, prefix_lens, states, step)

    def _batch(
        self,
        context: DraftContext,
        prefix_lens: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: int,
        bits: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Rows of `tokens` int64[B, topk] at positions int64[B * topk], over what was drafted."""
        topk = tokens.shape[1]
        return ForwardBatch(
            mode=ForwardMode.DRAFT_DECODE,
            tokens=tokens.flatten(),
            positions=positions,
            prefix_lens=prefix_lens,
            page_table=context.page_table,
            num_new=topk,
            max_kv_len=context.max_kv_len,
            ancestors=None if bits is None else bits.flatten(),
            tail_offset=(step - 1) * topk,
        )

    def _scored(
        self, logits: torch.Tensor, context: DraftContext, index: torch.Tensor, ahead: int
    ) -> Scored:
        """Logits as candidates' launches take them; see `Scored`."""
        return Scored(
            logits,
            self.target_ids,
            self.config.eagle_topk,
            context.rows,
            index,
            ahead,
            context.sampled,
            self.config.shared_noise,
        )
