"""What a bench measures; light to import, since the command line derives its flags from it."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.config import Strict, option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(Strict):
    """What a bench measures."""

    prompts: str = option("", "JSON Lines file of prompts; without it the built-in ones")
    num_prompts: int = option(0, "prompts taken from the start; 0 takes all")
    rounds: int = option(2, "times every prompt is answered by each side")
    batch_size: int = option(1, "prompts answered together")
    stage_prompts: int = option(2, "groups of prompts answered once more to measure stages")
    compare_noise: bool = option(False, "at temperature > 0: also measure drafts without noise")
    raw: bool = option(False, "send prompts as they are, without chat template")

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 0), ("rounds", 1), ("batch_size", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name}={value}", f"must be at least {least}", "raise it")
        value = self.stage_prompts
        require(value >= 1, f"stage_prompts={value}", "must be at least 1", "raise it")
