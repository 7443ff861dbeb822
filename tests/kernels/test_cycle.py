"""Whole cycles through the kernels write what they write through the references."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.drafters import Network
from tests.helpers import (
    CPU,
    LATENT,
    VOCAB,
    Job,
    make_engine,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_model,
    tiny_target,
)
from tests.kernels.running import DEVICE, on_gpu
from tests.processes import environment

LAYERS = 3
TARGETS: dict[str, dict[str, Any]] = {
    "grouped": {"num_layers": LAYERS},
    "latent": {"num_layers": LAYERS, "mla": LATENT, "moe": tiny_experts(LAYERS)},
    "normed": {"num_layers": LAYERS, "qk_norm": True},
}
SHAPES = {
    "none": SpeculationConfig(algorithm="NONE"),
    "chain": SpeculationConfig.chain(3),
    "tree": SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=6),
    "small model": SpeculationConfig(
        algorithm="STANDALONE", num_steps=2, eagle_topk=2, num_draft_tokens=4
    ),
}
RUNS = [("grouped", name) for name in SHAPES] + [("latent", "chain"), ("normed", "chain")]
TOKENS = 5


def write(device: torch.device = CPU) -> dict[str, list[list[int]]]:
    """What two requests, greedy and sampled, say in every run."""
    said = {}
    for target, name in RUNS:
        shape = SHAPES[name]
        drafter: Network = tiny_drafter(device=device)
        if shape.algorithm == "STANDALONE":
            drafter = tiny_model(device=device, vocab_size=VOCAB + 32)
        engine = make_engine(tiny_target(device=device, **TARGETS[target]), drafter, shape)
        prompts = [(5, 6, 7, 8), (9, 3, 9, 3, 9)]
        kinds = [SamplingParams(max_tokens=TOKENS, ignore_eos=True)]
        kinds.append(SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, seed=2))
        jobs = [Job(prompt=p, params=k) for p, k in zip(prompts, kinds, strict=True)]
        said[f"{target} {name}"] = [list(request.output) for request in run_all(engine, jobs)]
    return said


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_cycles_write_the_same_text() -> None:
    """Fault: kernels that agree with their references one by one but are put together wrongly."""
    command = [sys.executable, str(Path(__file__))]
    interpreted = environment(TRITON_INTERPRET="1")
    done = subprocess.run(command, env=interpreted, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == write()


@on_gpu
def test_cycles_on_a_gpu_write_the_same_text() -> None:
    """Fault: the same, of the kernels as a GPU runs them, in float32 and in graphs."""
    assert write(torch.device("cuda")) == write()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(write()))
