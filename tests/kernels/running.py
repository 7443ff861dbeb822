"""How kernels are tested: natively on a GPU, else through Triton's interpreter and compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.processes import environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = GPUTarget("cuda", 90, 32)
SHARED = {80: 163 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10, 120: 99 * 2**10}
"""What a program may take of shared memory, by compute capability (CUDA's programming guide)."""

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """A unit in the last place of 16 bits; three where the interpreter truncates to them."""
    assert found.dtype == wanted.dtype
    rtol = 2e-6 if found.dtype == torch.float32 else 1.6e-2 if DEVICE == "cuda" else 5e-2
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


def interpret(file: str, *arguments: str) -> None:
    """Run a test file as a script in a process whose Triton interprets."""
    command = [sys.executable, file, *arguments]
    subprocess.run(command, env=environment(TRITON_INTERPRET="1"), check=True)


def compiles(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: Sequence[str] = (),
    capability: int = 90,
) -> Any:
    """Compile `kernel` for an H200, or another GPU: argument types by name, constants by name.

    One that takes turns is compiled to be launched early where that is known. `aligned` arguments
    are multiples of 16.
    """
    early = "EARLY" in kernel.arg_names and capability >= 90
    constants = constants | {"EARLY": early} if "EARLY" in kernel.arg_names else constants
    signature = {
        name: types.get(name, "constexpr") for name in kernel.arg_names if name in types | constants
    }
    sixteen = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=sixteen)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": early}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert not early or "griddepcontrol.wait" in compiled.asm["ptx"], "it does not take its turn"
    return compiled


def assert_asked_early(assembly: str, turns: int = 1) -> None:
    """Something is asked into the L2 cache ahead of the kernel's turn, by threads side by side.

    Of several turns, of programs of other kinds, it is the last.
    """
    asked, wait = assembly.find("prefetch.global.L2"), "griddepcontrol.wait"
    assert assembly.count(wait) == turns
    assert 0 < asked < assembly.rindex(wait), "nothing is asked for early"
    assert assembly.count(wait, 0, asked) == turns - 1, "another kind of program asks"
    assert "cp.async.bulk" not in assembly, "threads ask in turn"
