"""Attention kernels equal the torch reference, and a row's bits are its own.

Without a GPU Triton's interpreter runs a few small cases; a GPU runs these and a grid.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from eyas.kernels.attention_plan import CAUSAL, RANKS, Plan, Workspace, make_plan, most_splits
from eyas.kernels.kv_write import Layout
from eyas.kernels.lang import SHARED_BYTES
from eyas.kernels.splits import ABREAST, HALF
from tests.kernels.attention_cases import (
    Case,
    Sequence,
    Tail,
    by_kernel,
    by_reference,
    random_bits,
)
from tests.kernels.running import DEVICE, interpret, on_gpu

LATENT = Case(kv_heads=1, group=16, key_dim=48, value_dim=32, latent=True, rope_dim=16)
LONG = replace(LATENT, group=2, key_dim=144, value_dim=128)
"""Sums that another launch merges, by programs that ask for many splits at once."""
WIDE = Case(kv_heads=1, group=3, key_dim=80, value_dim=80, rope_dim=16, dtype=torch.float16)
"""Heads whose rows lie across products, and are padded."""
LONG_LATENT = replace(LATENT, key_dim=288, value_dim=256, rope_dim=32, dtype=torch.float16)
"""Latents whose rows lie either way, as many rows there are."""
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference of a number, over the largest number."""


Check = Callable[[], None]
"""One case, run; it raises where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass of random rows, and how the backend is to run it."""

    case: Case = field(default_factory=Case)
    prefixes: list[int]
    count: int = 1
    tree: bool = False
    offset: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Rows and pages are the reference's."""
        requests = tails(self)
        expected, kept = by_reference(self.case, requests)
        found, pool = by_kernel(self.case, requests, **self.options)
        close = TOLERANCE[self.case.dtype]
        difference = float((found.float() - expected).abs().max() / expected.abs().max())
        assert difference < close, f"rows differ by {difference}: {self}"
        for ours, theirs in ((pool.k, kept.k), (pool.v, kept.v)):
            ours, theirs = (x[1, :, self.case.page_size :].float() for x in (ours, theirs))
            assert torch.allclose(ours, theirs, rtol=close, atol=close), f"pages differ: {self}"


def tails(run: Pass, seed: int = 0) -> list[Tail]:
    """One request a prefix."""
    rng, made = random.Random(seed), []
    for i, prefix in enumerate(run.prefixes):
        start = prefix + run.offset
        made.append(
            Tail(
                sequence=Sequence.random(run.case, start + run.count, seed + i),
                prefix=prefix,
                index=list(range(start, start + run.count)),
                bits=random_bits(run.count, run.offset, rng) if run.tree else None,
                offset=run.offset,
                before=list(range(prefix, start)),
            )
        )
    return made


MANY, FAST = {"programs": 12}, {"deterministic": False}
ROOM = {"workspace_bytes": 2**25}
MORE = {"programs": 16} | ROOM
"""So that programs share the keys of 64 rows of `LONG_LATENT`, which lie across then."""
ENGINES = {"programs": 264, "workspace_bytes": 2**27}
"""What an engine has of them for latents on an H200."""
SMALL = [
    Pass(case=Case(rope_dim=16), prefixes=[0, 37, 200]),
    Pass(case=Case(group=3, page_size=1), prefixes=[37, 300], count=4, options=MANY),
    Pass(case=Case(rope_dim=8), prefixes=[0, 300], count=4, options={"programs": 1}),
    Pass(case=Case(kv_heads=1, rope_dim=16), prefixes=[0, 150], count=100),
    Pass(case=Case(key_dim=24, value_dim=24, rope_dim=24), prefixes=[140], count=2),
    Pass(case=Case(window=64), prefixes=[0, 50, 63, 300], count=3, options=MANY),
    Pass(case=Case(window=64), prefixes=[63, 300], count=3, options={"programs": 1}),
    Pass(case=Case(window=256), prefixes=[700], count=3, options={"programs": 4}),
    Pass(case=LATENT, prefixes=[0, 130], count=3),
    Pass(case=replace(LATENT, group=20), prefixes=[140], count=1, options=MANY),
    Pass(prefixes=[140, 3], count=8, tree=True, options=MANY | FAST),
    Pass(prefixes=[140, 3], count=8, tree=True, options=MANY),
    Pass(prefixes=[140, 3], count=5, tree=True, options={"programs": 1}),
    Pass(prefixes=[140], count=3, tree=True, offset=7, options=MANY),
    Pass(prefixes=[140], count=3, tree=True, offset=7, options=FAST),
    Pass(case=Case(window=64), prefixes=[130], count=4, tree=True, options=MANY),
    Pass(case=Case(kv_heads=1, group=1), prefixes=[2], count=64, tree=True, options=FAST),
    Pass(case=Case(dtype=torch.float16, rope_dim=16), prefixes=[140], count=5),
    Pass(case=replace(LATENT, dtype=torch.float16), prefixes=[70], count=4, options=MANY),
    Pass(case=LONG, prefixes=[64 * (2 * ABREAST.value + 2)], count=3, options=MANY),
    Pass(case=WIDE, prefixes=[0, 150], count=6, options=MANY),
    Pass(
        case=replace(WIDE, window=64, page_size=48),
        prefixes=[140],
        count=25,
        options={"programs": 1},
    ),
    Pass(case=replace(WIDE, group=20, page_size=64), prefixes=[140], options=MANY),
    Pass(case=WIDE, prefixes=[140, 3], count=8, tree=True, options=MANY),
    Pass(case=WIDE, prefixes=[140], count=8, tree=True, options=MANY | FAST),
    Pass(case=LONG_LATENT, prefixes=[0, 150], count=3, options=MORE),
    Pass(case=replace(LONG_LATENT, group=20, page_size=48), prefixes=[140], options=MORE),
    Pass(case=replace(LONG_LATENT, window=70), prefixes=[140], count=5, options=MORE),
    Pass(case=LONG_LATENT, prefixes=[140], count=4, options={"programs": 1}),
    Pass(case=LONG_LATENT, prefixes=[140, 3], count=4, tree=True, options=MORE),
    Pass(case=LONG_LATENT, prefixes=[140], count=4, tree=True, options=MORE | FAST),
]
"""What the interpreter can run in seconds: every branch of the kernels once."""


