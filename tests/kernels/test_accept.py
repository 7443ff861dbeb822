"""The acceptance kernel equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.kernels import accept as module
from eyas.kernels.accept import Settled, Slots
from eyas.kernels.tree import tree
from tests.helpers import fresh_slots
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu


def same(found: Settled, wanted: Settled, ours: Slots, theirs: Slots) -> None:
    """Equal as far as it means something."""
    assert torch.equal(found.counts, wanted.counts)
    assert torch.equal(found.path, wanted.path)
    assert torch.equal(found.rows, wanted.rows)
    assert torch.equal(found.positions, wanted.positions)
    assert torch.equal(found.kv_lens, wanted.kv_lens)
    assert torch.equal(ours.all_kv_lens, theirs.all_kv_lens)
    assert torch.equal(ours.all_roots, theirs.all_roots)
    for request, count in enumerate(wanted.counts.tolist()):
        used = slice(0, count)
        assert torch.equal(found.tokens[request, used], wanted.tokens[request, used])
        assert torch.equal(found.out[request, : count + 1], wanted.out[request, : count + 1])
        slot, start = int(ours.slots[request]), int(ours.kv_lens[request])
        # at the very end the reference crowds what overflows into the last place
        known = slice(0, min(start + count + 1, ours.history.shape[1] - 1))
        assert torch.equal(ours.history[slot, known], theirs.history[slot, known])


def run_grid() -> None:
    """Chains and random trees of few tokens, so that runs of every length occur."""
    rng = random.Random(0)
    for count, vocab in ((0, 2), (1, 2), (3, 2), (4, 3), (15, 2), (63, 3)):
        generator = torch.Generator().manual_seed(count)
        for is_chain in (True, False):
            rows = 12
            drawn = torch.randint(0, vocab, (rows, count + 1), generator=generator).to(DEVICE)
            tokens = torch.randint(0, vocab, (rows, count + 1), generator=generator).to(DEVICE)
            above = None
            if is_chain:
                tokens[rows // 2 :, 1:] = drawn[rows // 2 :, :-1]
            else:
                parents = [
                    [rng.randrange(max(0, n - 4), n) for n in range(1, count + 1)]
                    for _ in range(rows)
                ]
                shape = torch.tensor(parents, dtype=torch.int64, device=DEVICE).view(rows, count)
                nodes = tree(tokens[:, 0], tokens[:, 0], tokens[:, 1:], shape, count)
                above = nodes.parents
            lens = [rng.randrange(30) for _ in range(rows - 1)] + [96]
            index = rng.sample(range(rows + 2), rows)
            ours, theirs = (fresh_slots(rows, lens, index, DEVICE) for _ in range(2))
            given = (tokens, above, drawn, count)
            found = module.settle_triton(*given, ours)
            same(found, module.settle_reference(*given, theirs), ours, theirs)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: a run cut short, a sibling followed twice, another slot written, history overrun."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize("is_chain", [True, False])
def test_compiles_for_hopper(is_chain: bool) -> None:
    """Fault: a kernel that only the interpreter takes."""
    names = [name for name in module._accept_kernel.arg_names if name.endswith("_ptr")]
    types = dict.fromkeys(names, "*i64") | dict.fromkeys(("nodes", "depth", "width"), "i32")
    blocks = {"CHAIN": is_chain, "NODES": 16, "PLACES": 8}
    compiles(module._accept_kernel, types, blocks, num_warps=1)


if __name__ == "__main__":
    run_grid()
