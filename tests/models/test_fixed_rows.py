"""Deterministic targets: all products of a pass are alike, whatever the pass holds.

The row tile of a CPU is left out, so that fixed rows alone keep the bits of float32 rows there. Not
so of routers, which pad their own rows on a CPU and have a kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.attention.rope import Rope
from eyas.config import SamplingParams, SpeculationConfig
from eyas.layers.linear import CALL_ROWS, Linear, RowTile, fix_rows, row_tile
from eyas.models.decoder import Decoder
from tests.helpers import (
    CPU,
    LATENT,
    Job,
    alone,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_target,
)
from tests.kernels.test_calls import Calls

ROWS = 8
EXPERTS = tiny_experts()
TARGETS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "biased": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "experts": {"moe": EXPERTS},
    "latent": {"mla": LATENT},
}
IN_CALLS = [name for name in TARGETS if name != "latent"]
"""All but latent attention's products, which are a kernel's on a GPU and not fixed on a CPU."""
each_target = pytest.mark.parametrize("name", TARGETS)


def attend(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None = None
) -> torch.Tensor:
    """Something of each row alone."""
    del layer, k, rope
    return q[..., : v.shape[-1]].flatten(1)


def fixed(name: str) -> Decoder:
    """A target whose library calls have `ROWS` rows, and no other padding."""
    target = tiny_target(**TARGETS[name])
    target.row_tile = RowTile(call=ROWS)
    fix_rows(target, ROWS)
    return target


@torch.inference_mode()
def scores(target: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return target.logits(target(tokens, torch.arange(len(tokens)), attend))


@each_target
def test_every_product_has_the_same_rows(name: str) -> None:
    """Fault: a layer whose calls follow the rows of the pass (head, latents, shared expert)."""
    target, tokens = fixed(name), torch.arange(19)
    kinds = set()
    for count in (1, 5, 8, 19):
        with Calls() as calls:
            scores(target, tokens[:count])
        seen = {call for call in calls.seen if call[-1] != EXPERTS.num_experts}
        assert {call[0] for call in seen} == {ROWS}
        kinds.add(frozenset(seen))
    assert len(kinds) == 1, "other kinds of calls for other rows"


@pytest.mark.parametrize("name", IN_CALLS)
def test_rows_keep_their_bits(name: str) -> None:
    """Fault: a row that depends on the number of rows where the library's kernels do."""
    target, tokens = fixed(name), torch.arange(19)
    whole = scores(target, tokens)
    for count in (1, 2, 3, 5, 8, 9):
        assert torch.equal(scores(target, tokens[:count]), whole[:count]), f"{count} rows"


def test_who_gets_fixed_rows() -> None:
    """Fault: a GPU's target left to the library, padding that wakes experts, a CPU made slower."""
    gpu = torch.device("cuda")
    assert row_tile(gpu, torch.bfloat16) == RowTile()
    tile = row_tile(gpu, torch.bfloat16, deterministic=True)
    assert tile == RowTile(CALL_ROWS, CALL_ROWS, CALL_ROWS)
    assert row_tile(CPU, torch.bfloat16, deterministic=True) == row_tile(CPU, torch.bfloat16)
    plain = tiny_target()
    dense = Decoder(plain.config, tile)
    sparse = Decoder(tiny_target(moe=tiny_experts()).config, tile)
    assert dense.row_tile == tile
    assert sparse.row_tile == RowTile(call=CALL_ROWS)
    for network in (dense, sparse):
        linears = [part for part in network.modules() if isinstance(part, Linear)]
        assert linears and all(part.call_rows == CALL_ROWS for part in linears)
    assert all(part.call_rows == 0 for part in plain.modules() if isinstance(part, Linear))


@pytest.mark.parametrize(
    "shape", [chain(4), SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=12)], ids=str
)
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_speculation_writes_the_text(name: str, shape: SpeculationConfig) -> None:
    """Fault: verify passes whose products are not those of decoding."""
    target = fixed(name)
    prompts = random_prompts([5, 17, 1])
    jobs = [Job(prompt=p, params=SamplingParams(max_tokens=20)) for p in prompts]
    engine = make_engine(target, tiny_drafter(), shape, deterministic="on")
    assert outputs(run_all(engine, jobs)) == alone(target, jobs)
