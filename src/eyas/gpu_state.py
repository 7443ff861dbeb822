"""What clock a GPU runs at while it works, and what holds it back.

A GPU that meets the limit of its power lowers its clock, so one and the same cycle may take 6 %
longer on a machine whose GPU is warmer or needs more. The driver's `nvidia-smi` tells, in a process
beside the work; where it is not, or says nothing, there is no state.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "clocks_event_reasons.active",
)
REASONS = {
    0x2: "an application's setting",
    0x4: "the limit of its power",
    0x8: "a slowdown by its hardware",
    0x20: "the limit of its temperature",
    0x40: "its hardware's limit of temperature",
    0x80: "its power supply",
}
"""Bits of NVML's clock event reasons that lower a clock (docs.nvidia.com/deploy/nvml-api)."""
PATIENCE = 10.0
"""Seconds for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """A GPU at work."""

    clock_mhz: int
    """Of its multiprocessors."""
    most_mhz: int
    """The most that this clock may be."""
    power_w: float
    celsius: int
    held_by: tuple[str, ...]
    """Why the clock is lower than it could be, if it is."""


def state_under(work: Callable[[], object], device: torch.device) -> GpuState | None:
    """The state of `device` while `work` is done over and over, once at least.

    None without a GPU or an answer.
    """
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    query = [f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(FIELDS)}"]
    return parsed(answer_beside(work, [tool, *query, "--format=csv,noheader,nounits"]))


def answer_beside(
    work: Callable[[], object], command: Sequence[str], patience: float = PATIENCE
) -> str:
    """What `command` prints while `work` is done, once at least; "" after `patience` seconds."""
    end = perf_counter() + patience
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asked:
        try:
            work()
            while asked.poll() is None:
                if perf_counter() > end:
                    return ""
                work()
            return asked.communicate()[0].decode(errors="replace")
        finally:
            asked.kill()


def parsed(answer: str) -> GpuState | None:
    """A line of `FIELDS` as a state; None if one of them is not known."""
    values = [value.strip() for value in answer.strip().split(",")]
    try:
        clock, most, power, celsius, reasons = values
        bits = int(reasons, 16)
        return GpuState(
            clock_mhz=int(clock),
            most_mhz=int(most),
            power_w=float(power),
            celsius=int(celsius),
            held_by=tuple(words for bit, words in REASONS.items() if bits & bit),
        )
    except ValueError:
        return None
