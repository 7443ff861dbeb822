"""Fetching rows by one index; through Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from eyas.kernels import rows as module
from tests.kernels.running import DEVICE, compiles, interpret, on_gpu


def tensors(count: int) -> tuple[torch.Tensor, ...]:
    """Eight of different types and widths, one of them empty."""
    made = (
        torch.arange(count),
        torch.randn(count),
        torch.randint(0, 99, (count, 3)),
        torch.randn(count, 1500).bfloat16(),
        torch.randn(count, 2, 5),
        torch.randn(count, 0),
        torch.randn(count, 64).half(),
        torch.randint(0, 2**60, (count, 40)),
    )
    return tuple(t.to(DEVICE) for t in made)


def run_grid() -> None:
    """Any number of tensors, repeated indices, steps."""
    every, index = tensors(12), torch.tensor([7, 0, 0, 11], device=DEVICE)
    for count in (1, 3, 8):
        found = module.take_rows_triton(index, *every[:count])
        wanted = module.take_rows_reference(index, *every[:count])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    index = torch.tensor([[2, 0], [9, 0], [4, 0]], device=DEVICE)[:, 0]
    for part, tensor in zip(module.take_rows_triton(index, *every), every, strict=True):
        assert torch.equal(part, tensor[[2, 9, 4]])
    table, tokens = every[3], torch.tensor([[7, 0, 0], [11, 3, 7]], device=DEVICE)
    with torch.inference_mode():
        assert torch.equal(module.embedded(tokens, table), table[tokens])
    for width in (1, 24, 1500):
        x, out = torch.randn(5, width + 1, device=DEVICE), torch.zeros(5, 4000, device=DEVICE)
        module.put_columns_triton(x[:, 1:], out[:, 7 : 7 + width])
        assert torch.equal(out[:, 7 : 7 + width], x[:, 1:])
        assert not out[:, :7].any(), "another's columns"
        assert not out[:, 7 + width :].any(), "another's columns"
    counts = torch.tensor([1, 3, 2, 3], device=DEVICE)
    stepped = module.take_rows_triton(counts, *every, step=3, offset=-1)
    for part, tensor in zip(stepped, every, strict=True):
        assert torch.equal(part, tensor[[0, 5, 7, 11]])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernel itself")
def test_interpreted_kernel_equals_reference() -> None:
    """Fault: widths mixed up, the last block of a row lost, another step."""
    interpret(__file__)


@on_gpu
def test_kernel_equals_reference() -> None:
    """The same on the GPU."""
    run_grid()


def test_steps_and_offsets() -> None:
    """Fault: the last committed row of another request."""
    table = torch.arange(12)
    (last,) = module.take_rows(torch.tensor([1, 3, 2]), table, step=4, offset=-1)
    assert last.tolist() == [0, 6, 9]


def test_compiles_for_hopper() -> None:
    """Fault: a kernel that only the interpreter takes."""
    names = [f"{side}{i}" for side in "st" for i in range(8)]
    types = dict.fromkeys(names, "*bf16") | {"index_ptr": "*i64"}
    types |= dict.fromkeys(("index_stride", "step", "offset"), "i32")
    widths = {f"W{i}": width for i, width in enumerate((4096, 1, 1, 0, 0, 0, 0, 0))}
    compiles(module._slot_rows_kernel, types, widths | {"BLOCK": module.BLOCK})
    types = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("x_stride", "out_stride", "width"), "i32")
    compiles(module._state_columns_kernel, types, {"BLOCK": module.BLOCK})


if __name__ == "__main__":
    run_grid()
