"""The router's kernel equals its reference, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from eyas.kernels import router as module
from eyas.kernels.experts_triton import Lists
from eyas.kernels.lang import INTERPRETED, block_of, tl
from eyas.kernels.route import constants, route_reference
from eyas.kernels.skinny import Counters
from eyas.model_config import MoEConfig
from tests.kernels.running import DEVICE, assert_asked_early, compiles, interpret, on_gpu
from tests.kernels.test_route import CASES

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
KINDS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
]
"""Of rows and weights."""
ON_GPU = DEVICE == "cuda"
HIDDEN = {"qwen": 2048, "v2-lite": 2048, "v2": 5120, "v3": 7168, "kimi": 7168}
"""Of the real models; the interpreter has rows of 200 and 328 numbers."""
COUNTS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 256, 257, 300) if ON_GPU else (1, 3, 17)
MOST = 300 if ON_GPU else 33
EDGE = module.MOST_ROWS if ON_GPU else 32
"""In the interpreter so many rows are many."""


def inputs(config: MoEConfig, count: int, hidden: int, kinds: tuple[torch.dtype, ...]) -> Inputs:
    """Rows and a router whose logits are of order one."""
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(count, hidden, generator=generator)
    weight = torch.randn(config.num_experts, hidden, generator=generator) * hidden**-0.5
    bias = torch.randn(config.num_experts, generator=generator) * 0.1
    given = bias.to(DEVICE) if config.correction_bias else None
    return x.to(DEVICE, kinds[0]), weight.to(DEVICE, kinds[1]), given


def check(config: MoEConfig, hidden: int, kinds: tuple[torch.dtype, ...]) -> None:
    """Rows in any company have the bits they have alone, and those are near the reference's."""
    config = replace(config, float32_router=kinds[1] == torch.float32)
    x, weight, bias = inputs(config, MOST, hidden, kinds)
    counters = Counters()
    logits = rounded((x.double() @ weight.double().T).float(), weight.dtype)
    wanted = route_reference(logits, config, bias)
    every = module.router(x, weight, config, bias, counters)
    same = (logits.gather(1, every.ids) == logits.gather(1, wanted[0])).all(1)
    assert same.float().mean() > 0.9, f"{same}: near ties alone may fall otherwise"
    rtol = 1e-4 if weight.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(every.weights[same], wanted[1][same], rtol=rtol, atol=rtol / 10)
    for count in COUNTS:
        for start in {0, min(3, MOST - count)} if ON_GPU else {3}:
            rows = slice(start, start + count)
            ids, weights, lists = module.router(x[rows], weight, config, bias, counters)
            assert torch.equal(ids, every.ids[rows]), (count, start)
            assert torch.equal(weights, every.weights[rows]), (count, start)
            if lists is not None:
                check_lists(lists, ids)
    assert not counters.zeros(module.MOST_ROWS // module.ROWS, x.device).any()


def rounded(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 logits rounded to `dtype`; the interpreter cuts off what bfloat16 does not hold."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (logits.view(torch.int32) & -65536).view(torch.float32)
    return logits.to(dtype).float()


def check_lists(lists: Lists, ids: torch.Tensor) -> None:
    """Every expert's pairs, ascending."""
    flat = ids.flatten().cpu()
    for expert, (members, count) in enumerate(zip(lists.members.cpu(), lists.counts, strict=True)):
        pairs = (flat == expert).nonzero().flatten().tolist()
        assert members[: int(count)].tolist() == pairs, expert


def exact_terms() -> None:
    """bfloat16 weights have the same bits where float32 keeps them."""
    config = MoEConfig(intermediate_size=8, float32_router=True, **CASES["v2-lite"])
    for hidden in (200, 328):
        x, weight, _ = inputs(config, 5, hidden, KINDS[1])
        short = module.router(x, weight, config, None, Counters())
        wide = module.router(x, weight.float(), config, None, Counters())
        assert torch.equal(short.ids, wide.ids)
        assert torch.equal(short.weights, wide.weights)
        wanted = module.router_reference(x, weight, config)
        torch.testing.assert_close(short.weights, wanted.weights)


def run_grid() -> None:
    """Every family's router, of every kind of numbers."""
    if INTERPRETED:
        module.MOST_ROWS = EDGE
        multiply_bfloat16()
    for number, (case, settings) in enumerate(CASES.items()):
        config = MoEConfig(intermediate_size=8, **settings)
        for kinds in KINDS if ON_GPU else KINDS[number % 4 :][:1]:
            check(config, HIDDEN[case] if ON_GPU else (200, 328)[number % 2], kinds)
    exact_terms()


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as integers, and multiplies those."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = (self.cast_impl(t, tl.float32) for t in (a, b))
        return dot(self, a, b, *rest)

    builder.create_dot = create_dot


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: a chunk left out, padded experts or rows counted, lists out of order."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU, at the shapes of real models."""
    run_grid()


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("case", ["v2-lite", "v3"])
def test_compiles_for_hopper(case: str, rows: int) -> None:
    """Faults: a kernel that only the interpreter takes; weights that wait for their turn."""
    config = MoEConfig(intermediate_size=8, **CASES[case])
    plan = module.plan_of(rows, config.num_experts, HIDDEN[case], narrow=True)
    names = [name for name in module._router_kernel.arg_names if name.islower()]
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names}
    types |= {"x_ptr": "*bf16", "ids_ptr": "*i64", "factor": "fp32"}
    types |= dict.fromkeys(("arrived_ptr", "members_ptr", "counts_ptr"), "*i32")
    compiled = compiles(
        module._router_kernel,
        types,
        constants(config, config.correction_bias)
        | {"ROUNDED": False, "CHUNKS": plan.chunks, "CHUNK": plan.chunk, "EVEN": True}
        | {"ROWS": plan.rows, "OUTPUTS": plan.outputs, "DEPTH": module.DEPTH}
        | {"CHOICES": min(block_of(rows), 4), "PAIRS": 32 if rows == 4 else 0},
        plan.warps,
    )
    assert "mma.sync" in compiled.asm["ptx"], "wider tiles go by the same instruction"
    assert "wgmma" not in compiled.asm["ptx"], "tiles of rows of another instruction differ"
    if plan.chunks > 1:
        assert_asked_early(compiled.asm["ptx"])


if __name__ == "__main__":
    run_grid()
