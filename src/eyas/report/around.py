"""What a step takes around its networks: the engine's own work, measured on a network next to none.

A tiny model's step is its bookkeeping and a few short kernels; what the kernels should take is
estimated from the parts measured before, and taken off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.cost import cycle_ops, plain_step
from eyas.engine.engine import LLM
from eyas.engine.graphs import GraphKey
from eyas.engine.request import Status
from eyas.estimate import estimate
from eyas.hardware import HardwareProfile
from eyas.models.dummy import dummy_drafter_config
from eyas.report.timing import Timer
from eyas.setting import Setting

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
CONTEXT, PROMPT, STEPS = 512, 32, 20
DRAFTS = (1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Microseconds outside of networks; see the fields of `HardwareProfile`."""

    decode_us: float
    cycle_us: float
    step_us: float
    host_us: float


def around(profile: HardwareProfile, device: torch.device, dtype: str, timer: Timer) -> Around:
    """Measured on the engine of `device`; `profile` holds the parts, and zeros for these."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        plain = SpeculationConfig(algorithm="NONE")
        config = EngineConfig(
            device=str(device),
            dtype=dtype,
            load_format="dummy",
            max_running_requests=1,
            context_length=CONTEXT,
        )
        first = LLM(folder, speculation=SpeculationConfig.chain(DRAFTS[1]), config=config)
        engines = [first.sibling(spec, config) for spec in (plain, SpeculationConfig.chain(1))]
        steps = [_step_us(llm, timer) for llm in (*engines, first)]
    (decode, host), (short, _), (long, _) = steps
    target = first.target_config
    setting = Setting(context=0 if device.type == "cuda" else CONTEXT // 2)
    drafter = dummy_drafter_config(target)
    networks = [estimate(plain_step(target, setting), profile).us]
    for drafts in DRAFTS:
        parts = cycle_ops(target, drafter, SpeculationConfig.chain(drafts), setting)
        networks.append(estimate([*parts.draft, *parts.verify, *parts.extend], profile).us)
    rest = [us - network for us, network in zip((decode, short, long), networks, strict=True)]
    return Around(
        decode_us=max(0.0, rest[0]),
        cycle_us=max(0.0, rest[1]),
        step_us=max(0.0, (rest[2] - rest[1]) / (DRAFTS[1] - DRAFTS[0])),
        host_us=host,
    )


def _step_us(llm: LLM, timer: Timer) -> tuple[float, float]:
    """(device time, host time) of a steady step; on a CPU all of it is the device's."""
    engine = llm.engine
    prompt = list(range(PROMPT))
    params = SamplingParams(max_tokens=CONTEXT - PROMPT, ignore_eos=True)
    request: Any = engine.add(prompt, params)
    while request.status is not Status.RUNNING or not request.output:
        engine.step()
    times: list[float] = []
    end = perf_counter() + 3 * timer.seconds
    while request.status is Status.RUNNING and (len(times) < STEPS or perf_counter() < end):
        start = perf_counter()
        engine.step()
        times.append((perf_counter() - start) * 1e6)
    engine.abort(request)
    engine.step()
    timer.wait()
    wall = sorted(times)[len(times) // 2]
    if timer.device.type != "cuda":
        return wall, 0.0
    graph = engine.runner.graphs.get(GraphKey(1, False, False))
    with torch.inference_mode():  # the dummy slot's row starts anew at every replay
        graph.slots.fill_(engine.runner.parts.state.dummy_slot)
    return timer.replay_us(graph.graph), wall
