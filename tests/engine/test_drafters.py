"""Which networks draft with 8-bit weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eyas.config import EngineConfig
from eyas.engine.drafters import drafts_rounded
from tests.helpers import tiny_drafter

CASES = [
    ("cpu", torch.bfloat16, 64, ("auto", "int8")),
    ("cpu", torch.float32, 64, ()),
    ("cuda", torch.bfloat16, 64, ("int8",)),
    ("cuda", torch.float16, 2048, ("auto", "int8")),
    ("cuda", torch.float32, 2048, ()),
    ("cuda", torch.bfloat16, 2056, ()),
]
"""(device, dtype, hidden size, settings under which it rounds); small ones gain nothing on a GPU"""


@pytest.mark.parametrize(("device", "dtype", "hidden", "rounding"), CASES, ids=str)
def test_who_drafts_with_rounded_weights(
    device: str, dtype: torch.dtype, hidden: int, rounding: tuple[str, ...]
) -> None:
    """Fault: 8 bits where there is no kernel for them, where they gain nothing, or when off."""
    config = tiny_drafter(own_embedding=True).config
    config = dataclasses.replace(
        config, hidden_size=hidden, target_hidden_size=hidden, intermediate_size=8 * hidden
    )
    for setting in ("auto", "int8", "full"):
        engine = EngineConfig(device=device, draft_weights=setting)
        found = drafts_rounded(engine, config, torch.device(device), dtype)
        assert found == (setting in rounding), setting


def test_a_borrowed_head_gains_nothing() -> None:
    """Fault: a small drafter copied to 8 bits for the sake of a head that is the target's."""
    config = dataclasses.replace(
        tiny_drafter().config, vocab_size=1_000_000, draft_vocab_size=1_000_000
    )
    for own in (True, False):
        drafter = dataclasses.replace(config, own_head=own)
        gpu = torch.device("cuda")
        assert drafts_rounded(EngineConfig(), drafter, gpu, torch.bfloat16) is own
