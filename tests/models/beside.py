"""A decoder over scattered pages, and what must hold of it beside transformers' own model.

A forward is one prompt, chunks of it, single tokens, or the nodes of a random tree, whose every
path must read as if it were the text. Float32, 1e-4; vocabularies have 128 tokens.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from eyas.attention.dense import DenseCausal, Documents
from eyas.attention.reference import ReferenceAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from eyas.speculate.tree import tree_draft

CPU = torch.device("cpu")
TOLERANCE = 1e-4
Pair = tuple[Decoder, Any]
"""Our network and transformers' of one checkpoint."""


class Paged:
    """Our network over a pool with scattered pages, one sequence."""

    def __init__(self, network: Decoder, page_size: int, room: int = 160) -> None:
        config = network.config
        pages = -(-room // page_size)
        self.network = network
        self.pool = KVPool(
            config.attention_shape(),
            num_pages=pages + 1,
            page_size=page_size,
            dtype=torch.float32,
            device=CPU,
        )
        order = list(range(1, pages + 1))
        random.Random(1).shuffle(order)
        self.table = torch.tensor([order])
        self.length = 0

    @torch.inference_mode()
    def forward(
        self,
        tokens: list[int],
        depths: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, hidden states and aux states of new tokens; kept if they are no tree."""
        count = len(tokens)
        depths = torch.arange(count) if depths is None else depths
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND if ancestors is None else ForwardMode.TARGET_VERIFY,
            tokens=torch.tensor(tokens),
            positions=self.length + depths,
            prefix_lens=torch.tensor([self.length]),
            page_table=self.table,
            num_new=count,
            max_kv_len=self.length + count,
            ancestors=ancestors,
        )
        attend = ReferenceAttention(self.pool).begin(batch)
        aux = torch.full((count, len(aux_layers) * self.network.config.hidden_size), torch.nan)
        hidden = self.network(batch.tokens, batch.positions, attend, aux, aux_layers)
        self.length += 0 if ancestors is not None else count
        return self.network.logits(hidden), hidden, aux


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 128, (length,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, atol=TOLERANCE, rtol=0)


def check_prefill(pair: Pair) -> None:
    """Fault: wrong arithmetic anywhere in the network (biases, tied head, rope, groups)."""
    network, reference = pair
    tokens = prompt(150)
    logits, _, _ = Paged(network, 16).forward(tokens)
    theirs = reference_logits(reference, tokens)
    assert theirs.abs().max() > 1, "the reference says something"
    assert close(logits, theirs)


def check_training_forward(pair: Pair) -> None:
    """Fault: training on other states than serving computes. Dense attention is the paged one."""
    network, reference = pair
    tokens, tile = prompt(44), network.row_tile
    assert len(tokens) % tile.step == 0, "training's passes are whole tiles"
    docs = Documents.of((30, 14), CPU, "loop")
    positions = torch.cat((torch.arange(30), torch.arange(14)))
    attend = DenseCausal(docs, network.config.attention_shape())
    with torch.inference_mode():
        logits = network.logits(network(torch.tensor(tokens), positions, attend))
    for part, ours in zip((tokens[:30], tokens[30:]), logits.split((30, 14)), strict=True):
        assert close(ours, reference_logits(reference, part))
        assert close(ours, Paged(network, 16).forward(part)[0])


def check_chunks(pair: Pair, page_size: int) -> None:
    """Fault: chunk edges. Uneven chunks over page edges give the logits of one shot."""
    network, reference = pair
    tokens = prompt(150)
    paged, parts, start = Paged(network, page_size), [], 0
    for size in (5, 1, 64, 59, 20, 1):
        parts.append(paged.forward(tokens[start : start + size])[0])
        start += size
    assert close(torch.cat(parts), reference_logits(reference, tokens))


def check_single_tokens(pair: Pair, length: int = 40) -> None:
    """Fault: decode differs from prefill."""
    network, reference = pair
    tokens = prompt(length)
    paged = Paged(network, 4)
    logits = torch.cat([paged.forward([token])[0] for token in tokens])
    assert close(logits, reference_logits(reference, tokens))


def check_tree(pair: Pair, count: int, length: int = 30) -> None:
    """Fault: stale mask or wrong positions in verify. Every path of the tree reads as a text."""
    network, reference = pair
    rng = random.Random(count)
    before, nodes = prompt(length), prompt(count, seed=count)
    parents = [rng.randrange(max(0, n - 3), n) for n in range(1, count)]
    roots, drafts = torch.tensor(nodes[:1]), torch.tensor([nodes[1:]])
    draft = tree_draft(roots, torch.zeros(1).long(), drafts, torch.tensor([parents]), depth=count)
    assert draft.ancestors is not None
    paged = Paged(network, 16)
    paged.forward(before)
    logits, _, _ = paged.forward(nodes, draft.positions[0], draft.ancestors[0])
    for node in range(count):
        path = [node]
        while path[-1] > 0:
            path.append(parents[path[-1] - 1])
        text = before + [nodes[n] for n in reversed(path)]
        assert close(logits[node], reference_logits(reference, text)[-1]), node


def check_boundaries(pair: Pair) -> None:
    """Fault: aux layer ids off by one (v#43671). Boundary i is the input of layer i.

    transformers norms the last entry of `hidden_states`, and so does our output.
    """
    network, reference = pair
    tokens = prompt(33)
    with torch.inference_mode():
        out = reference(torch.tensor([tokens]), output_hidden_states=True)
    states = out.hidden_states
    logits, hidden, aux = Paged(network, 16).forward(tokens, aux_layers=(4, 0, 2))
    last, embedded, middle = aux.chunk(3, dim=-1)
    assert torch.equal(network.norm(last), hidden)
    assert close(hidden, states[4][0])
    assert torch.equal(embedded, states[0][0])
    assert close(middle, states[2][0])
    plain, _, _ = Paged(network, 16).forward(tokens)
    assert torch.equal(plain, logits), "capturing changes the pass"


def check_both_conventions(pair: Pair) -> None:
    """Fault: ids of layer outputs (SpecForge, SGLang) read as boundaries (vLLM), or the other way.

    The output of layer i, taken from the reference as it leaves that layer, is boundary i + 1.
    """
    network, reference = pair
    tokens, outputs = prompt(33), (0, 1, 3)
    left: dict[int, torch.Tensor] = {}

    def keep(layer: int, states: Any) -> None:
        left[layer] = states[0] if isinstance(states, tuple) else states

    hooks = [
        reference.model.layers[i].register_forward_hook(
            lambda _, __, states, layer=i: keep(layer, states)
        )
        for i in outputs
    ]
    reference_logits(reference, tokens)
    for hook in hooks:
        hook.remove()
    _, _, aux = Paged(network, 16).forward(tokens, aux_layers=tuple(i + 1 for i in outputs))
    for layer, states in zip(outputs, aux.chunk(3, dim=-1), strict=True):
        assert close(states, left[layer].view_as(states)), layer
    assert not close(*aux.chunk(3, dim=-1)[:2]), "the boundaries differ"
