"""Draft trees against plain python: masks, depths, and the choice of nodes."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.config import MAX_NODES
from eyas.kernels.tree import popcount, select_nodes
from eyas.speculate.tree import Draft, chain_draft, tree_draft


def random_parents(rng: random.Random, count: int) -> list[int]:
    """Parents of nodes 1..count, each before its child."""
    return [rng.randrange(node) for node in range(1, count + 1)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`; `parents` are those of nodes 1, 2, ..."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def bits_of(mask: int) -> set[int]:
    return {j for j in range(64) if (mask >> j) & 1}


def check_draft(draft: Draft, kv_lens: list[int], parents: list[list[int]]) -> None:
    assert draft.ancestors is not None
    assert draft.parents is not None
    for row, own in enumerate(parents):
        for node in range(len(own) + 1):
            path = path_to(own, node)
            assert int(draft.positions[row, node]) == kv_lens[row] + len(path) - 1
            assert bits_of(int(draft.ancestors[row, node])) == set(path)
            assert int(draft.parents[row, node]) == (path[-2] if node else 0)


@pytest.mark.parametrize("count", [1, 2, 7, 31, 63])
def test_tree_masks_are_the_paths(count: int) -> None:
    """Fault: stale or wrong masks. Every node sees its ancestors and itself, up to bit 63."""
    rng = random.Random(count)
    parents = [random_parents(rng, count) for _ in range(4)]
    drafts = torch.randint(0, 100, (4, count))
    lens = torch.tensor([0, 70, 3, 9])
    draft = tree_draft(torch.arange(4), lens, drafts, torch.tensor(parents), depth=count)
    assert torch.equal(draft.tokens, torch.cat((torch.arange(4)[:, None], drafts), dim=1))
    check_draft(draft, lens.tolist(), parents)


@pytest.mark.parametrize("count", [0, 1, 5, MAX_NODES - 1])
def test_a_chain_stands_in_a_row(count: int) -> None:
    """Fault: width off by one, with no draft and with 64 nodes."""
    drafts = torch.randint(0, 100, (2, count))
    draft = chain_draft(torch.tensor([7, 8]), torch.tensor([0, 30]), drafts)
    assert draft.parents is None
    assert draft.ancestors is None
    assert draft.depth == count
    assert draft.tokens[:, 0].tolist() == [7, 8]
    assert torch.equal(draft.tokens[:, 1:], drafts)
    assert draft.positions.tolist() == [list(range(n, n + count + 1)) for n in (0, 30)]


def test_popcount() -> None:
    """All 64 bits count, the sign bit too."""
    masks = [0, 1, 3, -1, 1 << 62, -(1 << 63), 0x5555555555555555]
    expected = torch.tensor([0, 1, 2, 64, 1, 1, 32])
    assert torch.equal(popcount(torch.tensor(masks)), expected)


def random_pool(rng: random.Random, topk: int, steps: int) -> tuple[list[float], list[int]]:
    """Scores and parents of a candidate pool; many ties, a child at most as good as its parent."""
    scores = [-rng.choice((0.0, 0.5, 1.0)) for _ in range(topk)]
    parents = [-1] * topk
    frontier = list(range(topk))
    for _ in range(steps - 1):
        born = []
        for node in frontier:
            for _ in range(topk):
                parents.append(node)
                scores.append(scores[node] - rng.choice((0.0, 0.0, 0.25, 2.0)))
                born.append(len(scores) - 1)
        frontier = sorted(sorted(born, key=lambda i: (-scores[i], i))[:topk])
    return scores, parents


@pytest.mark.parametrize(
    ("topk", "steps", "count"), [(2, 2, 4), (3, 3, 11), (4, 5, 15), (8, 4, 60)]
)
def test_the_best_nodes_are_chosen_with_their_parents(topk: int, steps: int, count: int) -> None:
    """Fault: orphans in a tree. The best candidates stand in pool order behind their parents."""
    rng = random.Random(topk * 100 + count)
    pools = [random_pool(rng, topk, steps) for _ in range(5)]
    scores = torch.tensor([s for s, _ in pools])
    parents = torch.tensor([p for _, p in pools])
    chosen, nodes = select_nodes(scores, parents, count)
    for row, (own_scores, own_parents) in enumerate(pools):
        best = sorted(range(len(own_scores)), key=lambda i: (-own_scores[i], i))[:count]
        expected = sorted(best)
        assert chosen[row].tolist() == expected
        for place, candidate in enumerate(expected):
            parent = own_parents[candidate]
            wanted = 0 if parent < 0 else expected.index(parent) + 1
            assert int(nodes[row, place]) == wanted
            assert wanted <= place, "a parent stands before its child"
