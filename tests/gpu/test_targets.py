"""Every kind of grouped-query target on a GPU: the text of plain decoding, and windows by flash."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eyas.attention.dense import DenseCausal, Documents
from eyas.model_config import AttentionShape
from tests.engine.test_targets import DRAFTED, JOBS, TARGETS
from tests.helpers import alone, make_engine, outputs, run_all, tiny_drafter, tiny_target

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("name", TARGETS)
def test_speculation_writes_the_plain_text(name: str) -> None:
    """Fault: experts or windows of a verify pass that differ from decode's."""
    target = tiny_target(device=DEVICE, **TARGETS[name])
    expected = alone(target, JOBS)
    for drafted in ("chain", "tree"):
        drafter = tiny_drafter(device=DEVICE)
        engine = make_engine(target, drafter, DRAFTED[drafted], max_running_requests=5)
        assert outputs(run_all(engine, JOBS)) == expected, drafted


def test_windows_by_flash_attention() -> None:
    """Fault: a window off by one in the library's terms."""
    shape = dataclasses.replace(AttentionShape.heads(2, 2, 64), windows=(0, 70))
    generator = torch.Generator().manual_seed(0)
    sizes = ((200, 4, 64), (200, 2, 64), (200, 2, 64))
    q, k, v = (torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16) for s in sizes)
    for layer in (0, 1):
        flash, loop = (
            DenseCausal(Documents.of((150, 50), DEVICE, backend), shape)(layer, q, k, v)
            for backend in ("flash", "loop")
        )
        torch.testing.assert_close(flash, loop, atol=2e-2, rtol=2e-2)
