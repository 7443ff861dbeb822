"""Beginnings and levels of drafts equal references; by Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.kernels import begin as module
from eyas.kernels import draw, grow, tree
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu
from tests.kernels.test_draw import rows_of

REQUESTS, WIDTH = 3, 1100


def kept_of(topk: int, generator: torch.Generator, width: int = WIDTH) -> draw.Kept:
    """Slots of random candidates, best first, with ties."""
    scores = -torch.randint(0, 4, (REQUESTS + 2, topk), generator=generator).float()
    kept = draw.Kept(
        torch.randn(REQUESTS + 2, width, generator=generator),
        torch.randint(0, 999, (REQUESTS + 2, topk), generator=generator),
        scores.sort(dim=1, descending=True).values,
    )
    return draw.Kept(*(part.to(DEVICE) for part in kept))


def logits_of(topk: int, ties: bool, generator: torch.Generator) -> torch.Tensor:
    """Of every node, random ones; with ties all nodes have the same."""
    rows = REQUESTS * topk
    logits = torch.randn(rows, 5000, generator=generator)
    return (logits[:1].expand(rows, -1) if ties else logits).to(DEVICE)


def same(found: Any, wanted: Any, label: str, close: bool = False) -> None:
    """Equal numbers, scores perhaps but for rounding."""
    for name, a, b in zip(found._fields, found, wanted, strict=True):
        if close and name == "scores":
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(a, b), f"{label}: {name}\n{a}\n{b}"


def run_grid() -> None:
    """Beginnings of chains and trees; trees grown level by level and planted, ties included."""
    slots = torch.tensor([4, 0, 2], device=DEVICE)
    roots, lens = (torch.tensor(x, device=DEVICE) for x in ([1, 2, 3], [5, 0, 70]))
    for nodes, width in ((2, WIDTH), (7, 0), (64, 64)):
        given = (slots, roots, lens, kept_of(1, torch.Generator(), width), nodes)
        ours, theirs = module.begin_chain_triton(*given), module.begin_chain_reference(*given)
        for part in (ours, theirs):
            part.tokens[:, 2:] = 0
        same(ours, theirs, f"chain {nodes}")
    for topk, steps, count in ((2, 2, 4), (4, 5, 16), (8, 6, 60), (3, 4, 10), (4, 1, 5)):
        for ties in (False, True):
            check_tree(topk, steps, count, ties, (slots, roots, lens))


def check_tree(
    topk: int, steps: int, count: int, ties: bool, given: tuple[torch.Tensor, ...]
) -> None:
    """Every level and the whole tree."""
    generator = torch.Generator().manual_seed(topk)
    (slots, roots, lens), kept = given, kept_of(topk, generator)
    ids = torch.arange(5000, device=DEVICE) * 2 + 1
    ours, pool = module.begin_tree_triton(slots, lens, kept, steps)
    theirs, other = module.begin_tree_reference(slots, lens, kept, steps)
    same(ours, theirs, f"{topk=} begins")
    for step in range(1, steps):
        logits = logits_of(topk, ties, generator)
        states = torch.randn(REQUESTS * topk, WIDTH + 1, generator=generator).to(DEVICE)[:, 1:]
        scored = draw.Scored(logits, ids, topk, rows_of([0.0] * 3), lens, 1, False, False)
        ours = grow.advance_triton(scored, ours, pool, lens, states, step)
        theirs = grow.advance_reference(scored, theirs, other, lens, states, step)
        same(ours, theirs, f"{topk=} {step=} {ties=}", close=True)
        theirs = theirs._replace(scores=ours.scores)
    same(pool, other, f"{topk=} {ties=} pool", close=True)
    whole = (roots, lens, pool, count, steps)
    same(tree.plant_triton(*whole), tree.plant_reference(*whole), f"{topk=} {count=}")


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_references() -> None:
    """Fault: a tie to the higher index, a child or state of the wrong parent, another's slot."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_references() -> None:
    """The same on the GPU."""
    run_grid()


@pytest.mark.parametrize("topk", [3, 4, 8])
def test_compiles_for_hopper(topk: int) -> None:
    """Fault: kernels that only the interpreter takes."""
    lanes = 1 << (topk - 1).bit_length()
    blocks = {"TOPK": topk, "LANES": lanes, "COLUMNS": draw.COLUMNS}
    tiles = {"TILES": 64, "BLOCK": 64 * lanes}
    for kernel, constants in (
        (module._chain_begin_kernel, {"NODES": 8, "COLUMNS": draw.COLUMNS}),
        (module._tree_begin_kernel, blocks),
        (grow._tree_level_kernel, blocks | tiles),
    ):
        types = {n: "*i64" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
        types |= {n: "*fp32" for n in types if "scores" in n or "sums" in n}
        types |= {n: "*bf16" for n in types if "hidden" in n or "states_ptr" in n}
        names = {*constants, "EARLY"}
        compiles(kernel, {n: t for n, t in types.items() if n not in names}, constants)


if __name__ == "__main__":
    run_grid()
