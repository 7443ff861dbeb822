"""eyas: an LLM inference engine for EAGLE-3 speculative decoding."""

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM, RequestOutput
from eyas.errors import EyasError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EngineConfig",
    "EyasError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationConfig",
]