MIXED = [5000, 127, 128, 4000, 64, 9, 2049, 3071]
"""Prefixes at edges of blocks and splits."""
MODELS = {
    "8B": Case(kv_heads=8, group=4, key_dim=128, value_dim=128, rope_dim=128),
    "SmolLM2": Case(kv_heads=3, group=3, key_dim=64, value_dim=64, rope_dim=64, page_size=64),
    "latent": replace(LATENT, key_dim=576, value_dim=512, rope_dim=64),
    "others": Case(kv_heads=4, group=8, key_dim=128, value_dim=128, page_size=1),
}


def grid(name: str) -> Iterator[Pass]:
    """What a GPU runs: real sizes, 1 to 64 new rows, contexts up to 32k, pages of 1, 16 and 64."""
    case = replace(MODELS[name], dtype=torch.bfloat16)
    if name == "8B":
        for count, prefixes in itertools.product((1, 4, 16, 64), ([1, 700], [32_000], MIXED)):
            for tree in (False, True)[: 1 + (count > 1)]:
                yield Pass(case=case, prefixes=prefixes, count=count, tree=tree)
        yield Pass(case=case, prefixes=MIXED, count=4, options={"programs": 1})
        yield Pass(case=case, prefixes=[0, 1000], count=1500)
        for dtype in (torch.float16, torch.float32):
            yield Pass(case=replace(case, dtype=dtype), prefixes=MIXED, count=4)
    elif name == "latent":
        for count, tree in ((1, False), (4, False), (16, False), (16, True)):
            yield Pass(case=case, prefixes=MIXED, count=count, tree=tree)
            yield Pass(case=case, prefixes=MIXED, count=count, tree=tree, options=ENGINES)
        yield Pass(case=case, prefixes=MIXED, count=16, tree=True, options=ENGINES | FAST)
        for prefix in (32_000, 60_000):
            yield Pass(case=case, prefixes=[prefix], count=4, options=ENGINES)
        for group in (64, 128):
            yield Pass(case=replace(case, group=group), prefixes=[3000], count=2)
        for tree in (False, True):
            yield Pass(
                case=replace(case, group=128), prefixes=[3000], count=16, tree=tree, options=ENGINES
            )
        yield Pass(case=case, prefixes=[0, 1000], count=300)
        yield Pass(case=replace(case, dtype=torch.float32), prefixes=[300], count=4)
    elif name == "SmolLM2":
        for count, tree in ((1, False), (5, False), (64, True)):
            yield Pass(case=case, prefixes=MIXED, count=count, tree=tree)
        yield Pass(case=case, prefixes=[0, 300], count=700)
    else:
        yield Pass(case=case, prefixes=MIXED, count=3)
        one = replace(case, kv_heads=2, group=1, key_dim=256, value_dim=256, rope_dim=64)
        for tree in (False, True):
            yield Pass(case=replace(one, window=1024), prefixes=MIXED, count=16, tree=tree)


def alone(case: Case, sequence: Sequence, start: int, count: int, **options: Any) -> torch.Tensor:
    """[count, H * value_dim]: rows `start` .. of a sequence, each in a pass of its own."""
    rows = []
    for n in range(start, start + count):
        found, _ = by_kernel(case, [Tail(sequence=sequence, prefix=n, index=[n])], **options)
        rows.append(found[0, 0])
    return torch.stack(rows)


