"""Networks with random weights, one shape at a time, and the engines over them.

Parts that ask for the same engine share it; what a shape holds is freed when another is asked for.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from time import perf_counter

import torch

from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.engine import LLM, Engine
from eyas.model_config import ModelConfig

SPECS = {
    "decode": SpeculationConfig(algorithm="NONE"),
    "K=3": SpeculationConfig.chain(3),
    "K=3 16-bit": SpeculationConfig.chain(3),
    "K=7": SpeculationConfig.chain(7),
    "tree 5-4-16": SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
    "tree 6-8-60": SpeculationConfig(num_steps=6, eagle_topk=8, num_draft_tokens=60),
}
"""Runs by name."""
CHANGES: dict[str, dict[str, int | str | bool]] = {"K=3 16-bit": {"draft_weights": "full"}}
"""Settings of engines for runs that need some."""
PREFILL = 8192
"""Rows of prompts a step."""


@dataclass(slots=True)
class Builds:
    """What has been built."""

    device: str = "cuda"
    build_seconds: float = 0.0
    """Of the latest networks."""
    _shape: tuple[str, bool] | None = None
    _llm: LLM | None = None
    _engines: dict[tuple[SpeculationConfig, EngineConfig], Engine] = field(default_factory=dict)

    def llm(self, shape: str, fixed: bool = False) -> LLM:
        """The networks of `shape`: the name of a config in the package, or a folder.

        `fixed`: built so that no row depends on others.
        """
        if self._llm is None or self._shape != (shape, fixed):
            self.free()
            start = perf_counter()
            rows = "on" if fixed else "auto"
            few = {"disable_cuda_graph": True, "context_length": 64, "chunked_prefill_size": 64}
            self._llm = LLM(
                model_of(shape),
                speculation=SPECS["K=3"],
                config=self.config(1, deterministic=rows, **few),
            )
            self._shape, self.build_seconds = (shape, fixed), perf_counter() - start
        return self._llm

    def target(self, shape: str) -> ModelConfig:
        """Its config."""
        return self.llm(shape).target_config

    def config(self, requests: int, **changes: int | str | bool) -> EngineConfig:
        """An engine for so many requests."""
        values: dict[str, int | str | bool] = {
            "device": self.device,
            "load_format": "dummy",
            "max_running_requests": requests,
            "context_length": 2048,
            "chunked_prefill_size": PREFILL,
        }
        return EngineConfig.from_dict(values | changes)

    def engine(self, shape: str, spec: SpeculationConfig, config: EngineConfig) -> Engine:
        """An engine that runs `spec`; captured now if nobody asked for it before."""
        llm = self.llm(shape, config.deterministic == "on")
        key = (spec, config)
        if key not in self._engines:
            release()
            self._engines[key] = llm.sibling(spec, config).engine
        return self._engines[key]

    def drop_engines(self) -> None:
        """Give back all engines' pools and graphs."""
        self._engines.clear()
        release()

    def free(self) -> None:
        """Give everything back."""
        self._llm = self._shape = None
        self.drop_engines()


def model_of(shape: str) -> str:
    """What `LLM` calls a shape: one of the package's, or a folder."""
    return shape if "/" in shape else f"shape:{shape}"


def release() -> None:
    """Memory of what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
