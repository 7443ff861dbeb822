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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig(Strict):
    """What is taken apart, and how much of it."""

    prompts: str = option("", "JSON Lines file of prompts; without it the built-in ones")
    num_prompts: int = option(4, "prompts taken from the start; 0 takes all")
    batch_size: int = option(1, "prompts answered together")
    by_batch: tuple[int, ...] = option((), "more batch sizes that rates are measured for")
    cycles: int = option(48, "cycles that are watched, and as many that are not")
    profile: str = option("", "machine floors are of: a preset, or a file; none: this one")
    lesson: bool = option(False, "show what a host clock that does not wait would have said")
    raw: bool = option(False, "send prompts as they are, without chat template")

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 0), ("batch_size", 1), ("cycles", 4)):
            value = getattr(self, name)
            require(value >= least, f"{name}={value}", f"must be at least {least}", "raise it")
        require(
            all(size >= 1 for size in self.by_batch),
            f"by_batch={self.by_batch}",
            "a batch has a request at least",
            "give such as 4",
        )

    @property
    def most_requests(self) -> int:
        """Requests that run together at most."""
        return max(self.batch_size, *self.by_batch, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(Strict):
    """What is planned: where, over how many ranks, for which requests, in which precision."""

    profile: str = option("h200-eyas", "machine: a preset, or a file of eyas calibrate")
    engine: str = option("eyas", "whose host and kernels: eyas, sglang or vllm")
    tp: int = option(1, "tensor-parallel ranks")
    batch_size: int = option(1, "requests decoded together")
    context: int = option(2048, "committed positions of a request")
    nodes: int = option(0, "rows a request has in a verify pass, as a chain; 0: by --speculative-*")
    accept_length: float = option(0.0, "tokens a cycle commits; 0: by --acceptance")
    acceptance: tuple[float, ...] = option(
        (), "how often a draft is accepted where those before it were, one for each position"
    )
    all_reduce: str = option("best", "kind of all-reduce; best takes the fastest for each size")
    weight_bits: float = option(16.0, "bits of a weight, scales included")
    expert_bits: float = option(0.0, "bits of a routed expert's weight; 0: as other weights")
    kv_bits: float = option(16.0, "bits of a kept key or value")
    draft_bits: float = option(0.0, "bits of a drafter's weight; 0: as the engine drafts")
    expert_overlap: float = option(0.0, "0: a request's nodes choose experts apart; 1: the same")
    sharded_drafter: bool = option(False, "the drafter is tensor-parallel too")
    starting_case: bool = option(False, "instead: what 29 ms of verify without NVLink need")
    markdown: str = option("", "file for the starting case's page")

    def __post_init__(self) -> None:
        for name in ("tp", "batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")
        for name in ("context", "nodes"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}", "must not be negative", f"give {name} >= 0")
        require(
            all(0 <= rate <= 1 for rate in self.acceptance),
            f"acceptance={self.acceptance}",
            "a rate lies in 0 .. 1",
            "give shares such as 0.7",
        )
        require(
            self.accept_length == 0 or self.accept_length >= 1,
            f"accept_length={self.accept_length}",
            "a cycle commits one token at least",
            "give 1 or more",
        )
        require(
            not (self.accept_length and self.acceptance),
            "accept_length and acceptance",
            "one of them says all",
            "give one",
        )
        require(
            self.engine in ("eyas", "sglang", "vllm"),
            f"engine {self.engine!r}",
            "is none whose cycle was taken apart",
            "use eyas, sglang or vllm",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig(Strict):
    """What is measured of a machine."""

    device: str = option("auto", "cpu, cuda or auto")
    dtype: str = option("auto", "auto, bfloat16, float16 or float32")
    tp: int = option(1, "ranks that collectives are measured among")
    name: str = option("", "name of the profile; empty: the device's")
    seconds: float = option(0.2, "time that each figure may take, about")

    def __post_init__(self) -> None:
        require(self.tp >= 1, f"tp={self.tp}", "must be at least 1", "give tp >= 1")
        require(
            0 < self.seconds <= 60,
            f"seconds={self.seconds}",
            "must lie in (0, 60]",
            "give such as 0.3",
        )
