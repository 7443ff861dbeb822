"""Cycle and prefill read nothing on the host, with every drafter; and the guard sees reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine import runner
from tests.engine.guard import HostReadError, no_host_reads
from tests.helpers import (
    LATENT,
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_model,
    tiny_target,
)

X: Any = torch.arange(6.0).view(2, 3)
MASK = X > 2

READS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "bool": lambda: bool(X.sum() > 1),
    "if": lambda: 1 if MASK.any() else 0,
    "not": lambda: not MASK.all(),
    "int": lambda: int(X.sum()),
    "float": lambda: float(X.sum()),
    "index": lambda: range(5)[X.long()[0, 1]],
    "range": lambda: list(range(X.long()[0, 2])),
    "size from a value": lambda: torch.zeros(X.long()[1, 0]),
    "slice by a value": lambda: X[: X.long()[0, 1]],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "np.asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "to another device": lambda: X.to("cuda"),
    "nonzero": lambda: X.nonzero(),
    "where of one": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(X),
    "mask read": lambda: X[MASK],
    "mask write": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "repeat by a tensor": lambda: X[0].repeat_interleave(X[1].long()),
    "bincount": lambda: torch.bincount(X.long()[0]),
    "tensor of a list": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "in": lambda: 3.0 in X,
    "print": lambda: str(X),
    "format": lambda: f"{X.sum():.2f}",
    "max of a list": lambda: max(X[0, 0], X[0, 1]),
}


@pytest.mark.parametrize("name", READS)
def test_the_guard_sees(name: str) -> None:
    """Fault: a guard that guards nothing. Each kind of read is caught."""
    with pytest.raises(HostReadError), no_host_reads():
        READS[name]()


def test_the_guard_lets_device_work_pass() -> None:
    """A guard that fails on everything would prove nothing."""
    with no_host_reads():
        y = torch.where(MASK, X, 0.0) + torch.arange(3) + torch.zeros(2, 1)
        y = y.masked_fill(MASK, 1.0).gather(1, X.long().clamp(max=2)).to(torch.bfloat16)
        y[torch.arange(2)] = torch.zeros(3, dtype=torch.bfloat16)
        assert y.shape == (2, 3)
        assert not y.is_cuda


PARAMS = {
    "greedy": SamplingParams(max_tokens=10),
    "sampled": SamplingParams(max_tokens=10, temperature=1.0, seed=1),
    "filtered": SamplingParams(
        max_tokens=10, temperature=0.7, seed=2, top_k=20, top_p=0.9, min_p=0.01
    ),
}
SHAPES: dict[str, SpeculationConfig] = {
    "none": NONE,
    "ngram": chain(4, "NGRAM"),
    "chain 1": chain(1),
    "chain 4": chain(4),
    "chain, plain top-k": chain(4, shared_noise=False),
    "tree": TREES[1],
    "standalone chain": chain(4, "STANDALONE"),
    "standalone tree": dataclasses.replace(TREES[1], algorithm="STANDALONE"),
    "latent tree": TREES[1],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_read_nothing_on_the_host(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: hidden host sync in the cycle (s#10226, v PR#29957).

    Greedy, sampled, filtered and mixed batches; prompts in chunks, at page size 1.
    """
    calls = {"cycle": 0, "prefill": 0}

    def guarded(name: str) -> Callable[..., torch.Tensor]:
        original = getattr(runner, name)

        def run(*args: Any) -> torch.Tensor:
            calls[name] += 1
            with no_host_reads():
                out: torch.Tensor = original(*args)
            return out

        return run

    for name in calls:
        monkeypatch.setattr(runner, name, guarded(name))
    target, network = tiny_target(dtype), tiny_drafter(dtype)
    if shape == "latent tree":
        target = tiny_target(dtype, mla=LATENT, moe=tiny_experts())
        network = tiny_drafter(dtype, mla=LATENT)
    drafter = tiny_model(dtype) if shape.startswith("standalone") else network
    prompts = random_prompts([12, 3, 20])
    for batch in (["greedy"], ["sampled"], ["filtered"], list(PARAMS)):
        jobs = [
            Job(prompt=p, params=PARAMS[name], join=i)
            for i, (p, name) in enumerate(zip(prompts, batch, strict=False))
        ]
        config: dict[str, Any] = {"page_size": 1, "chunked_prefill_size": 9}
        run_all(make_engine(target, drafter, SHAPES[shape], **config), jobs)
    assert min(calls.values()) > 3
