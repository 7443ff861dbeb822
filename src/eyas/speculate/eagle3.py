"""The EAGLE-3 drafter: its network over its own paged KV.

Row t embeds token t + 1 beside the target's states at t, at rotary position t (arXiv 2503.01840).
KV of committed tokens is computed from target states; entries that drafting writes behind it are
overwritten.
"""

from __future__ import annotations

import torch

from eyas.attention import PagedAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.config import SpeculationConfig
from eyas.kernels.planes import MOST_ROWS_8_BIT
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.speculate.drafter import Committed, DraftContext
from eyas.speculate.grow import Growth
from eyas.speculate.tree import Draft

QUICK_ROWS = {"cpu": 3, "cuda": MOST_ROWS_8_BIT}
"""Most rows of a pass that 8-bit weights serve: on a CPU those for which they were measured faster
(2 cores, AVX512-VNNI), on a GPU those of the kernel's tile, above which it multiplies longer than
it reads."""


def is_few(rows: int, device_type: str) -> bool:
    """Whether 8-bit weights serve a pass of so many rows."""
    return rows <= QUICK_ROWS.get(device_type, 0)


class Eagle3Drafter:
    """EAGLE-3 drafting; a draft row's state is the draft layer's output of the row before it."""

    def __init__(
        self,
        network: Eagle3,
        target: Decoder,
        pool: KVPool,
        attention: PagedAttention,
        speculation: SpeculationConfig,
        num_slots: int,
        quick: Eagle3 | None = None,
    ) -> None:
        """`target` lends its embedding, head and last norm where the network has none of its own.

        `attention` is over `pool`.
        `quick` is the network with rounded weights: it takes the place of `network` in passes of
        few rows, be they drafts or committed tokens.
        """
        self.network, self.target, self.pool, self.quick = network, target, pool, quick
        self.embedding = target.embed if network.embed is None else network.embed
        self.attention, self.needs_bound = attention, attention.needs_bound
        self.aux_layers = network.config.aux_layers
        self.aux_size = len(self.aux_layers) * network.config.target_hidden_size
        weight = target.embed.weight
        hidden = weight.new_zeros(num_slots, network.config.hidden_size)
        self.growth = Growth(self._draft, network.target_ids, speculation, hidden)

    def propose(self, context: DraftContext) -> Draft:
        """Grow the tree one level a pass from the kept candidates."""
        return self.growth.grow(context)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Extend the drafter's KV over the committed rows; keep the next first candidates."""
        assert committed.aux is not None, "an EAGLE-3 drafter needs the target's hidden states"
        count = committed.tokens.shape[1]
        batch = ForwardBatch(
            mode=mode,
            tokens=committed.tokens.flatten(),
            positions=committed.positions.flatten(),
            prefix_lens=context.kv_lens,
            page_table=context.page_table,
            num_new=count,
            max_kv_len=context.max_kv_len,
        )
        aux = committed.aux.flatten(0, 1)
        network, few = self._drafting(aux.shape[0]), self._drafting(committed.counts.shape[0])
        fused = network.fuse(aux if network.config.fused else self.target.norm(aux))
        embeds, attend = self.embedding(batch.tokens), self.attention.begin(batch)
        normed, fed_back = network.last(
            embeds, fused, batch.positions, attend, committed.counts, few
        )
        logits = few.score(normed, self.target.logits)
        self.growth.start(context, committed.kv_lens, logits, fed_back)

    def _draft(
        self, batch: ForwardBatch, fed_back: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftPass`."""
        network = self._drafting(batch.tokens.shape[0])
        embeds, attend = self.embedding(batch.tokens), self.attention.begin(batch)
        normed, fed_back = network(embeds, fed_back, batch.positions, attend)
        return network.score(normed, self.target.logits), fed_back

    def _drafting(self, rows: int) -> Eagle3:
        """The network that drafts `rows` rows faster."""
        few = is_few(rows, self.pool.k.device.type)
        return self.quick if self.quick is not None and few else self.network
