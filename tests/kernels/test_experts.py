"""The ways to compute routed experts agree, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from eyas.kernels import experts as module
from eyas.kernels.experts import experts_grouped, experts_reference
from eyas.kernels.terms import summed
from tests.engine.guard import no_host_reads
from tests.kernels.running import on_gpu

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SHAPES = [(16, 4, 64, 48), (8, 2, 576, 1536), (64, 8, 256, 128), (6, 6, 96, 32), (5, 1, 32, 64)]
"""(experts, chosen, hidden, intermediate)."""


def inputs(rows: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Rows, choices, weights and experts; outputs are of order one."""
    num_experts, top_k, hidden, intermediate = shape
    generator = torch.Generator().manual_seed(rows)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    ids = torch.rand(rows, num_experts, generator=generator).topk(top_k).indices
    gate_up = normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5
    down = normal(num_experts, hidden, intermediate) * intermediate**-0.5
    weights = torch.rand(rows, top_k, generator=generator)
    return normal(rows, hidden).to(dtype), ids, weights, gate_up.to(dtype), down.to(dtype)


def plainly(inputs: Inputs) -> torch.Tensor:
    """The definition, in float64, pair by pair."""
    x, ids, weights, gate_up, down = inputs
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weights[t, k].double() * (down[expert].double() @ (F.silu(gate) * up))
    return out


def experts(*given: torch.Tensor) -> torch.Tensor:
    """The way that suits device and type, its terms summed."""
    return summed(module.experts(*given))


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "experts": experts,
    "reference": experts_reference,
    "grouped": experts_grouped,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_definition(
    way: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Fault: gate and up exchanged, a pair given to another row's expert or weight."""
    for rows in (1, 3, 40):
        given = inputs(rows, shape, dtype)
        ours, expected = WAYS[way](*given), plainly(given)
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert torch.allclose(ours.double(), expected, atol=tolerance, rtol=tolerance), rows


def test_the_reference_gathers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a part's edge loses or repeats pairs."""
    given = inputs(13, SHAPES[0], torch.float32)
    whole = experts_reference(*given)
    one_expert = 3 * 64 * 48 * 4
    for size in (1, one_expert, 5 * one_expert):
        monkeypatch.setattr(module, "GATHERED_BYTES", size)
        assert torch.allclose(experts_reference(*given), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_alone_is_the_row_in_company(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Fault: verify arithmetic that depends on the number of rows (v#54506).

    However many rows share a row's experts, and wherever it stands, its bits stay.
    """
    x, ids, weights, *stacked = inputs(131, shape, dtype)

    def part(start: int, count: int) -> torch.Tensor:
        rows = slice(start, start + count)
        return experts(x[rows].clone(), ids[rows].clone(), weights[rows].clone(), *stacked)

    single = torch.cat([part(i, 1) for i in range(131)])
    for count in (2, 3, 4, 5, 8, 17, 64, 128):
        for start in (0, 3):
            assert torch.equal(part(start, count), single[start : start + count]), (count, start)


def test_float32_products_on_a_cpu_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rows of an expert in one product, whose sums some processors order by its size."""
    shapes, mm = set(), torch.mm

    def watched(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        shapes.add(a.shape[0])
        return mm(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    experts(*inputs(64, SHAPES[4], torch.float32))
    assert shapes == {module.ROW_TILE}


def test_rows_of_zeros_are_zeros_and_disturb_nobody() -> None:
    """Fault: padding rows wake experts, or get another row's result."""
    x, ids, weights, *stacked = inputs(9, SHAPES[0], torch.float32)
    alone = experts(x, ids, weights, *stacked)
    x[[0, 4, 8]] = 0
    mixed = experts(x, ids, weights, *stacked)
    kept = torch.tensor([1, 2, 3, 5, 6, 7])
    assert torch.equal(mixed[kept], alone[kept])
    assert not mixed[[0, 4, 8]].any()
    assert not experts(torch.zeros_like(x), ids, weights, *stacked).any()


def test_a_row_that_is_not_finite_stays_by_itself() -> None:
    """Fault: one request that overflows spoils others through a shared tile."""
    x, ids, weights, *stacked = inputs(9, SHAPES[0], torch.float32)
    alone = experts(x, ids, weights, *stacked)
    x[4] = torch.nan
    mixed = experts(x, ids, weights, *stacked)
    kept = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert torch.equal(mixed[kept], alone[kept])
    assert mixed[4].isnan().all()


@pytest.mark.parametrize("way", [experts, experts_reference], ids=["experts", "reference"])
def test_nothing_is_read_on_the_host(way: Callable[..., torch.Tensor]) -> None:
    """Fault: rows counted on the host stall a GPU's cycle."""
    given = inputs(5, SHAPES[0], torch.float32)
    with no_host_reads():
        assert way(*given).shape == (5, 64)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Fault: a library product that reads groups on the host, or takes them otherwise.

    Captured in a graph and replayed with other rows and choices.
    """
    for rows in (1, 5, 40):
        given = tuple(x.cuda() for x in inputs(rows, shape, dtype))
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            experts(*given)
        warm.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(*given)
        other = inputs(rows, shape, dtype)
        other[0].neg_()
        for kept, new in zip(given[:3], (other[0], other[1].flip(0), other[2]), strict=True):
            kept.copy_(new)
        graph.replay()
        expected = plainly(tuple(x.cpu() for x in given))  # type: ignore[arg-type]
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        assert torch.allclose(out.cpu().double(), expected, atol=tolerance, rtol=tolerance), rows