def check_company(
    case: Case, start: int, counts: tuple[int, ...], programs: int = 0, **given: Any
) -> None:
    """The rows of one pass have the bits each has alone, however the pass is run."""
    most = max(counts)
    sequence, other = Sequence.random(case, start + most, 0), Sequence.random(case, 140 + most, 1)
    expected = alone(case, sequence, start, most, programs=1, **given)
    for count in counts:
        mine = Tail(sequence=sequence, prefix=start, index=list(range(start, start + count)))
        chained = replace(mine, bits=[(2 << n) - 1 for n in range(count)])
        beside = Tail(sequence=other, prefix=140, index=list(range(140, 140 + count)))
        many = given | {"programs": programs or (16 if case.latent else 8) * case.kv_heads}
        runs = {
            "alone": by_kernel(case, [mine], **many)[0][0],
            "folded": by_kernel(case, [mine], programs=1, **given)[0][0],
            "as prefill": by_kernel(case, [mine], verify="prefill", **many)[0][0],
            "beside another": by_kernel(case, [beside, mine], spare=2, **many)[0][1],
            "pages": by_kernel(replace(case, page_size=3, poison=-7.0), [mine], **many)[0][0],
            "ranks": by_kernel(case, [chained], **many)[0][0],
            "bits": by_kernel(case, [chained], deterministic=False, **many)[0][0],
        }
        for name, rows in runs.items():
            assert torch.equal(rows, expected[:count]), f"{name}, {count} rows at {start}: {case}"


def check_path(case: Case, start: int, count: int, **given: Any) -> None:
    """A path spread among the nodes of a tree has the bits it has as a text."""
    rng = random.Random(start)
    sequence, other = (Sequence.random(case, start + count, s) for s in range(2))
    path = [0, *sorted(rng.sample(range(1, count), 3))]
    bits = [1 | 1 << n for n in range(count)]
    for depth, node in enumerate(path):
        bits[node] = sum(1 << n for n in path[: depth + 1])
    mixed = replace(sequence, q=other.q.clone(), k=other.k.clone(), v=other.v.clone())
    if case.latent:
        mixed = replace(mixed, v=mixed.k[..., : case.value_dim])
    for name in ("q", "k", "v"):
        getattr(mixed, name)[:start] = getattr(sequence, name)[:start]
    straight = list(range(start, start + 4))
    for name in ("q", "k", "v"):
        getattr(mixed, name)[[start + n for n in path]] = getattr(sequence, name)[straight]
    if mixed.rope is not None and sequence.rope is not None:
        tables = (sequence.rope[0].clone(), sequence.rope[1].clone())
        for table, own in zip(tables, sequence.rope, strict=True):
            table[[start + n for n in path]] = own[straight]
        mixed = replace(mixed, rope=tables)
    chain = Tail(sequence=sequence, prefix=start, index=straight)
    expected, _ = by_kernel(case, [chain], **given)
    tree = Tail(sequence=mixed, prefix=start, index=list(range(start, start + count)), bits=bits)
    for programs in (1, 4 * case.kv_heads):
        found, _ = by_kernel(case, [tree], programs=programs, **given)
        assert torch.equal(found[0, path], expected[0]), f"{case} at {start}, {programs} programs"


def plan_of(run: Pass, splits: int, programs: int, space: Workspace) -> Plan:
    """What the backend plans for it."""
    case = run.case
    return make_plan(
        Layout(shape=case.shape, page_size=case.page_size),
        case.dtype,
        case.group,
        len(run.prefixes),
        run.count,
        RANKS if run.tree else CAUSAL,
        splits,
        programs,
        space,
        max(run.prefixes) + run.offset + run.count,
        SHARED_BYTES,
    )


def check_launches(run: Pass, room: int, most: int) -> None:
    """A workspace with room for `room` tiles of 16 rows gives the bits of one that holds all."""
    case, splits, programs = run.case, 8, 32
    size = room * (splits + 4) * case.value_dim * 16 * 4
    space = Workspace.of(case.shape, case.dtype, torch.device(DEVICE), size)
    plan = plan_of(run, splits, programs, space)
    assert len(list(plan.launches(len(run.prefixes)))) == most, plan
    assert plan.parts > 1, "programs do not share keys"
    given: dict[str, Any] = {"programs": programs, "splits": splits}
    whole, _ = by_kernel(case, tails(run), **given)
    cut, _ = by_kernel(case, tails(run), workspace_bytes=space.sums.nbytes, **given)
    assert torch.equal(whole, cut), f"{most} launches: {run}"


