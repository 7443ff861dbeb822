"""The experts' kernels equal the reference; through Triton's interpreter without a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from eyas.kernels import experts_triton as module
from eyas.kernels.experts import experts, experts_reference
from eyas.kernels.experts_triton import PAIRS_PER_EXPERT, Shared
from eyas.kernels.terms import summed
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu
from tests.kernels.test_experts import Inputs, inputs

SMALL = [(16, 4, 32, 40), (5, 2, 160, 24)]
REAL = [(64, 6, 2048, 1408), (128, 8, 2048, 768), (8, 2, 576, 1536), (16, 4, 32, 40)]
SHAPES = SMALL if DEVICE == "cpu" else REAL
KINDS = (torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16)
"""The interpreter does not multiply bfloat16."""


def on_device(rows: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """`inputs` where the kernels run."""
    x, ids, weights, gate_up, down = (t.to(DEVICE) for t in inputs(rows, shape, dtype))
    return x, ids, weights, gate_up, down


def part(given: Inputs, rows: slice) -> Inputs:
    """Some rows of `given`."""
    x, ids, weights, gate_up, down = given
    return x[rows], ids[rows], weights[rows], gate_up, down


def run(*given: torch.Tensor, shared: Shared | None = None) -> torch.Tensor:
    """The kernels' terms, summed."""
    return summed(module.experts_triton(*given, shared=shared))


def run_grid() -> None:
    """Every shape, rows from one to many, with and without a shared part; rows alone; skew."""
    for number, shape in enumerate(SHAPES):
        dtype = KINDS[number % 2]
        for rows in (1, 3, 20):
            given = on_device(rows, shape, dtype)
            found = run(*given)
            near(found, experts_reference(*given))
            for r in {0, rows - 1}:
                alone = run(*part(given, slice(r, r + 1)))
                assert torch.equal(alone[0], found[r]), f"row {r} of {rows} depends on others"
        check_shared(given, 2 * shape[3])
    x, ids, weights, gate_up, down = on_device(20, SHAPES[0], torch.float32)
    ids = ids[:1].expand(20, -1)
    skewed = (x, ids, weights, gate_up, down)
    near(run(*skewed), experts_reference(*skewed))


def check_shared(given: Inputs, size: int) -> None:
    """The same with an expert that all rows go through, of another size than the routed ones."""
    x, generator = given[0], torch.Generator().manual_seed(size)
    gate_up = torch.randn(2 * size, x.shape[1], generator=generator) * x.shape[1] ** -0.5
    down = torch.randn(x.shape[1], size, generator=generator) * size**-0.5
    shared = Shared(*(t.to(x.device, x.dtype) for t in (gate_up, down)))
    found = run(*given, shared=shared)
    near(found, experts_reference(*given) + module.shared_reference(x, shared))
    alone = run(*part(given, slice(0, 1)), shared=shared)
    assert torch.equal(alone[0], found[0]), "a row depends on others"
    check_fixed(given, shared)


def check_fixed(given: Inputs, shared: Shared) -> None:
    """Where the way is fixed, rows that are too many for the kernels have the bits of few."""
    x, ids, weights, gate_up, down = given
    times = 1 + PAIRS_PER_EXPERT * gate_up.shape[0] // ids.numel()
    many = (x.repeat(times, 1), ids.repeat(times, 1), weights.repeat(times, 1), gate_up, down)
    assert not module.suits(many[0], many[1], gate_up), "these are few rows"
    library = patch.object(module, "shared_reference", side_effect=AssertionError)
    with torch.inference_mode(), library:
        found = summed(experts(*many, shared=shared, fixed_rows=8))
        few = summed(experts(*given, shared=shared, fixed_rows=8))
    assert torch.equal(found, few.repeat(times, 1)), "rows depend on how many there are"


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Outputs are of order one; in 16 bits three roundings lie between them."""
    assert found.dtype == wanted.dtype
    tolerance = 3e-5 if found.dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_reference() -> None:
    """Fault: an expert's second tile, a pair at the wrong place, depth past the row's end."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_reference() -> None:
    """The same on the GPU, at the shapes of real models."""
    run_grid()


@on_gpu
def test_kernels_never_wait_for_the_host() -> None:
    """Fault: a count read back, which a captured graph can't hold."""
    given = on_device(4, SHAPES[0], torch.bfloat16)
    run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*given)
    given[1].copy_(on_device(9, SHAPES[0], torch.bfloat16)[1][5:])
    graph.replay()
    near(out, experts_reference(*given))


@pytest.mark.parametrize("single", [True, False])
def test_compiles_for_hopper(single: bool) -> None:
    """Fault: kernels that only the interpreter takes."""
    lists = {"ids_ptr": "*i64", "members_ptr": "*i32", "counts_ptr": "*i32"}
    constants: dict[str, Any] = {"SINGLE": single, "BY_PAIR": True, "EVEN": True, "SHARED": single}
    constants |= {"PAIRS": module.PAIRS, "OUTPUTS": module.OUTPUTS, "DEPTH": module.DEPTH}
    for kernel in (module._expert_gate_up_kernel, module._expert_down_kernel):
        names = [name for name in kernel.arg_names if name.islower()]
        types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
        compiles(kernel, types | lists, constants)


def test_lists_compile_for_hopper() -> None:
    """Fault: kernels that only the interpreter takes."""
    lists = {"ids_ptr": "*i64", "members_ptr": "*i32", "counts_ptr": "*i32"}
    integers = dict.fromkeys(("num_pairs", "num_rows"), "i32")
    compiles(module._expert_list_kernel, lists | integers, {"BLOCK": module.LIST_BLOCK})


if __name__ == "__main__":
    run_grid()
