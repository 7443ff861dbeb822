"""How many bytes a run really holds, measured apart from the way they are predicted.

What was there before the run are the storages of all tensors that Python knows. What comes and goes
in it is what torch's CPU allocator reports to the profiler, inside operators too. Memory that numpy
gives a pool is not the allocator's; it is among the tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.batch import PassShape, StepPlan
from eyas.engine.budget import Case
from eyas.engine.engine import Engine
from eyas.model_config import MLAConfig
from tests.helpers import tiny_experts

WIDE_LATENT = MLAConfig(
    q_lora_rank=96, kv_lora_rank=128, nope_dim=32, rope_dim=32, value_dim=32, scale=64**-0.5
)
LLAMA: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "max_position": 1024,
}
"""Of 10 million parameters, with a head of its own: 40 MB in float32."""
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "num_layers": 5,
    "num_kv_heads": 8,
    "mla": WIDE_LATENT,
    "moe": tiny_experts(5),
}


def held_storages() -> dict[int, int]:
    """Address -> bytes of every storage of a CPU tensor that is alive."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def peak_of(run: Callable[[], object]) -> int:
    """Most bytes of the CPU allocator that were alive at once in `run`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    live = peak = 0
    for _, size in sorted(sizes, key=lambda one: one[0]):
        live += size
        peak = max(peak, live)
    return peak


def case_of(engine: Engine, drafter: Any = None) -> Case:
    """What a running engine would have been asked to load."""
    target = engine.runner.parts.target
    return Case(
        target=target.config,
        drafter=None if drafter is None else drafter.config,
        config=engine.config,
        speculation=engine.speculation,
        device=engine.runner.device,
        dtype=target.embed.weight.dtype,
    )


def shapes_of(engine: Engine) -> tuple[list[PassShape], list[PassShape]]:
    """Lists that take in the shapes of every pass the engine will run."""
    prefills: list[PassShape] = []
    cycles: list[PassShape] = []
    launch = engine.runner.launch

    def noted(plan: StepPlan) -> Any:
        prefills.extend([plan.prefill_shape] if plan.prefill_shape else [])
        cycles.extend([plan.cycle_shape] if plan.cycle_shape else [])
        return launch(plan)

    engine.runner.launch = noted  # type: ignore[method-assign]
    return prefills, cycles
