"""Tiny networks run on one thread in every rank: more would only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[None]:
    """One thread here, and so in every rank that is started from here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
