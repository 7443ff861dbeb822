"""The kernel of few rows equals torch's operators; through Triton's interpreter without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from eyas.kernels import skinny
from eyas.kernels import skinny_plan as plans
from eyas.kernels import skinny_triton as module
from eyas.kernels.gated import gated_reference
from eyas.kernels.skinny_triton import Plan
from tests.kernels.running import DEVICE, SHARED, assert_asked_early, compiles, interpret, on_gpu

SMALL = [(40, 80), (24, 96), (72, 32)]
"""(outputs, inputs); no multiple of a tile anywhere."""
REAL = [(6144, 4096), (960, 576), (576, 1536), (3072, 2048), (2048, 10944)]
SHAPES = SMALL if DEVICE == "cpu" else REAL
PLANS = {
    "one program": Plan(outputs=16, depth=32),
    "splits": Plan(outputs=16, depth=16, splits=2),
    "groups": Plan(outputs=16, depth=16, groups=2, warps=2),
    "both": Plan(outputs=32, depth=16, groups=2, splits=2, warps=2),
}
WIDE = {
    "one program": Plan(outputs=64, depth=128),
    "splits": Plan(outputs=64, depth=128, splits=4),
    "groups": Plan(outputs=16, depth=64, groups=4),
    "both": Plan(outputs=32, depth=64, groups=4, splits=2),
    "ahead": Plan(outputs=32, depth=128, warps=2, ahead=1024),
}
USED = PLANS if DEVICE == "cpu" else WIDE
KINDS = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.bfloat16, torch.float16)
"""The interpreter does not multiply bfloat16."""
MOST = 70
"""Rows of the largest pass: more than a program takes, but with plans that say so."""
PARTS = (slice(0, 1), slice(3, 8), slice(14, 17), slice(2, 33), slice(6, 70))
"""Passes of some of them, through tiles of every size."""


class Case:
    """A layer's tensors."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, rows: int = MOST) -> None:
        generator = torch.Generator().manual_seed(sum(shape))

        def draw(*size: int, deviation: float = 1.0) -> torch.Tensor:
            values = torch.randn(*size, generator=generator) * deviation
            return values.to(DEVICE, dtype)

        size, inner = shape
        self.x = draw(rows, inner + 16)[:, :inner]
        self.weight = draw(size, inner, deviation=inner**-0.5)
        self.bias = draw(size)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Outputs are of order one; in 16 bits up to three roundings lie between them."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    tolerance = {torch.float32: 3e-5, torch.float16: 8e-3, torch.bfloat16: 4e-2}[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def run_grid() -> None:
    """Every shape through every plan: product, bias, gates; rows alone."""
    for number, (name, plan) in enumerate(USED.items()):
        case = Case(SHAPES[number % len(SHAPES)], KINDS[number // 2 % 2])
        counts = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
        for run, oracle in every_way(case, plan, counts):
            every = slice(0, MOST)
            found, wanted = run(every), oracle(every)
            near(found, wanted)
            assert torch.equal(run(every), found), f"{name}: results differ from run to run"
            for rows in PARTS:
                alone = run(rows)
                assert torch.equal(alone, found[rows]), f"{name}: rows {rows} depend on others"
        assert not counts.any(), f"{name}: counters are not zero again"
    check_leading_dimensions()
    check_many_rows()


def check_leading_dimensions() -> None:
    """Rows of any shape, with counters that a layer keeps."""
    case, counters = Case(SHAPES[0], KINDS[0], 6), skinny.Counters()
    plan, x = USED["splits"], case.x.reshape(2, 3, -1)
    for _ in range(2):
        found = skinny._launch(x, case.weight, plan, counters, bias=case.bias)
        near(found, torch.nn.functional.linear(x, case.weight, case.bias))


def check_many_rows() -> None:
    """Gated rows of passes that a layer's plan is cut anew for: the bits that each has alone."""
    shape = (96, 128) if DEVICE == "cpu" else (28672, 4096)
    case, plan = Case(shape, KINDS[0], 200), plans.config(28672, 4096, gated=True)
    if DEVICE == "cpu":  # whose products sum a tile's inputs in an order of their own
        plan = dataclasses.replace(plan, depth=plans.of_rows(plan, 128).depth)
    for count in (30, 64, 70, 128, 200):
        found = module.run(case.x[:count], case.weight, plans.of_rows(plan, count), gated=True)
        near(found, gated_reference(torch.nn.functional.linear(case.x[:count], case.weight)))
        for rows in (slice(0, 1), slice(3, 8), slice(9, 26), slice(2, 66)):
            if rows.stop > count:
                continue
            alone = module.run(case.x[rows], case.weight, plan, gated=True)
            assert torch.equal(alone, found[rows]), f"rows {rows} of {count} depend on others"


def every_way(case: Case, plan: Plan, counts: torch.Tensor) -> list[tuple[Any, Any]]:
    """(kernel, reference) of rows."""
    x, weight, bias = case.x, case.weight, case.bias
    kernel = module.run

    def plain(rows: slice) -> Any:
        return kernel(x[rows], weight, plan, counts=counts)

    def biased(rows: slice) -> Any:
        return kernel(x[rows], weight, plan, bias=bias, counts=counts)

    def gates(rows: slice) -> Any:
        return kernel(x[rows], weight, plan, gated=True, counts=counts)

    def product(rows: slice, *more: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x[rows], weight, *more)

    return [
        (plain, product),
        (biased, lambda rows: product(rows, bias)),
        (gates, lambda rows: gated_reference(product(rows))),
    ]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: a part merged twice, tails of a tile, a gate with another's up, late roundings."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU, at the shapes of real models."""
    run_grid()


@pytest.mark.parametrize(
    ("name", "way"),
    [("both", "plain"), ("groups", "gated"), ("one program", "gated"), ("ahead", "plain")],
)
def test_compiles_for_hopper(name: str, way: str) -> None:
    """Fault: a kernel that only the interpreter takes; weights asked for thread by thread."""
    assembly = compile_plan(WIDE[name], way).asm["ptx"]
    if WIDE[name].ahead:
        assert_asked_early(assembly)


@pytest.mark.parametrize(("shape", "gates"), [((6144, 4096), False), ((28672, 4096), True)])
def test_plans_of_real_layers_compile(shape: tuple[int, int], gates: bool) -> None:
    """Fault: a plan that does not fit into a multiprocessor's shared memory."""
    plan = plans.config(*shape, gated=gates)
    assert plan is not None
    for rows in (n for n in module.ROWS if plans.takes(n, shape[0], gates)):
        cut = plans.of_rows(plan, rows)
        compiled = compile_plan(cut, "gated" if gates else "plain", rows, even=True)
        assert "cp.async.cg" in compiled.asm["ptx"], "tiles are not fetched ahead"
        assert compiled.metadata.shared <= 227 * 1024, rows


def test_plans_leave_no_program_without_inputs() -> None:
    """Fault: more splits than steps, whose programs would ask for memory behind the weight."""
    for outputs, inputs in itertools.product(
        (576, 960, 2048, 4096, 6144, 21888, 32000), (576, 1536, 2048, 4096, 10944, 14336)
    ):
        for gated in (False, True):
            plan = plans.config(outputs, inputs, gated)
            steps = -(-inputs // (plan.groups * plan.depth))
            assert (plan.splits - 1) * -(-steps // plan.splits) < steps, (outputs, inputs, plan)
            assert plan.groups in (1, plan.warps), "groups are all warps or none"


def test_who_takes_a_layer() -> None:
    """Fault: vocabulary heads, tiny or odd layers, or rows on a CPU in the kernel."""
    assert plans.plan_of(4096, 4096) is not None
    assert plans.plan_of(128256, 4096) is None
    assert plans.plan_of(64, 64) is None
    assert plans.plan_of(4096, 4100) is None
    for outputs, gated, most in ((28672, True, 128), (28672, False, 64), (5632, True, 64)):
        assert all(plans.takes(n, outputs, gated) == (n <= most) for n in (1, 64, 65, 128, 129))
    assert plans.takes(256, 28672, gated=True)
    assert not plans.takes(257, 28672, gated=True)
    assert not plans.takes(256, 24576, gated=True), "a third of the device would wait"
    split = [n for n in range(512, 40000, 512) if plans.config(n, 4096, gated=True).splits > 1]
    assert split, "plans that share tiles have counters for few rows alone"
    assert not any(plans.takes(plans.MOST_ROWS + 1, n, gated=True) for n in split)
    with torch.inference_mode():
        assert not plans.serves(torch.zeros(1, 64, dtype=torch.bfloat16))


def test_an_h200_has_room_for_all_stages() -> None:
    """Fault: fewer tiles on their way than were measured."""
    shapes = itertools.product((576, 2048, 6144, 28672), (576, 4096, 14336), (False, True))
    for outputs, inputs, gated in shapes:
        for rows in (n for n in module.ROWS if plans.takes(n, outputs, gated)):
            plan = plans.of_rows(plans.config(outputs, inputs, gated), rows)
            assert plan.stages_in(SHARED[90], min(rows, plan.rows), 2) == plan.stages, plan


@pytest.mark.parametrize(
    ("shape", "gates", "rows", "most"),
    [
        ((6144, 4096), False, 16, 1),
        ((4096, 4096), False, 16, 1),
        ((4096, 14336), False, 16, 1),
        ((28672, 4096), True, 16, 2),
        ((28672, 4096), True, 32, 2),
        ((28672, 4096), True, 64, 2),
    ],
)
def test_programs_of_large_layers_are_spread_evenly(
    shape: tuple[int, int], gates: bool, rows: int, most: int
) -> None:
    """Faults: room for more than every multiprocessor needs: programs that come early crowd.

    Room for less, so that half of them wait for a turn.
    """
    plan = plans.of_rows(plans.config(*shape, gated=gates), rows)
    programs = -(-shape[0] // plan.outputs) * plan.splits
    assert -(-programs // plans.FILLING) == most
    compiled = compile_plan(plan, "gated" if gates else "plain", rows, even=True)
    assert (228 << 10) // (compiled.metadata.shared + 1024) == most


@pytest.mark.parametrize("capability", [80, 89, 120])
@pytest.mark.parametrize(("shape", "gates"), [((6144, 4096), False), ((28672, 4096), True)])
def test_plans_fit_on_other_gpus(shape: tuple[int, int], gates: bool, capability: int) -> None:
    """Fault: as many tiles on their way as an H200 has room for, where there is less."""
    plan = plans.config(*shape, gated=gates)
    for rows in (64, 256):
        if plans.takes(rows, shape[0], gates):
            way, cut = "gated" if gates else "plain", plans.of_rows(plan, rows)
            compiled = compile_plan(cut, way, rows, even=True, capability=capability)
            assert compiled.metadata.shared <= SHARED[capability], rows


def compile_plan(
    plan: Plan, way: str, rows: int = 16, even: bool = False, capability: int = 90
) -> Any:
    """The kernel as `run` would compile it; `even`: for a weight of whole tiles."""
    pointers = [n for n in module._skinny_kernel.arg_names if n.endswith("_ptr")]
    types = dict.fromkeys(pointers, "*bf16") | {"part_ptr": "*fp32", "count_ptr": "*i32"}
    types |= dict.fromkeys(("num_rows", "size", "inner", "x_stride", "ahead"), "i32")
    constants: dict[str, Any] = {
        "GATED": way == "gated",
        "BIASED": False,
        "EVEN": even,
        "SPLITS": plan.splits,
        "GROUPS": plan.groups,
        "ROWS": rows,
        "OUTPUTS": plan.outputs,
        "DEPTH": plan.depth,
    }
    aligned = [name for name in types if even and name not in ("num_rows", "ahead")]
    stages = plan.stages_in(SHARED[capability], rows, 2)
    kernel = module._skinny_kernel
    return compiles(kernel, types, constants, plan.warps, stages, aligned, capability)


if __name__ == "__main__":
    run_grid()
