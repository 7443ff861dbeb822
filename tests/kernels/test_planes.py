"""8-bit layers by planes of bytes: exact sums, small errors; interpreted without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eyas.kernels import planes
from eyas.kernels import planes_triton as module
from eyas.kernels.norm import Norm
from eyas.kernels.skinny import Counters
from eyas.kernels.skinny_triton import Plan
from tests.kernels.running import DEVICE, SHARED, compiles, interpret, on_gpu

SHAPES = [(40, 80), (24, 96), (72, 48)] if DEVICE == "cpu" else [(6144, 4096), (960, 576)]
"""(outputs, inputs); no multiple of a tile anywhere on a CPU."""
SMALL = {
    "one program": Plan(outputs=16, depth=32),
    "splits": Plan(outputs=16, depth=32, splits=2),
    "groups": Plan(outputs=16, depth=32, groups=2, warps=2),
}
WIDE = {
    "one program": Plan(outputs=64, depth=256),
    "splits": Plan(outputs=64, depth=128, splits=2, ahead=1024),
    "groups": Plan(outputs=16, depth=128, groups=4),
    "both": Plan(outputs=32, depth=64, groups=4, splits=2),
}
PLANS = SMALL if DEVICE == "cpu" else WIDE
MOST = 35
"""Rows of the largest pass: more than a program takes."""
ROUNDING = 0.0 if DEVICE == "cpu" else 2**-7
"""A unit in bfloat16's last place, by which a norm may be off on a GPU."""
PARTS = (slice(0, 1), slice(3, 8), slice(14, 29), slice(2, 34))
REAL = [
    ((6144, 8192), False),
    ((4096, 4096), False),
    ((28672, 4096), True),
    ((4096, 14336), False),
    ((32000, 4096), False),
    ((1536, 576), True),
    ((576, 1536), False),
]
"""Drafters' layers."""


class Case:
    """A layer's tensors; rows of every kind."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype = torch.float16) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        size, inner = shape

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        x = draw(MOST, inner + 16)[:, :inner]
        x[1] = 0
        x[2, 7] = 3e3
        x[3] *= 1e-4
        self.x = x.to(DEVICE, dtype)
        self.weight = (draw(size, inner) * 40).clamp(-127, 127).to(DEVICE, torch.int8)
        self.scales = (torch.rand(size, generator=generator) * inner**-0.5 / 40).to(DEVICE)
        self.bias = draw(size).to(DEVICE, dtype)


def run_grid() -> None:
    """Every shape through every plan: planes, product, bias, gates; rows alone."""
    for (shape, (name, plan)), gates in itertools.product(
        zip(itertools.cycle(SHAPES), PLANS.items(), strict=False), (False, True)
    ):
        case = Case(shape)
        counts = torch.zeros(1024, dtype=torch.int32, device=DEVICE)

        def run(rows: slice, plan: Plan, gates: bool = gates, case: Case = case) -> torch.Tensor:
            made = module.planes_triton(case.x[rows])[:2]
            given = (*made, case.weight, case.scales, plan, case.x.dtype)
            bias = None if gates else case.bias
            return module.run(*given, bias=bias, gated=gates, counts=counts)  # noqa: B023

        whole = run(slice(0, MOST), dataclasses.replace(plan, splits=1))
        bias = None if gates else case.bias
        wanted = planes.int8_linear_reference(case.x, case.weight, case.scales, bias, gates)
        torch.testing.assert_close(whole, wanted, rtol=2e-3, atol=2e-3, msg=name)
        for rows in PARTS:
            assert torch.equal(run(rows, plan), whole[rows]), f"{name}: {rows} depend on others"
        assert not counts.any(), f"{name}: counters are not zero again"
    check_planes()
    check_norms()
    check_layer()


def check_norms() -> None:
    """A norm in the same launch gives the planes of the rows that it gives alone.

    On a GPU to a rounding of the norm: compilers lay the sum of squares over threads as they like.
    """
    case = Case(SHAPES[0])
    generator = torch.Generator().manual_seed(3)
    weight, delta = (torch.randn(n, generator=generator) for n in (case.x.shape[1:], case.x.shape))
    weight, delta = weight.to(case.x), delta.to(case.x)
    for norm in (Norm(weight=weight, eps=1e-5), Norm(weight=weight, eps=1e-5, delta=delta)):
        normed, total = norm(case.x)
        found = module.planes_triton(case.x, norm)
        alone = module.planes_triton(normed)
        held, wanted = (numbers(planes) * units[:, None] for planes, units, _ in (found, alone))
        torch.testing.assert_close(held, wanted, rtol=ROUNDING, atol=ROUNDING / 16)
        assert torch.equal(found[2], total), "the residual"
        layer = (case.weight, case.scales, case.bias, Counters())
        y, total = planes.int8_norm_linear(case.x[None], norm, *layer)
        alone_y = planes.int8_linear(normed, *layer)
        torch.testing.assert_close(y[0], alone_y, rtol=4 * ROUNDING, atol=4 * ROUNDING)
        assert total.shape == (1, *case.x.shape)


def check_planes() -> None:
    """The kernel's planes: those of the reference, but where a half is rounded."""
    case = Case(SHAPES[0])
    found, units, _ = module.planes_triton(case.x)
    wanted, wanted_units = planes.planes_reference(case.x)
    assert torch.equal(units, wanted_units)
    assert (numbers(found) - numbers(wanted)).abs().max() <= 1
    torch.testing.assert_close(numbers(found) * units[:, None], case.x.float(), rtol=1e-3, atol=0.1)
    poor = case.x[:3].clone()
    poor[0, 3], poor[1, 5] = torch.nan, torch.inf
    finite = module.planes_triton(poor)[1].isfinite()
    assert finite.tolist() == [False, False, True], "what is not a number gives numbers"


