"""Tree kernels equal their references; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import grow, tree
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu


def frontier_of(topk: int, requests: int, generator: torch.Generator) -> grow.Frontier:
    """A first frontier of random candidates, best first, with ties."""
    scores = -torch.randint(0, 4, (requests, topk), generator=generator).float()
    lanes = torch.arange(topk)
    made = grow.Frontier(
        tokens=torch.randint(0, 999, (requests, topk), generator=generator),
        scores=scores.sort(dim=1, descending=True).values,
        pool_index=lanes.expand(requests, -1),
        bits=(1 << lanes).expand(requests, -1),
        positions=lanes.expand(requests, -1),
        rows=lanes,
    )
    return grow.Frontier(*(x.to(DEVICE) for x in made))


def run_grid() -> None:
    """Chains of every length; trees grown level by level and planted, with many ties."""
    for drafts in (0, 1, 7, 63):
        tokens = torch.randint(0, 99, (3, drafts + 1)).to(DEVICE)
        found = tree.chain_triton(tokens[:, 0].contiguous(), tokens[:, 1:])
        wanted = tree.chain_reference(tokens[:, 0], tokens[:, 1:])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), drafts
    for topk, steps, count in ((2, 2, 4), (4, 5, 16), (8, 6, 60), (3, 4, 10), (4, 1, 5)):
        generator = torch.Generator().manual_seed(topk)
        ours = theirs = frontier_of(topk, 3, generator)
        pools = [grow.first_pool(ours.tokens, ours.scores, steps) for _ in range(2)]
        prefix = torch.tensor([5, 0, 70], device=DEVICE)
        for step in range(1, steps):
            tokens = torch.randint(0, 999, (3 * topk, topk), generator=generator).to(DEVICE)
            scores = -torch.randint(0, 3, (3 * topk, topk), generator=generator).float()
            scores = scores.to(DEVICE)
            ours = grow.advance_triton(tokens, scores, ours, pools[0], prefix, step)
            theirs = grow.advance_reference(tokens, scores, theirs, pools[1], prefix, step)
            for name, a, b in zip(ours._fields, ours, theirs, strict=True):
                assert torch.equal(a, b), f"{topk=} {step=}: {name}"
        assert all(torch.equal(a, b) for a, b in zip(*pools, strict=True)), topk
        roots = torch.tensor([1, 2, 3], device=DEVICE)
        found = tree.plant_triton(roots, pools[0], count, steps)
        wanted = tree.plant_reference(roots, pools[1], count, steps)
        for name, a, b in zip(found._fields, found, wanted, strict=True):
            assert torch.equal(a, b), f"{topk=} {count=}: {name}\n{a}\n{b}"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_references() -> None:
    """Fault: a tie to the higher index, a child of the wrong parent, a mask that misses a node."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_references() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize(("topk", "pool", "nodes"), [(4, 128, 16), (8, 512, 64)])
def test_compiles_for_hopper(topk: int, pool: int, nodes: int) -> None:
    """Fault: kernels that only the interpreter takes."""
    for kernel, blocks in (
        (tree._tree_chain_kernel, {"NODES": nodes}),
        (tree._tree_plant_kernel, {"POOL": pool, "NODES": nodes, "CHUNK": tree.CHUNK}),
        (grow._tree_advance_kernel, {"TOPK": topk, "BLOCK": topk}),
    ):
        types = {n: "*i64" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
        types |= {n: "*fp32" for n in kernel.arg_names if "scores" in n}
        types |= {"place_ptr": "*i32"} if "place_ptr" in types else {}
        compiles(kernel, {n: t for n, t in types.items() if n not in blocks}, blocks)


if __name__ == "__main__":
    run_grid()
