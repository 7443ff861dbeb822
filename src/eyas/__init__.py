"""eyas: an LLM inference engine for EAGLE-3 speculative decoding."""

from eyas.config import DrafterOptions, EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM, RequestOutput
from eyas.errors import EyasError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "DrafterOptions",
    "EngineConfig",
    "EyasError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationConfig",
]
