"""Kernels that are launched early give what they give one after the other."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import accept, gated, lang, norm, norm_parts, planes
from eyas.kernels.begin import begin_chain
from eyas.kernels.decree import decree
from eyas.kernels.draw import Kept, Scored, draw_into, keep_best
from eyas.kernels.experts_triton import Shared, experts_triton
from eyas.kernels.router import router
from eyas.kernels.rows import take_rows
from eyas.kernels.skinny import Counters
from eyas.kernels.terms import summed
from eyas.model_config import MoEConfig
from tests.helpers import fresh_slots
from tests.kernels.running import on_gpu
from tests.kernels.test_draw import rows_of

CONFIG = MoEConfig(num_experts=16, top_k=4, intermediate_size=256)


def work(seed: int, rounds: int) -> list[torch.Tensor]:
    """A long chain of our launches alone, each reading what the one before wrote; in a graph."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").bfloat16()

    x, weight, gates = randn(4, 512), randn(512), randn(16, 512).float() * 0.05
    gate_up, down = randn(16, 512, 512) * 0.05, randn(16, 512, 256) * 0.05
    counters, others = Counters(), Counters()
    eight = (randn(512, 512) * 40).clamp(-127, 127).to(torch.int8)
    scales = torch.full((512,), 1e-3, device="cuda")
    ids, sampling = torch.arange(512, device="cuda"), rows_of([0.0] * 4)
    slots, firsts = fresh_slots(4, device="cuda"), torch.zeros(6, 1, device="cuda")
    rates = torch.tensor([0.7, 0.5], device="cuda")
    drafts = Kept(firsts.repeat(1, 512).bfloat16(), firsts.long(), firsts)

    def run() -> list[torch.Tensor]:
        y, total = x.clone(), x.clone()
        for _ in range(rounds):
            normed, total = norm.add_rms_norm(y, total, weight, 1e-5)
            heads = norm_parts.norm_parts(normed.view(4, 8, 64), (weight[:64],) * 2, 4, 1e-5)
            shared = Shared(gate_up[0], down[0])
            heads = heads.flatten(1)
            chosen, chances, lists = router(heads, gates, CONFIG, None, counters)
            given = (heads, chosen, chances, gate_up, down)
            terms = experts_triton(*given, shared=shared, lists=lists)
            added, _ = norm.add_rms_norm(normed, terms, weight, 1e-5)
            y = gated.gated(torch.stack((summed(terms), added), 1).flatten(1))
            before = norm.Norm(weight=weight, eps=1e-5, delta=total)
            y, total = planes.int8_norm_linear(y, before, eight, scales, None, others)
            scored = Scored(y, ids, 1, sampling, slots.slots, 1, sampled=False, noise=False)
            keep_best(scored, slots.slots, drafts, y)
            chain = begin_chain(slots.slots, slots.kv_lens, slots.kv_lens, drafts, 3)
            draw_into(scored._replace(logits=chain.hidden), chain.tokens[:, 2])
            tokens, told = chain.tokens, (sampling.seed, slots.kv_lens, rates)
            drawn = decree(tokens, chain.positions, None, tokens, *told)
            settled = accept.settle(tokens, None, drawn, 2, slots)
            (y,) = take_rows(settled.counts, drafts.hidden)
        return [y, drafts.hidden, slots.history, tokens]

    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        slots.history.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return [t.clone() for t in out]


@on_gpu
@pytest.mark.parametrize("seed", range(5))
def test_early_launches_change_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Fault: a kernel that reads before the one it follows has written."""
    plain = work(seed, 50)
    monkeypatch.setattr(lang, "EARLY", True)
    assert all(torch.equal(a, b) for a, b in zip(work(seed, 50), plain, strict=True))


def test_cpus_know_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a launch option that the interpreter does not take."""
    monkeypatch.setattr(lang, "EARLY", True)
    assert lang.turns(torch.zeros(1)) == {"EARLY": False}
