"""What the parts of a cycle must take at least: counted operations on a machine's rates.

Counts are `eyas.cost`'s, for the engine's own configs, precisions, batch and mean context; experts
are those that were counted, where they were. A machine is a profile, or the two rates that a floor
needs, measured here. Operations that an engine joins to others' launches are counted with their
component all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from eyas.cost import cycle_ops, plain_step, touched
from eyas.engine.engine import LLM
from eyas.estimate import EYAS, joined
from eyas.hardware import HardwareProfile, load_profile
from eyas.model_config import DrafterConfig, ModelConfig, MoEConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.operations import SAMPLING, Op, Work
from eyas.report.components import ACCEPT, DECODE, DRAFT, EXTEND, VERIFY
from eyas.setting import Precision, Setting
from eyas.speculate.eagle3 import Eagle3Drafter, is_few

GPUS = (("H200", "h200"), ("H100", "h100"), ("B200", "b200"))
"""What a device's name holds, and its profile."""
TENSOR, MATRIX, ROUNDS = 1 << 25, 1024, 5


class Machine(Protocol):
    """Rates that a floor follows from."""

    @property
    def name(self) -> str:
        """What it is called."""

    def floor_us(self, num_bytes: float, flops: float, rows: float = 4096) -> float:
        """See `HardwareProfile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A machine by two rates."""

    name: str
    read_gb_s: float
    tflops: float

    def floor_us(self, num_bytes: float, flops: float, rows: float = 4096) -> float:
        """The least time for so much memory traffic and arithmetic."""
        return max(num_bytes / self.read_gb_s / 1e3, flops / self.tflops / 1e6)


def machine_of(profile: str, device: torch.device, dtype: torch.dtype) -> Machine:
    """The profile of that name; without one the preset of this GPU, or two rates measured now."""
    if profile:
        return load_profile(profile)
    if device.type == "cuda":
        name = torch.cuda.get_device_properties(device).name
        preset = next((p for word, p in GPUS if word in name), None)
        if preset is not None:
            return load_profile(preset)
    return measured(device, dtype)


def measured(device: torch.device, dtype: torch.dtype) -> Rates:
    """Read bandwidth and large matmuls of this machine, the best of a few."""
    large = torch.zeros(TENSOR, dtype=torch.float32, device=device)
    square = torch.ones(MATRIX, MATRIX, dtype=dtype, device=device)
    with torch.inference_mode():
        read = min(_seconds(large.sum, device) for _ in range(ROUNDS))
        product = min(_seconds(lambda: square @ square, device) for _ in range(ROUNDS))
    return Rates(
        name="measured here",
        read_gb_s=large.nbytes / read / 1e9,
        tflops=2 * MATRIX**3 / product / 1e12,
    )


def _seconds(call: Any, device: torch.device) -> float:
    start = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def setting_of(llm: LLM, batch: int, context: float, experts: float | None) -> Setting:
    """The setting that an engine runs cycles in."""
    parts, spec = llm.engine.runner.parts, llm.engine.speculation
    bits = 8.0 * parts.target.embed.weight.itemsize
    drafter, draft_bits, extend_bits = parts.drafter, bits, bits
    if isinstance(drafter, Eagle3Drafter) and drafter.quick is not None:
        device_type = llm.engine.runner.device.type
        draft_bits = 8.0 if is_few(batch * spec.eagle_topk, device_type) else bits
        extend_bits = 8.0 if is_few(batch * (spec.num_steps + 1), device_type) else bits
    moe, overlap = llm.target_config.moe, 0.0
    if moe is not None and experts is not None:
        overlap = overlap_of(moe, batch, spec.num_nodes, experts)
    return Setting(
        ranks=parts.target.group.size,
        batch=batch,
        context=round(context),
        precision=Precision(
            weight_bits=bits,
            kv_bits=8.0 * parts.pool.k.itemsize,
            draft_bits=draft_bits,
            extend_bits=extend_bits,
        ),
        expert_overlap=overlap,
    )


def overlap_of(moe: MoEConfig, batch: int, nodes: int, found: float) -> float:
    """The overlap with which `touched_in_pass` gives the `found` distinct experts."""
    most = touched(moe, nodes) - moe.top_k
    if most <= 0:
        return 0.0
    share = min(found / moe.num_experts, 1.0)
    each = moe.num_experts * (1 - (1 - share) ** (1 / batch))
    return min(1.0, max(0.0, 1 - (each - moe.top_k) / most))


def drafter_config(llm: LLM) -> DrafterConfig | ModelConfig | None:
    """The config of the network that drafts, if one does."""
    network = llm.drafter
    used = llm.engine.speculation.algorithm in ("EAGLE3", "STANDALONE")
    return network.config if used and isinstance(network, Eagle3 | Decoder) else None


def counted(llm: LLM, setting: Setting, machine: Machine, plain: bool) -> dict[str, Any]:
    """Bytes, FLOPs, launches and floors by stage and component: a cycle's, or a plain step's.

    Of collectives the bytes of their messages, and no floor.
    """
    if plain:
        target, stages = plain_step(llm.target_config, setting), dict[str, Sequence[Op]]()
    else:
        spec = llm.engine.speculation
        ops = cycle_ops(llm.target_config, drafter_config(llm), spec, setting)
        target = [*ops.verify]
        stages = {DRAFT: ops.draft, EXTEND: ops.extend}
    stages[DECODE if plain else VERIFY] = [op for op in target if op.component != SAMPLING]
    stages[ACCEPT] = [op for op in target if op.component == SAMPLING]
    return {name: _by_component(found, machine) for name, found in stages.items() if found}


def _by_component(ops: Iterable[Op], machine: Machine) -> dict[str, dict[str, float]]:
    found: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: {"gb": 0.0, "gflop": 0.0, "floor_ms": 0.0, "launches": 0.0}
    )
    for op in ops:
        if op.work is Work.FIXED:
            continue
        one = found[op.component]
        one["gb"] += (op.bytes or op.message) * op.times / 1e9
        one["gflop"] += op.flops * op.times / 1e9
        part_of_other = isinstance(machine, HardwareProfile) and joined(op, machine, EYAS)
        one["launches"] += 0 if part_of_other else op.launches * op.times
        if op.work not in (Work.REDUCE, Work.GATHER) and not part_of_other:
            one["floor_ms"] += machine.floor_us(op.bytes, op.flops) * op.times / 1e3
    return dict(found)
