"""The drawing kernels equal their references; through Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from eyas import sampling
from eyas.kernels import draw as module
from eyas.sampling import SamplingRows
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu

SIZES = (5, 2048, 5000) if DEVICE == "cpu" else (5, 2048, 32000, 49152, 128256)


def rows_of(temperature: list[float], seed: int = 3) -> SamplingRows:
    """Requests of these temperatures, with 64-bit seeds."""
    count = len(temperature)
    return SamplingRows(
        temperature=torch.tensor(temperature, device=DEVICE),
        top_k=torch.zeros(count, dtype=torch.int64, device=DEVICE),
        top_p=torch.ones(count, device=DEVICE),
        min_p=torch.zeros(count, device=DEVICE),
        seed=(torch.arange(count, device=DEVICE) + seed) * 0x1234567890123,
    )


def check_noise() -> None:
    """The kernel's noise is the reference's to the last bits: the hashes are equal."""
    zeros = torch.zeros(3, 40_000 if DEVICE == "cuda" else 3000, device=DEVICE)
    rows, ids = rows_of([1.0] * 3), torch.arange(zeros.shape[1], device=DEVICE) * 7919
    index = torch.tensor([1, 70, 2**31 + 5], device=DEVICE)
    noise = sampling.gumbel_noise(rows.seed, index + 2, ids)
    for r in range(3):
        order = noise[r].sort(descending=True).indices[:4]
        given = (zeros[r : r + 1], ids, 4, row(rows, r), index[r : r + 1], 2)
        found = kept_of(module.keep_best_triton, module.Scored(*given, sampled=True, noise=True))
        assert found.tokens[1].tolist() == ids[order].tolist()
        wanted = noise[r].log_softmax(-1)[order]
        torch.testing.assert_close(found.scores[1], wanted, rtol=2e-6, atol=2e-6)


def kept_of(keep: Any, scored: module.Scored) -> module.Kept:
    """What `keep` keeps of R rows and random states in slots R, R - 1, .. 1 of R + 2."""
    count, topk = scored.logits.shape[0], scored.topk
    slots, states = torch.arange(count, 0, -1, device=DEVICE), torch.arange(count * 1500.0)
    hidden = states.view(count, 1500).to(DEVICE)[:, 3:]
    kept = module.Kept(
        torch.zeros(count + 2, 1497, device=DEVICE),
        torch.zeros(count + 2, topk, dtype=torch.int64, device=DEVICE),
        torch.zeros(count + 2, topk, device=DEVICE),
    )
    keep(scored, slots, kept, hidden)
    assert torch.equal(kept.hidden[slots], hidden)
    assert not any(part[[0, -1]].any() for part in kept), "another's slot"
    return kept


def row(rows: SamplingRows, r: int) -> SamplingRows:
    """One of them."""
    return SamplingRows(
        temperature=rows.temperature[r : r + 1],
        top_k=rows.top_k[r : r + 1],
        top_p=rows.top_p[r : r + 1],
        min_p=rows.min_p[r : r + 1],
        seed=rows.seed[r : r + 1],
    )


def run_grid() -> None:
    """Greedy, sampled and mixed rows, one and several candidates, every size."""
    check_noise()
    for size, topk in itertools.product(SIZES, (1, 4)):
        generator = torch.Generator().manual_seed(size)
        logits = torch.randn(6, size + 3, generator=generator).to(DEVICE)[:, :size]
        ids = torch.arange(size, device=DEVICE) * 3 + 1
        rows, index = rows_of([0.0, 0.7, 1e-9]), torch.tensor([4, 9, 12], device=DEVICE)
        for sampled, noise in ((False, False), (True, False), (True, True)):
            scored = module.Scored(logits, ids, topk, rows, index, 5, sampled, noise)
            wanted = kept_of(module.keep_best_reference, scored)
            found = kept_of(module.keep_best_triton, scored)
            assert torch.equal(found.tokens, wanted.tokens), f"{size=} {topk=} {sampled=} {noise=}"
            torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)
            if topk == 1:
                into = torch.zeros(6, 3, dtype=torch.int64, device=DEVICE)
                module.draw_into_triton(scored, into[:, 1])
                assert torch.equal(into[:, 1], module.candidates(scored)[0][:, 0])
                assert not into[:, ::2].any(), "another column"
    check_edges()


def check_edges() -> None:
    """Ties, zeros of both signs and what is not finite go where torch's maximum puts them."""
    logits = torch.full((6, 3000), -3.0, device=DEVICE)
    logits[0, 2500], logits[0, 17] = -0.0, 0.0
    logits[1, 2999], logits[1, 40] = 2.0, 2.0
    logits[2, 700] = torch.inf
    logits[3] = -torch.inf
    logits[4, 2100], logits[4, 2200] = torch.nan, torch.inf
    rows, index = rows_of([0.0] * 6), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    ids, found = torch.arange(3000, device=DEVICE), index.clone()
    scored = module.Scored(logits, ids, 1, rows, index, 0, sampled=False, noise=False)
    module.draw_into_triton(scored, found)
    assert found.tolist() == [17, 40, 700, 0, 2100, 0]
    assert sampling.likeliest(logits).tolist() == found.tolist()


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_references() -> None:
    """Fault: another hash, the last tile, a tie to the later token, a greedy row with noise."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_references() -> None:
    """The same on the GPU, at real vocabularies."""
    run_grid()


@on_gpu
@torch.inference_mode()
def test_draws_are_those_of_the_cpu() -> None:
    """Fault: a filtered pass that scales or draws otherwise than an unfiltered one."""
    logits, rows = torch.randn(64, 4000, device=DEVICE), rows_of([0.8] * 32)
    index = torch.arange(64, device=DEVICE)
    plain = module.draw(logits, rows, index, sampled=True, filtered=False)
    assert torch.equal(module.draw(logits, rows, index, sampled=True, filtered=True), plain)
    twice = rows.repeat(2)
    assert torch.equal(sampling.draw(logits, twice, index, sampled=True, filtered=False), plain)


@pytest.mark.parametrize("topk", [1, 8])
def test_compiles_for_hopper(topk: int) -> None:
    """Fault: kernels that only the interpreter takes."""
    types = {"logits_ptr": "*bf16", "ids_ptr": "*i64", "temperature_ptr": "*fp32"}
    types |= {"seed_ptr": "*i64", "index_ptr": "*i64", "keys_ptr": "*i64", "sums_ptr": "*fp32"}
    types |= dict.fromkeys(("size", "stride", "rows_each", "index_each", "ahead"), "i32")
    flags = {"TOPK": topk, "SCALED": True, "NOISE": True, "MAPPED": True}
    compiled = compiles(module._draw_tile_kernel, types, flags | {"TILE": module.TILE})
    assert "lg2.approx" not in compiled.asm["ptx"], "the noise needs an exact logarithm"
    types |= {"tokens_ptr": "*i64", "scores_ptr": "*fp32", "tiles": "i32", "slots_ptr": "*i64"}
    types |= dict.fromkeys(("source_ptr", "target_ptr"), "*bf16")
    types |= dict.fromkeys(("tokens_stride", "source_stride", "width"), "i32")
    blocks = {"TILES": 64, "BLOCK": 64 * topk, "COLUMNS": module.COLUMNS}
    for slotted in (False, True):
        flags = {"TOPK": topk, "MAPPED": True, "SLOTTED": slotted}
        compiles(module._draw_row_kernel, types, flags | blocks)


if __name__ == "__main__":
    run_grid()
