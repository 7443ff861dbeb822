"""Floors are counts on rates, in the setting that the engine runs in."""

from __future__ import annotations

import pytest
import torch

from eyas.cost import touched, touched_in_pass
from eyas.report.explaining.floors import (
    Rates,
    counted,
    drafter_config,
    machine_of,
    overlap_of,
    setting_of,
)
from tests.helpers import CPU, NONE, chain, tiny_drafter, tiny_experts, tiny_target
from tests.report.explaining.running import tiny_llm

SLOW = Rates(name="slow", read_gb_s=1.0, tflops=1000.0)


def test_a_floor_is_bytes_over_bandwidth() -> None:
    """Faults: bits of another type; draws counted for verify; a norm's floor forgotten."""
    llm = tiny_llm(tiny_target(), tiny_drafter(), chain(3))
    setting = setting_of(llm, 1, 20.0, None)
    assert setting.precision.weight_bits == setting.precision.kv_bits == 32
    assert setting.precision.draft_bits == 32, "float32 networks draft as they are"
    found = counted(llm, setting, SLOW, plain=False)
    assert set(found) == {"draft", "verify", "accept", "extend"}
    weights = sum(p.numel() * 4 for b in llm.target.blocks for p in b.parameters() if p.dim() == 2)
    dense = found["verify"]["dense linear"]
    assert dense["gb"] * 1e9 > weights
    assert dense["floor_ms"] == pytest.approx(dense["gb"] * 1e3, rel=1e-6)
    assert set(found["accept"]) == {"sampling/acceptance"}
    plain = counted(llm, setting, SLOW, plain=True)
    assert set(plain) == {"decode", "accept"}
    assert plain["decode"]["dense linear"]["gb"] < dense["gb"]


def test_the_network_that_drafts() -> None:
    """Fault: a drafter counted that plain decoding or n-gram lookup does not run."""
    target, drafter = tiny_target(), tiny_drafter()
    assert drafter_config(tiny_llm(target, drafter, chain(3))) is drafter.config
    assert drafter_config(tiny_llm(target, drafter, chain(3, "NGRAM"))) is None
    assert drafter_config(tiny_llm(target, drafter, NONE)) is None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_the_overlap_that_explains_counted_experts(batch: int, overlap: float) -> None:
    """Fault: floors of experts that nobody touched."""
    moe = tiny_experts()
    found = touched_in_pass(moe, batch, 4, overlap)
    assert overlap_of(moe, batch, 4, found) == pytest.approx(overlap, abs=1e-9)
    assert overlap_of(moe, 1, 1, touched(moe, 1)) == 0.0


def test_the_machine() -> None:
    """Fault: a preset of some GPU for a CPU."""
    assert machine_of("h100", CPU, torch.float32).name.lower().startswith("h100")
    here = machine_of("", CPU, torch.float32)
    assert here.name == "measured here"
    assert here.floor_us(1e9, 0.0) > 100
