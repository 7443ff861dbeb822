"""Plans of attention: every tile in one launch, none that its workspace does not hold."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from eyas.kernels.attention_plan import (
    BRIEF,
    CAUSAL,
    MASKED,
    RANKS,
    SHORT,
    SPARE_SLOTS,
    USUAL_BYTES,
    Plan,
    Workspace,
    make_plan,
    most_splits,
)
from eyas.kernels.kv_write import Layout
from eyas.kernels.lang import SHARED_BYTES
from eyas.model_config import AttentionShape

PROGRAMS = 264
LATENT = AttentionShape(
    num_layers=1, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, latent=True
)
SHAPES = {
    "8B": (AttentionShape.heads(1, 8, 128), 4),
    "small": (AttentionShape.heads(1, 3, 64), 3),
    "latent 16": (LATENT, 16),
    "latent 20": (LATENT, 20),
    "latent 128": (LATENT, 128),
    "small latent": (
        AttentionShape(
            num_layers=1, num_kv_heads=1, key_dim=48, value_dim=32, scale=0.1, latent=True
        ),
        16,
    ),
}


def plan_of(
    name: str,
    requests: int,
    num_new: int,
    tree: int = CAUSAL,
    size: int = 0,
    longest: int = 2**17,
    shared: int = SHARED_BYTES,
) -> Plan:
    """In bfloat16, on a device of 132 multiprocessors."""
    shape, group = SHAPES[name]
    return make_plan(
        Layout(shape=shape, page_size=16),
        torch.bfloat16,
        group,
        requests,
        num_new,
        tree,
        most_splits(shape, group),
        PROGRAMS,
        Workspace.of(shape, torch.bfloat16, torch.device("meta"), size or USUAL_BYTES),
        longest,
        shared,
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [2**20, 2**24, 2**27])
def test_launches_cover_a_pass_and_fit(name: str, size: int) -> None:
    """Fault: tiles left out or done twice; sums behind the workspace; a node cut in two."""
    shape, group = SHAPES[name]
    for requests, num_new, tree in product((1, 3, 32), (1, 4, 16, 61), (CAUSAL, MASKED, RANKS)):
        plan = plan_of(name, requests, num_new, tree, size)
        done = []
        for launch in plan.launches(requests):
            mine = range(launch.first_request, launch.first_request + launch.requests)
            done += list(product(mine, range(*launch.range_of_tiles)))
            columns = launch.requests * plan.columns * shape.num_kv_heads
            slots = (plan.splits + SPARE_SLOTS) * shape.value_dim
            fits = columns * slots * (2 if shape.latent else 4) <= size
            assert plan.parts == 1 or fits, f"{name} {requests} {num_new}: {plan}"
            assert plan.block <= plan.least, "a block holds two splits"
            assert launch.first_tile * plan.tile % group == 0, "a node's rows lie in two launches"
        assert sorted(done) == list(product(range(requests), range(plan.num_tiles)))
        assert plan.num_tiles * plan.tile >= num_new * group


@pytest.mark.parametrize("num_new", [1, 4, 8, 16])
def test_many_latent_heads_fill_a_device(num_new: int) -> None:
    """Fault: few programs walk all keys alone since the workspace does not hold all sums."""
    plan = plan_of("latent 128", 1, num_new)
    for launch in plan.launches(1):
        programs = plan.parts * launch.tiles
        assert 100 <= programs <= PROGRAMS // 2, f"{programs} programs: {plan}"


def test_many_requests_of_few_rows_ask_far_ahead() -> None:
    """Fault: shorter pipelines than two programs on a multiprocessor have room for."""
    assert plan_of("8B", 32, 4).num_stages == 5
    assert plan_of("8B", 32, 16).num_stages == 3


def test_short_trees_are_cut_in_two() -> None:
    """Faults: one program for 64 rows where two are through sooner; another arithmetic for it."""
    short, long = (plan_of("8B", 1, 16, RANKS, longest=n) for n in (SHORT, SHORT + 1))
    assert (short.tile, long.tile) == (32, 64)
    assert (short.block, short.splits, short.least) == (long.block, long.splits, long.least)
    assert short.parts > 1
    assert plan_of("8B", 8, 16, longest=SHORT).tile == 64, "many requests fill a device"
    assert plan_of("8B", 8, 60, RANKS, longest=SHORT).tile == 32, "nodes have programs of their own"


@pytest.mark.parametrize("name", ["8B", "small", "latent 16", "latent 128", "small latent"])
def test_a_rows_arithmetic_is_one(name: str) -> None:
    """Fault: keys cut by the pass, or rows laid by it where that is not known to change no bit."""
    plans = [
        plan_of(name, requests, num_new, tree, longest=longest)
        for requests in (1, 8, 64)
        for num_new in (1, 4, 16, 60)
        for tree in (CAUSAL, MASKED, RANKS)
        for longest in (SHORT, 2**17)
    ]
    assert len({(plan.block, plan.splits, plan.least, plan.asks_first) for plan in plans}) == 1
    across = {plan.across for plan in plans}
    if name in ("latent 16", "latent 128"):
        assert across == {False, True}
        assert {plan.tile for plan in plans if plan.across} == {64}
        assert all(plan.parts > 1 for plan in plans if plan.across), "sums twice in registers"
    else:
        assert across == {name == "8B"}
    if name == "8B":
        assert {plan.num_warps for plan in plans} == {4}


@pytest.mark.parametrize(
    ("name", "requests", "num_new", "tree", "abreast", "soon"),
    [
        ("8B", 1, 1, CAUSAL, True, True),
        ("8B", 2, 16, CAUSAL, True, True),
        ("8B", 8, 2, CAUSAL, True, True),
        ("8B", 4, 4, CAUSAL, False, False),
        ("8B", 4, 16, CAUSAL, False, False),
        ("8B", 1, 16, RANKS, True, True),
        ("latent 16", 1, 1, CAUSAL, True, True),
        ("latent 16", 1, 8, CAUSAL, True, False),
        ("latent 16", 1, 16, CAUSAL, True, False),
        ("latent 16", 8, 1, CAUSAL, True, False),
        ("latent 16", 8, 4, CAUSAL, False, False),
        ("latent 16", 1, 16, RANKS, False, False),
        ("small", 1, 16, RANKS, False, False),
    ],
)
def test_merges_come_as_was_measured(
    name: str, requests: int, num_new: int, tree: int, abreast: bool, soon: bool
) -> None:
    """Fault: many early merges, which made the 8B slower; many registers where many must run."""
    plan = plan_of(name, requests, num_new, tree)
    assert (plan.abreast, plan.soon) == (abreast, soon), plan


@pytest.mark.parametrize("name", SHAPES)
def test_few_merges_are_compiled(name: str) -> None:
    """Fault: a kernel of many splits at once, seconds to compile, for each length of a prompt."""
    plans = [plan_of(name, 1, n, longest=2048) for n in range(1, 2049)]
    assert all(p.write for p in plans if p.abreast)
    compiled = {(p.tile, p.across, p.columns) for p in plans if p.abreast}
    assert len(compiled) <= 8, compiled


def test_merges_of_few_keys_come_early() -> None:
    """Fault: late merges of latents where attention is short, or early ones where it is long."""
    assert plan_of("latent 16", 1, 16, longest=SHORT).soon
    assert not plan_of("latent 16", 1, 16, longest=SHORT + 1).soon


def test_one_request_has_rows_in_a_large_tile() -> None:
    """Fault: copies of few rows, of which each keeps a part: 17 us instead of 15 at 8k (8B)."""
    tiles = [plan_of("8B", 1, n, longest=BRIEF + 1).tile for n in (1, 4, 8, 16)]
    assert tiles == [64] * 4
    tiles = [plan_of("8B", 1, n, longest=BRIEF).tile for n in (1, 4, 8, 16)]
    assert tiles == [16, 16, 64, 64]
    assert plan_of("8B", 1, 1, longest=BRIEF).abreast and plan_of("8B", 1, 4, longest=BRIEF).soon
    assert plan_of("8B", 8, 4).tile == 16, "many requests fill a device"


def test_latent_rows_of_few_keys_have_a_multiprocessor_each() -> None:
    """Fault: N = 4 at a short context in two tiles, each of whose programs takes twice as long."""
    assert plan_of("latent 16", 1, 4, longest=1024).tile == 16
    assert plan_of("latent 16", 1, 16, longest=512).tile == 16
    assert plan_of("latent 16", 1, 16, longest=1024).tile == 64
    assert plan_of("latent 16", 1, 4).tile == 64


def test_many_requests_fold_latents_where_they_read_them() -> None:
    """Fault: many requests' sums go to memory and back, which takes longer than reading keys."""
    assert plan_of("latent 16", 32, 8, longest=512).parts == 1
    assert plan_of("latent 16", 128, 1).parts == 1
    assert plan_of("latent 16", 1, 2048).parts == 1


def test_latents_of_small_gpus_have_small_tiles() -> None:
    """Fault: tiles that a GPU has no room for, or another arithmetic there."""
    large, middle, small = (
        plan_of("latent 16", 1, 4, shared=size * 2**10) for size in (227, 163, 99)
    )
    assert (large.tile, middle.tile, small.tile) == (64, 32, 16)
    assert len({(plan.block, plan.splits, plan.least) for plan in (large, middle, small)}) == 1
