"""What the attention kernels become on an H200: tensor cores, asynchronous copies, no spills.

Compiled here without a GPU; run as a script to see registers, spilled bytes and shared memory of
the shapes that are measured.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eyas.kernels import paged_attention as module
from eyas.kernels.attention_plan import (
    CAUSAL,
    LATENT_SPLIT,
    MASKED,
    RANKS,
    SHORT,
    Plan,
    Workspace,
    make_plan,
    most_splits,
)
from eyas.kernels.kv_write import Layout
from eyas.kernels.lang import SHARED_BYTES
from eyas.kernels.splits import attention_merge_kernel
from eyas.model_config import AttentionShape
from tests.kernels.running import HOPPER, SHARED, assert_asked_early

FOLDED_BYTES, ENDED_BYTES, TALL_BYTES = 192, 32, 64
"""Of a thread whose rows lie across, what may wait in memory: where one program folds all splits,
whose sums do not fit in registers beside those of the split at hand; where a split ends; and where
sums are latents', which take half of all registers."""
ALIGNED = ("q_stride", "k_new_stride", "v_new_stride", "rope_stride", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a model's attention on one GPU."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    window: int = 0

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_layers=1,
            num_kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            scale=1.0,
            latent=self.latent,
        )


MODELS = {
    "Llama-3.1-8B": Model(heads=32, kv_heads=8, key_dim=128, value_dim=128),
    "SmolLM2-135M": Model(heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "DeepSeek-V2-Lite": Model(heads=16, kv_heads=1, key_dim=576, value_dim=512, latent=True),
    "DeepSeek-V3": Model(heads=128, kv_heads=1, key_dim=576, value_dim=512, latent=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One compiled kernel and what it takes."""

    plan: Plan
    steps: str
    """Triton's own, in order."""
    assembly: str
    registers: int
    spilled: int
    shared: int
    products: int
    """Of tensor cores."""
    waits: int
    """For products: one behind each where the assembler finds that it can't leave them alone."""
    seconds: float


def build(
    model: Model,
    requests: int,
    num_new: int,
    tree: int = CAUSAL,
    page_size: int = 16,
    longest: int = 2**17,
    capability: int = 90,
) -> Built:
    """Compile the attention kernel for a pass in bfloat16 on an H200, or another GPU."""
    layout = Layout(shape=model.shape, page_size=page_size)
    group = model.heads // model.kv_heads
    splits = most_splits(model.shape, group)
    space = Workspace.of(model.shape, torch.bfloat16, torch.device("meta"))
    pool, shared = (layout, torch.bfloat16, group), SHARED[capability]
    plan = make_plan(*pool, requests, num_new, tree, splits, 264, space, longest, shared)
    rope_dim = model.key_dim - model.value_dim if model.latent else model.key_dim
    constants = module.constants(layout, plan, group, rope_dim, model.window)
    constants |= {"EARLY": capability >= 90, "ASKS_FIRST": plan.asks_first and capability == 90}
    kernel = module._attention_kernel
    start = time.perf_counter()
    source = ASTSource(fn=kernel, **arguments(kernel.arg_names, constants))
    early = constants["EARLY"]
    options = {"num_warps": plan.num_warps, "enable_fp_fusion": False, "launch_pdl": early}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    seconds = time.perf_counter() - start
    registers, spilled = usage(made.asm["cubin"])
    return Built(
        plan=plan,
        steps=made.asm["ttgir"],
        assembly=made.asm["ptx"],
        registers=registers,
        spilled=spilled,
        shared=made.metadata.shared,
        products=instructions(made.asm["cubin"], "HGMMA"),
        waits=instructions(made.asm["cubin"], r"WARPGROUP\.DEPBAR"),
        seconds=seconds,
    )


def arguments(names: list[str], constants: dict[str, Any]) -> dict[str, Any]:
    """Types of a launch in bfloat16, and which of its values are multiples of 16."""
    types = {"factor": "fp32", "count_ptr": "*i32"}
    types |= dict.fromkeys(("table_ptr", "prefix_ptr", "bits_ptr", "order_ptr"), "*i64")
    types |= dict.fromkeys(("cos_ptr", "sin_ptr", "stat_ptr"), "*fp32")
    latent = constants["LEAST"] == LATENT_SPLIT
    types["sum_ptr"] = "*fp16" if latent else "*fp32"

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return types.get(name, "*bf16" if name.endswith("_ptr") else "i32")

    aligned = [i for i, n in enumerate(names) if n.endswith("_ptr") or n in ALIGNED]
    return {
        "signature": {name: kind(name) for name in names},
        "constexprs": constants,
        "attrs": {(i,): [["tt.divisibility", 16]] for i in aligned},
    }


def machine_code(cubin: bytes) -> list[tuple[int, str]]:
    """Instructions with their addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (triton.knobs.nvidia.cuobjdump.path, "-sass", file.name)
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);", said)
    return [(int(one[1], 16), one[2]) for one in found]


def instructions(cubin: bytes, start: str) -> int:
    """How many instructions of the machine begin so."""
    return sum(re.match(start, step) is not None for _, step in machine_code(cubin))


def loops_of(cubin: bytes) -> list[list[str]]:
    """Instructions from every place that is jumped back to, up to the jump."""
    code = machine_code(cubin)
    places = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, step) in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", step)
        if jump and int(jump[1], 16) < address:
            loops.append([step for _, step in code[places[int(jump[1], 16)] : i + 1]])
    return loops


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = (tool, "-res-usage", file.name)
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


CASES = {
    "decode": ("Llama-3.1-8B", 1, 1, CAUSAL),
    "prefill": ("Llama-3.1-8B", 1, 2048, CAUSAL),
    "tree": ("Llama-3.1-8B", 1, 16, RANKS),
    "many small": ("SmolLM2-135M", 128, 5, CAUSAL),
    "latent": ("DeepSeek-V2-Lite", 1, 1, CAUSAL),
    "latent verify": ("DeepSeek-V2-Lite", 1, 8, CAUSAL),
    "latents of a batch": ("DeepSeek-V2-Lite", 128, 1, CAUSAL),
    "many latent heads": ("DeepSeek-V3", 1, 4, CAUSAL),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_suits_an_h200(name: str) -> None:
    """Fault: a kernel that only the interpreter takes, that spills, or whose loads wait in turn."""
    model, requests, num_new, tree = CASES[name]
    built = build(MODELS[model], requests, num_new, tree)
    most = FOLDED_BYTES if built.plan.parts == 1 else ENDED_BYTES
    if built.plan.asks_first:
        most = TALL_BYTES
    assert built.spilled <= most * built.plan.across, f"{built.spilled} bytes spilled"
    assert built.shared <= SHARED_BYTES, f"{built.shared} bytes of shared memory"
    assert built.waits <= built.products / 2, "each product of a tensor core is waited for"
    assert "wgmma" in built.assembly, "no tensor core of this GPU's own"
    check_keys_come(built)
    assert "griddepcontrol.wait" in built.assembly, "it does not take its turn"
    turn = built.assembly.find("griddepcontrol.launch_dependents")
    if built.plan.soon:
        assert turn > built.assembly.rindex("wgmma.mma_async"), "a merge comes before the end"
    elif built.plan.parts > 1 and not built.plan.merge:
        assert turn < 0, "a merge does not wait for the end"
    else:
        assert 0 <= turn < built.assembly.index("wgmma.mma_async"), "what comes next comes late"


@pytest.mark.parametrize("capability", [80, 89, 120])
@pytest.mark.parametrize(
    ("name", "requests", "num_new", "tree"),
    [
        ("Llama-3.1-8B", 1, 16, CAUSAL),
        ("DeepSeek-V2-Lite", 1, 4, CAUSAL),
        ("DeepSeek-V2-Lite", 1, 16, RANKS),
        ("DeepSeek-V2-Lite", 128, 1, CAUSAL),
    ],
)
def test_kernel_fits_on_other_gpus(
    name: str, requests: int, num_new: int, tree: int, capability: int
) -> None:
    """Fault: blocks and tiles of an H200 on a GPU with less memory, where no pass can be run."""
    built = build(MODELS[name], requests, num_new, tree, capability=capability)
    assert built.shared <= SHARED[capability], built.plan


def check_keys_come(built: Built) -> None:
    """The next block's keys are asked for beside products of values, or ahead of their weights.

    In the former case a kernel waits for all loads but some. In the latter there are two buffers,
    and nobody reads the one that is filled: the product before it has been waited for.
    """
    steps = built.steps
    values = steps.rindex("warp_group_dot %")
    if not built.plan.asks_first:
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", built.assembly)
        assert any(int(n) for n in waits), "every load of keys is waited for at once"
        beside = steps[values : steps.index("warp_group_dot_wait", values)]
        assert "async_copy" in beside or not built.plan.across, "keys are asked for after products"
        return
    scores = steps.rindex("warp_group_dot %", 0, values)
    between = steps[scores:values]
    assert "async_copy" in between[: between.index("math.exp2")], "weights come before loads"
    assert "memdesc<2x64x512xbf16" in steps, "a block is filled while it is read"
    assert "isAsync" not in steps[values : steps.index("\n", values)], "a product goes on"


@pytest.mark.parametrize(
    ("name", "num_new"),
    [("Llama-3.1-8B", 4), ("Llama-3.1-8B", 16), ("Llama-3.1-8B", 60), ("SmolLM2-135M", 16)],
)
def test_two_programs_of_a_tree_share_a_multiprocessor(name: str, num_new: int) -> None:
    """Fault: the programs of a tree's nodes, one each, take two turns on the GPU."""
    built = build(MODELS[name], 1, num_new, RANKS, longest=SHORT)
    assert not built.spilled, f"{built.spilled} bytes spilled"
    assert 2 * (built.shared + 2**10) <= SHARED_BYTES + 2**10, f"{built.shared} bytes shared"
    threads = 32 * built.plan.num_warps
    assert 2 * threads * built.registers <= 2**16, f"{built.registers} registers"


@pytest.mark.parametrize(
    ("name", "num_new"),
    [*(("DeepSeek-V2-Lite", n) for n in (1, 4, 16)), ("Llama-3.1-8B", 1), ("Llama-3.1-8B", 16)],
)
def test_a_merge_asks_for_many_splits_at_once(name: str, num_new: int) -> None:
    """Fault: the assembler moves each load to where it serves, so that each is waited for."""
    model = MODELS[name]
    plan = build(model, 1, num_new).plan
    assert plan.abreast
    layout = Layout(shape=model.shape, page_size=16)
    given = module.constants(layout, plan, model.heads // model.kv_heads, 64, 0)
    names = attention_merge_kernel.arg_names
    chunk, rows = module.merged_by(layout, plan)
    chosen = {"CHUNK": chunk, "ROWS": rows, "COLUMNS": plan.columns, "EARLY": True}
    constants = {name: value for name, value in given.items() if name in names} | chosen
    source = ASTSource(fn=attention_merge_kernel, **arguments(names, constants))
    warps = module.merge_warps(plan, chunk * rows)
    options = {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": True}
    made = triton.compile(source, target=HOPPER, options=options)
    assert not usage(made.asm["cubin"])[1], "it spills"
    told, turn = (made.asm["ptx"].index(s) for s in ("ld.global", "griddepcontrol.wait"))
    assert (told < turn) is plan.soon, "what to do is worked out in its turn"
    loops = [steps for steps in loops_of(made.asm["cubin"]) if any("LDG" in s for s in steps)]
    assert len(loops) == 2, "whole groups of splits, and the rest"
    for steps in loops:
        loads = [i for i, step in enumerate(steps) if "LDG" in step]
        folded = next(i for i, step in enumerate(steps) if "EX2" in step)
        assert sum(i > folded for i in loads) < len(loads) / 4, "loads behind the first fold"


@pytest.mark.parametrize("name", ["decode", "latent", "latent verify"])
def test_threads_ask_for_keys_side_by_side(name: str) -> None:
    """Fault: requests whose operands a warp has once, issued thread by thread ahead of a turn."""
    model, requests, num_new, tree = CASES[name]
    built = build(MODELS[model], requests, num_new, tree)
    assert_asked_early(built.assembly)


def report() -> None:
    """Print what each shape takes, pass by pass."""
    for name, model in MODELS.items():
        passes = [(1, 1, CAUSAL), (1, 8, CAUSAL), (1, 16, CAUSAL), (64, 1, CAUSAL), (64, 8, CAUSAL)]
        for requests, num_new, tree in (
            *passes,
            (1, 16, RANKS),
            (1, 16, MASKED),
            (1, 2048, CAUSAL),
        ):
            built = build(model, requests, num_new, tree)
            plan = built.plan
            print(  # noqa: T201
                f"{name:17} batch {requests:3} N {num_new:4} tree {tree} tile {plan.tile:2} "
                f"block {plan.block:3} parts {plan.parts:3} warps {plan.num_warps} "
                f"stages {plan.num_stages}: {built.registers} registers, {built.spilled} spilled, "
                f"{built.shared} shared, {built.seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    report()
