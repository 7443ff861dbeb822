"""A small language model as drafter: any target family, over its own paged KV.

Row t embeds token t itself, so the row of the root draws the first candidates. `update` runs it at
the end of the extend: the rows of the committed tokens, then the root's, whose entry lies in the
first scratch position behind the committed ones, where the next cycle writes the same again. So
the KV length equals the target's committed KV length, and drafting builds on one entry more.
The target's states are not read, and the text is the target's whatever the model says.
"""

from __future__ import annotations

import torch

from eyas.attention import PagedAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SpeculationConfig
from eyas.kernels.rows import take_rows
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from eyas.speculate.drafter import Committed, DraftContext
from eyas.speculate.grow import Growth
from eyas.speculate.tree import Draft


class StandaloneDrafter:
    """Drafts the likeliest tokens of a model that shares the target's tokenizer.

    Of two padded vocabularies the ids below the smaller size are drafted; a committed token that
    the model does not have is read as its last one.
    """

    aux_layers: tuple[int, ...] = ()
    aux_size = 0

    def __init__(
        self,
        model: Decoder,
        vocab_size: int,
        pool: KVPool,
        attention: PagedAttention,
        speculation: SpeculationConfig,
        num_slots: int,
    ) -> None:
        """`vocab_size` is the target's; `pool` has the model's shape and the target's pages, and
        `attention` is over it.
        """
        self.model, self.pool = model, pool
        self.attention, self.needs_bound = attention, attention.needs_bound
        weight = model.embed.weight
        self._last_token = model.config.vocab_size - 1
        self._shared = min(vocab_size, model.config.vocab_size)
        ids = torch.arange(self._shared, device=weight.device)
        self.growth = Growth(self._draft, ids, speculation, weight.new_zeros(num_slots, 0), ahead=1)

    def propose(self, context: DraftContext) -> Draft:
        """Grow the tree one level a pass behind the root's entry."""
        return self.growth.grow(context)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Extend the KV over the committed rows and the root; keep the next first candidates."""
        first = context.history[context.slots, context.kv_lens]
        tokens = torch.cat((first[:, None], committed.tokens), dim=1)
        count = tokens.shape[1]
        positions = context.kv_lens[:, None] + torch.arange(count, device=tokens.device)
        positions = positions.clamp(max=context.history.shape[1] - 1)
        batch = ForwardBatch(
            mode=mode,
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            prefix_lens=context.kv_lens,
            page_table=context.page_table,
            num_new=count,
            # a prompt chunk's bound ends with the chunk, a cycle's holds all it may write
            max_kv_len=context.max_kv_len + (mode is ForwardMode.EXTEND),
        )
        [roots] = take_rows(committed.counts, self._forward(batch), step=count)
        logits = self._logits(roots)
        self.growth.start(context, committed.kv_lens, logits, roots[:, :0])

    def _draft(
        self, batch: ForwardBatch, fed_back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftPass`; nothing is fed back."""
        return self._logits(self._forward(batch)), fed_back

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, E]."""
        tokens = batch.tokens.clamp(max=self._last_token)
        return self.model(tokens, batch.positions, self.attention.begin(batch))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [T, Vd] of the ids that both vocabularies have."""
        return self.model.logits(hidden)[:, : self._shared]
