"""Acceptance against a walk in plain python."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.kernels.accept import Settled
from eyas.speculate.accept import accept
from eyas.speculate.tree import chain_draft, tree_draft
from tests.helpers import accepted_of, fresh_slots


def walk(tokens: list[int], parents: list[int], drawn: list[int]) -> tuple[list[int], list[int]]:
    """Committed tokens and the nodes that drew them; `parents` are those of nodes 1, 2, ..."""
    node, path = 0, [0]
    while True:
        children = [n for n, p in enumerate(parents, start=1) if p == node]
        hits = [n for n in children if tokens[n] == drawn[node]]
        if not hits:
            return [drawn[n] for n in path], path
        node = hits[0]
        path.append(node)


def check(accepted: Settled, row: int, tokens: list[int], path: list[int]) -> None:
    count = int(accepted.counts[row])
    assert accepted.tokens[row, :count].tolist() == tokens
    assert accepted.path[row, :count].tolist() == path
    assert not accepted.path[row, count:].any(), "past the count the path is the root"


@pytest.mark.parametrize("vocab", [2, 3, 30])
@pytest.mark.parametrize("count", [1, 4, 15, 63])
def test_tree_walk(count: int, vocab: int) -> None:
    """Fault: greedy verify differs from plain decoding. Duplicate siblings included."""
    rng = random.Random(count * 100 + vocab)
    rows = 40
    parents = [[rng.randrange(max(0, n - 4), n) for n in range(1, count + 1)] for _ in range(rows)]
    tokens = torch.randint(0, vocab, (rows, count + 1))
    drawn = torch.randint(0, vocab, (rows, count + 1))
    draft = tree_draft(
        tokens[:, 0], torch.zeros(rows).long(), tokens[:, 1:], torch.tensor(parents), depth=count
    )
    accepted = accepted_of(draft, drawn)
    assert accepted.tokens.shape == (rows, count + 1)
    for row in range(rows):
        wanted, path = walk(tokens[row].tolist(), parents[row], drawn[row].tolist())
        check(accepted, row, wanted, path)


@pytest.mark.parametrize("count", [0, 1, 4, 63])
def test_chain_walk(count: int) -> None:
    """Fault: width off by one. Every run length from none to all, and the same as by the tree."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(0, 5, (count + 1, count + 1), generator=generator)
    tokens = torch.cat((drawn[:, :1], drawn[:, :-1]), dim=1)
    for row in range(count):
        tokens[row, row + 1] += 1
    lens = torch.zeros(count + 1).long()
    draft = chain_draft(tokens[:, 0], lens, tokens[:, 1:])
    accepted = accepted_of(draft, drawn)
    assert accepted.counts.tolist() == list(range(1, count + 2))
    for row in range(count + 1):
        wanted, path = walk(tokens[row].tolist(), list(range(count)), drawn[row].tolist())
        check(accepted, row, wanted, path)
    parents = torch.arange(count).expand(count + 1, -1)
    as_tree = tree_draft(tokens[:, 0], lens, tokens[:, 1:], parents, depth=count)
    by_tree = accepted_of(as_tree, drawn)
    assert torch.equal(by_tree.counts, accepted.counts)
    assert torch.equal(by_tree.path, accepted.path)
    assert torch.equal(by_tree.tokens, accepted.tokens)


def test_the_root_is_no_child_of_itself() -> None:
    """Fault: endless or wrong acceptance where a draw repeats the root token."""
    drafts, parents = torch.tensor([[1, 2]]), torch.tensor([[0, 0]])
    draft = tree_draft(torch.tensor([5]), torch.tensor([7]), drafts, parents, depth=1)
    accepted = accepted_of(draft, torch.tensor([[5, 3, 4]]))
    assert accepted.counts.tolist() == [1]
    assert accepted.tokens[0, 0] == 5


def test_slots_move_forward() -> None:
    """Fault: a slot's row that does not follow what its request committed, or another's touched."""
    slots = fresh_slots(2, kv_lens=[7, 20], index=[3, 1])
    draft = chain_draft(torch.tensor([5, 6]), slots.kv_lens, torch.tensor([[1, 2], [3, 4]]))
    settled = accept(draft, torch.tensor([[1, 9, 8], [3, 4, 2]]), slots)
    assert settled.out.tolist()[0][:3] == [2, 1, 9]
    assert settled.out.tolist()[1] == [3, 3, 4, 2]
    assert slots.all_kv_lens.tolist() == [0, 23, 0, 9]
    assert slots.all_roots.tolist() == [0, 2, 0, 9]
    assert slots.history[3, 8:10].tolist() == [1, 9]
    assert slots.history[1, 21:24].tolist() == [3, 4, 2]
    assert not slots.history[[0, 2]].any()
    assert settled.positions.tolist() == [[7, 8, 9], [20, 21, 22]]
    assert settled.kv_lens.tolist() == [9, 23]
    assert settled.rows.tolist() == [[0, 1, 0], [3, 4, 5]]