def check_layer() -> None:
    """Rows of any shape and number, with counters that a layer keeps."""
    case, counters = Case((72, 1024) if DEVICE == "cpu" else SHAPES[0]), Counters()
    few = (case.x[:6].view(2, 3, -1), case.x)
    for x in (*few, *few):
        given = (case.weight, case.scales, case.bias)
        found = planes.int8_linear(x, *given, counters)
        wanted = planes.int8_linear_reference(x, *given)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def numbers(lines: torch.Tensor) -> torch.Tensor:
    """The integers [T, K] whose planes [2 * T, K] these are."""
    high, low = lines.to(torch.int32).unflatten(0, (-1, 2)).unbind(1)
    return 256 * high + low


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_reference() -> None:
    """Fault: planes mixed up, a part lost, tails of a tile, a gate with another's up."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_reference() -> None:
    """The same on the GPU, at the shapes of real models."""
    with torch.inference_mode():
        run_grid()


def test_planes_hold_rows() -> None:
    """Fault: a byte that overflows, halves that lean to one side, zeros divided by zero."""
    edge = torch.tensor(
        [[1.0, -1.0, 0.5, -0.5, 1 / 256, 0.0], [0.0] * 6, [-3e38, 1, 0, 0, 0, 3e38]]
    )
    found, units = planes.planes_reference(edge)
    assert found.view(3, 2, 6)[0].tolist() == [
        [127, -127, 64, -63, 0, 0],
        [0, 0, -128, -128, 127, 0],
    ]
    assert units[1] == 0
    assert not found.view(3, 2, 6)[1].any()
    torch.testing.assert_close(numbers(found) * units[:, None], edge, rtol=1e-6, atol=1e33)
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, units = planes.planes_reference(x)
    off = numbers(found) * units[:, None] - x.float()
    assert (off.abs() <= 0.501 * units[:, None]).all()
    assert numbers(found).max() == module.LARGEST


@pytest.mark.parametrize("largest", [1.0, 100.0, 1e4])
def test_error_is_far_below_a_rounding(largest: float) -> None:
    """Fault: a row whose one huge channel leaves the others no bits.

    The bound: units are LARGEST times finer than the largest number, and the roundings of K numbers
    add up as their root. With a channel that is nearly all of the row that is 6e-4 of an output,
    a third of bfloat16's own step.
    """
    case = Case((256, 4096), torch.float32)
    x = torch.randn(32, 4096, generator=torch.Generator().manual_seed(1))
    x[:, 11] = largest
    x = x.bfloat16().float()
    x, weight, scales = x.to(DEVICE), case.weight, case.scales
    exact = F.linear(x.double(), weight.double()) * scales
    found = planes.int8_linear_reference(x, weight, scales).double()
    off = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert off.max() < (1e-4 if largest < 10 else 8e-4)


def test_sums_do_not_overflow() -> None:
    """Fault: sums in 32 bits of the largest rows and weights that are let in."""
    most = module.MOST_INPUTS
    assert most * 127 * 128 < 2**31 <= (most + 1) * 127 * 128
    assert most > 128 * 1024, "no layer has so many inputs"


@pytest.mark.parametrize("name", WIDE)
def test_compiles_for_hopper(name: str) -> None:
    """Fault: weights that are converted, registers that spill, small copies."""
    for rows in module.ROWS:
        check(compile_plan(WIDE[name], rows, gated=name in ("groups", "one program")))


@pytest.mark.parametrize(("shape", "gates"), REAL)
def test_plans_of_real_layers_compile(shape: tuple[int, int], gates: bool) -> None:
    """Fault: a plan that does not fit into a multiprocessor's shared memory."""
    for rows in (module.ROWS[0], planes.ROOM_ROWS, module.ROWS[-1]):
        check(compile_plan(planes.config(*shape, gates, rows), rows, gates))


