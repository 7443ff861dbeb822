"""Our Llama against transformers' on tiny random checkpoints, float32, 1e-4.

The pages of a sequence are scattered; a forward is one prompt, chunks of it, single tokens, or the
nodes of a random tree, whose every path must read as if it were the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.attention.reference import ReferenceAttention
from eyas.batch import ForwardBatch, ForwardMode
from eyas.kv.pool import KVPool
from eyas.models.decoder import Decoder
from eyas.models.registry import load_target
from eyas.speculate.tree import tree_draft

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "wide heads": {"head_dim": 32},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
}


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


Pair = tuple[Decoder, Any]


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    save_llama: Callable[..., Any],
) -> Pair:
    """Ours and transformers' network of one tiny checkpoint."""
    folder: Path = tmp_path_factory.mktemp("llama")
    reference = save_llama(folder, **VARIANTS[request.param])
    return load_target(folder, torch.float32, CPU), reference


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


def test_one_shot_prefill(pair: Pair) -> None:
    """Fault: wrong arithmetic anywhere in the network (biases, tied head, rope, groups)."""
    network, reference = pair
    tokens = prompt(150)
    logits, _, _ = Paged(network, 16).forward(tokens)
    theirs = reference_logits(reference, tokens)
    assert theirs.abs().max() > 1, "the reference says something"
    assert close(logits, theirs)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_chunked_prefill(pair: Pair, page_size: int) -> None:
    """Fault: chunk edges. Uneven chunks over page edges give the logits of one shot."""
    network, reference = pair
    tokens = prompt(150)
    paged, parts, start = Paged(network, page_size), [], 0
    for size in (5, 1, 64, 59, 20, 1):
        parts.append(paged.forward(tokens[start : start + size])[0])
        start += size
    assert close(torch.cat(parts), reference_logits(reference, tokens))


def test_token_by_token(pair: Pair) -> None:
    """Fault: decode differs from prefill."""
    network, reference = pair
    tokens = prompt(40)
    paged = Paged(network, 4)
    logits = torch.cat([paged.forward([token])[0] for token in tokens])
    assert close(logits, reference_logits(reference, tokens))


@pytest.mark.parametrize("count", [5, 24])
def test_verify_pass_over_a_random_tree(pair: Pair, count: int) -> None:
    """Fault: stale mask or wrong positions in verify. Every path of the tree reads as a text."""
    network, reference = pair
    rng = random.Random(count)
    before, nodes = prompt(30), prompt(count, seed=count)
    parents = [rng.randrange(max(0, n - 3), n) for n in range(1, count)]
    draft = tree_draft(
        torch.tensor(nodes[:1]), torch.tensor([nodes[1:]]), torch.tensor([parents]), depth=count
    )
    paged = Paged(network, 16)
    paged.forward(before)
    logits, _, _ = paged.forward(nodes, draft.depths[0], draft.ancestors[0])
    for node in range(count):
        path = [node]
        while path[-1] > 0:
            path.append(parents[path[-1] - 1])
        text = before + [nodes[n] for n in reversed(path)]
        assert close(logits[node], reference_logits(reference, text)[-1]), node


def test_aux_states_are_the_boundaries(pair: Pair) -> None:
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
