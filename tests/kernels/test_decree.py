"""The decreeing kernel equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.kernels import decree as module
from eyas.kernels.lang import warps_of
from eyas.kernels.tree import tree
from eyas.sampling import gumbel_noise, uniform_noise
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu


def parents_of(requests: int, drafts: int, rng: random.Random) -> torch.Tensor:
    """Random trees' parents."""
    rows = [[rng.randrange(n) for n in range(1, drafts + 1)] for _ in range(requests)]
    return torch.tensor(rows, device=DEVICE)


def run_grid() -> None:
    """Chains and random trees of few tokens; every token taken; rates 0, 1 and between."""
    rng, seen = random.Random(0), 0
    for drafts, requests in ((1, 3), (3, 1), (3, 3), (5, 3), (15, 3), (63, 1), (63, 3)):
        generator = torch.Generator().manual_seed(drafts)
        size = (2, requests, drafts + 1)
        tokens, drawn = torch.randint(0, drafts + 2, size, generator=generator).to(DEVICE)
        tokens[0] = torch.randperm(drafts + 1, generator=generator)
        seeds = torch.randint(-(2**62), 2**62, (requests,), generator=generator).to(DEVICE)
        lens = torch.tensor([0, 70, 100_000][:requests], device=DEVICE)
        planted = tree(tokens[:, 0], lens, tokens[:, 1:], parents_of(requests, drafts, rng), drafts)
        chains = lens[:, None] + torch.arange(drafts + 1, device=DEVICE)
        for positions, parents in ((chains, None), (planted.positions, planted.parents)):
            for rates in (torch.zeros(drafts), torch.ones(drafts), torch.rand(drafts)):
                given = (tokens, positions, parents, drawn, seeds, lens, rates.to(DEVICE))
                found, wanted = module.decree_triton(*given), module.decree_reference(*given)
                assert torch.equal(found, wanted), f"{given}\n{found}\n{wanted}"
                seen += int((found != drawn).sum())
    assert seen > 500, "nothing to compare"
    check_coins()


def check_coins() -> None:
    """A rate of a coin itself refuses, the next float above it accepts: coins are equal bits."""
    nodes, requests = 64, 3
    tokens = torch.arange(nodes, device=DEVICE).repeat(requests, 1)
    lens = torch.tensor([3, 70, 100_000], device=DEVICE)
    seeds = torch.tensor([-(2**40) + 5, 7, 2**63 - 1], device=DEVICE)
    positions = lens[:, None] + torch.arange(nodes, device=DEVICE)
    coins = uniform_noise(seeds, lens, positions - lens[:, None])
    for r in range(requests):
        own = slice(r, r + 1)
        given = (tokens[own], positions[own], None, tokens[own], seeds[own], lens[own])
        for rates, accepted in ((coins[r], False), (coins[r].nextafter(coins[r] + 1), True)):
            found = module.decree_triton(*given, rates[: nodes - 1].contiguous())
            wanted = tokens[own].roll(-1, 1) if accepted else torch.full_like(tokens[own], nodes)
            assert torch.equal(found[:, :-1], wanted[:, :-1])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: another coin, a later child, a refused draft that the target draws, another's row."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


def test_coins_lie_beneath_the_noise() -> None:
    """Fault: noise and coins that part, so that a seed's text changes."""
    seed, index, ids = torch.tensor([5, 2**40]), torch.tensor([1, 7]), torch.arange(1000)
    even = uniform_noise(seed, index, ids)
    assert torch.equal(gumbel_noise(seed, index, ids), -(-(-even).log1p()).log())
    assert ((even > 0) & (even < 1)).all()


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("nodes", [4, 64])
def test_compiles_for_hopper(is_chain: bool, nodes: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    kernel, blocks = module._decree_kernel, {"CHAIN": is_chain, "NODES": nodes}
    types = {n: "*i64" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    types |= {"rates_ptr": "*fp32"}
    names = {*blocks, "EARLY"}
    warps = warps_of(nodes * nodes)
    compiles(kernel, {n: t for n, t in types.items() if n not in names}, blocks, warps)


if __name__ == "__main__":
    run_grid()