def test_an_h200_has_room_for_all_stages() -> None:
    """Fault: fewer tiles on their way than were measured."""
    for (shape, gates), rows in itertools.product(REAL, module.ROWS):
        plan = planes.config(*shape, gates, rows)
        assert plan.stages_in(SHARED[90], 2 * rows, 1) == plan.stages, plan


@pytest.mark.parametrize("capability", [80, 89, 120])
def test_plans_fit_on_other_gpus(capability: int) -> None:
    """Fault: as many tiles on their way as an H200 has room for, where there is less."""
    rows = module.ROWS[-1]
    for shape, gates in (REAL[0], REAL[2], REAL[5]):
        compiled = compile_plan(planes.config(*shape, gates, rows), rows, gates, capability)
        assert compiled.metadata.shared <= SHARED[capability], shape


def test_plans_leave_no_program_without_inputs() -> None:
    """Fault: more splits than steps, whose programs would ask for memory behind the weight."""
    for ((outputs, inputs), gates), rows in itertools.product(REAL, module.ROWS):
        plan = planes.config(outputs, inputs, gates, rows)
        steps = -(-inputs // (plan.groups * plan.depth))
        assert (plan.splits - 1) * -(-steps // plan.splits) < steps, (outputs, inputs, plan)
        assert plan.groups in (1, plan.warps), "groups are all warps or none"


def test_a_layer_has_one_number_of_counters() -> None:
    """Fault: a plan for more rows that counts in other places than the one for few."""
    for (outputs, inputs), gates in REAL:
        found = {
            module.counted(planes.config(outputs, inputs, gates, rows), outputs)
            for rows in module.ROWS
        }
        assert len(found - {0}) <= 1, (outputs, inputs, found)


def test_planes_compile_for_hopper() -> None:
    """Fault: a kernel that only the interpreter takes."""
    types = {"x_ptr": "*bf16", "planes_ptr": "*i8", "unit_ptr": "*fp32"}
    types |= {"delta_ptr": "*bf16", "norm_ptr": "*bf16", "total_ptr": "*bf16", "eps": "fp32"}
    types |= {"x_stride": "i32", "delta_stride": "i32", "inner": "i32"}
    constants = {"NORM": True, "ADD": True, "LARGEST": module.LARGEST, "BLOCK": 16384}
    compiles(module._quantize_planes_kernel, types, constants, 16)


def check(compiled: Any) -> None:
    """It multiplies bytes, copies 16 of them at a time, and fits."""
    assert compiled.metadata.shared <= 227 * 1024
    assert ".s32.s8.s8" in compiled.asm["ptx"], "bytes are converted"
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "weights are not fetched ahead"
    assert ".local" not in compiled.asm["ptx"]


def compile_plan(plan: Plan, rows: int, gated: bool, capability: int = 90) -> Any:
    """The kernel as `run` would compile it."""
    kernel = module._planes_linear_kernel
    types = {n: "*i8" for n in kernel.arg_names if n.endswith("_ptr")}
    types |= {"unit_ptr": "*fp32", "scale_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= {"part_ptr": "*i32", "count_ptr": "*i32"}
    types |= dict.fromkeys(("num_rows", "size", "inner", "ahead"), "i32")
    constants: dict[str, Any] = {
        "GATED": gated,
        "BIASED": not gated,
        "EVEN": True,
        "SPLITS": plan.splits,
        "GROUPS": plan.groups,
        "ROWS": rows,
        "OUTPUTS": plan.outputs,
        "DEPTH": plan.depth,
    }
    aligned = [n for n in types if n.endswith("_ptr")] + ["size", "inner"]
    stages = plan.stages_in(SHARED[capability], 2 * rows, 1)
    return compiles(kernel, types, constants, plan.warps, stages, aligned, capability)


if __name__ == "__main__":
    with torch.inference_mode():
        run_grid()
