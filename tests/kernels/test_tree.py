"""The planting kernel equals its reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import tree
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu


def random_pool(topk: int, steps: int, generator: torch.Generator) -> tree.Pool:
    """Candidates of 3 requests that grew from random frontiers, many of one score."""
    size = topk + (steps - 1) * topk * topk
    parents = torch.full((3, size), -1)
    scores = -torch.randint(0, 3, (3, size), generator=generator).float()
    for start in range(topk, size, topk * topk):
        level = slice(start, start + topk * topk)
        before = max(0, start - topk * topk)
        for request in range(3):
            frontier = before + torch.randperm(start - before, generator=generator)[:topk]
            parents[request, level] = frontier.sort().values.repeat_interleave(topk)
            scores[request, level] += scores[request, parents[request, level]]
    tokens = torch.randint(0, 999, (3, size), generator=generator)
    return tree.Pool(*(part.to(DEVICE) for part in (tokens, scores, parents)))


def run_grid() -> None:
    """Trees of several widths and depths."""
    roots, lens = (torch.tensor(x, device=DEVICE) for x in ([1, 2, 3], [5, 0, 70]))
    for topk, steps, count in ((2, 2, 4), (4, 5, 16), (8, 6, 60), (3, 4, 10), (4, 1, 5)):
        pool = random_pool(topk, steps, torch.Generator().manual_seed(topk))
        found = tree.plant_triton(roots, lens, pool, count, steps)
        wanted = tree.plant_reference(roots, lens, pool, count, steps)
        for name, a, b in zip(found._fields, found, wanted, strict=True):
            assert torch.equal(a, b), f"{topk=} {count=}: {name}\n{a}\n{b}"


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: a tie to the higher index, a child of the wrong parent, a mask that misses a node."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize(("pool", "nodes"), [(128, 16), (512, 64)])
def test_compiles_for_hopper(pool: int, nodes: int) -> None:
    """Fault: a kernel that only the interpreter takes."""
    kernel, blocks = tree._tree_plant_kernel, {"POOL": pool, "NODES": nodes, "CHUNK": tree.CHUNK}
    types = {n: "*i64" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    types |= {"pool_scores_ptr": "*fp32", "place_ptr": "*i32"}
    names = {*blocks, "EARLY"}
    compiles(kernel, {n: t for n, t in types.items() if n not in names}, blocks)


if __name__ == "__main__":
    run_grid()