def bits_small() -> list[Check]:
    """Bits where splits begin, grow and are cut off by a window."""
    three, two = Case(kv_heads=1, group=3, rope_dim=16), Case(kv_heads=1, group=2)
    wide_tree = Pass(case=replace(LATENT, group=24), prefixes=[140], count=4, tree=True)
    return [
        partial(check_company, three, 126, (4,)),
        partial(check_company, two, 510, (4,), splits=4),
        partial(check_company, replace(two, window=130), 253, (3,)),
        partial(check_company, LATENT, 127, (2,)),
        partial(check_company, LONG, 253, (4,), splits=4),
        partial(check_company, WIDE, 126, (4,)),
        # what one request alone leaves is merged abreast
        partial(check_company, WIDE, 253, (6,), programs=32),
        # programs of a merge have rows of one length each
        partial(check_company, WIDE, 510, (4,), splits=4),
        partial(check_company, LONG_LATENT, 62, (5,), **ROOM),
        # rows of one tile end apart
        partial(check_company, LONG_LATENT, 126, (4,), splits=4, **ROOM),
        partial(check_company, two, 60, (18,)),
        partial(check_path, three, 123, 9),
        partial(check_path, two, 250, 20, splits=2),
        partial(check_path, LONG_LATENT, 124, 7, **ROOM),
        partial(check_launches, Pass(case=three, prefixes=[140], count=20), 3, 2),
        partial(check_launches, Pass(case=three, prefixes=[140], count=20, tree=True), 3, 2),
        partial(check_launches, Pass(case=LATENT, prefixes=[200], count=5), 2, 3),
        partial(check_launches, wide_tree, 3, 2),
        partial(check_launches, Pass(case=two, prefixes=[300, 5, 140, 150], count=2), 3, 2),
    ]


def bits(name: str) -> list[Check]:
    """The same at real sizes."""
    case = replace(MODELS[name], dtype=torch.bfloat16)
    splits = most_splits(case.shape, case.group)
    grows = splits * (32 if case.latent else 128)  # splits double here
    many = [splits // 2 * HALF.value - 3] * case.latent  # and here there may be more of them
    starts = (3, 120, 1022, grows - 3, *many)
    return [
        *(
            partial(check_company, case, start, (4, 16), **given)
            for start in starts
            for given in [ENGINES if case.latent or start > 200 else {}]
        ),
        partial(check_path, case, 1000, 16),
        partial(check_path, case, grows - 2, 60),
    ]


def numbered(name: str, checks: Iterable[Check]) -> list[Any]:
    """Parameters of a test, so that processes share the checks: most of a check is compilation."""
    return [pytest.param(check, id=f"{name}-{i}") for i, check in enumerate(checks)]


@pytest.mark.parametrize(
    ("case", "prefixes", "count", "given", "across"),
    [
        (LONG_LATENT, [140], 1, MORE, False),
        (LONG_LATENT, [140], 5, MORE, True),
        (MODELS["latent"], [1022], 1, ENGINES, False),
        (MODELS["latent"], [1022], 16, ENGINES, True),
        (MODELS["latent"], [6141], 4, ENGINES, True),
        (MODELS["latent"], MIXED, 4, ENGINES, True),
    ],
)
def test_latents_are_run_either_way(
    case: Case, prefixes: list[int], count: int, given: dict[str, int], across: bool
) -> None:
    """Fault: what the interpreter and GPUs run here is no longer planned both ways."""
    case = replace(case, dtype=torch.bfloat16)
    meta, size = torch.device("meta"), given["workspace_bytes"]
    space = Workspace.of(case.shape, case.dtype, meta, size)
    run = Pass(case=case, prefixes=prefixes, count=count)
    splits = most_splits(case.shape, case.group)
    assert plan_of(run, splits, given["programs"], space).across is across


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("part", ["reference", "bits"])
def test_interpreted_kernels(part: str) -> None:
    """Fault: wrong masks, pages, splits or merges; a row that depends on its company."""
    interpret(__file__, part)


REFERENCE = {"small": SMALL} | {name: list(grid(name)) for name in MODELS}


@on_gpu
@pytest.mark.parametrize(
    "check", [one for n, runs in REFERENCE.items() for one in numbered(n, [r.check for r in runs])]
)
def test_kernels_equal_the_reference(check: Check) -> None:
    """Fault: the same, at real sizes."""
    check()


@on_gpu
@pytest.mark.parametrize(
    "check",
    [
        *numbered("small", bits_small()),
        *(one for name in ("8B", "SmolLM2", "latent") for one in numbered(name, bits(name))),
    ],
)
def test_rows_keep_their_bits(check: Check) -> None:
    """Fault: verify arithmetic that depends on N, the batch, the split of work or the tree."""
    check()


if __name__ == "__main__":
    for small in bits_small() if sys.argv[1] == "bits" else [run.check for run in SMALL]:
        small()
