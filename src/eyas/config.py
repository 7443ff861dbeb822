"""Frozen settings of an engine, its speculation and a request.

The command line derives its flags from the fields here and its help from each field's `doc`.
Nothing here reads a file, an environment variable or a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from eyas.errors import ConfigError, RequestError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DRAFT_WEIGHTS = ("auto", "full", "int8")
FEEDBACK = ("auto", "pre", "post")
OVERLAP = ("auto", "on", "off")
LOAD_FORMATS = ("auto", "dummy")
ALGORITHMS = ("EAGLE3", "STANDALONE", "NGRAM", "NONE")
ATTENTION_MODES = ("decode", "prefill")
DETERMINISTIC = ("auto", "on", "off")
MAX_NODES = 64
"""Nodes of a request in one pass: the bits of an `int64` ancestor mask."""
SPARE_POSITIONS = 4 * MAX_NODES
"""Positions past a model's last that rotary tables hold: a cycle that is under way while its
request ends drafts there, and what it drafts is dropped."""


def option(default: Any, doc: str) -> Any:
    """A dataclass field with a default and the sentence that becomes its `--help`."""
    return dataclasses.field(default=default, metadata={"doc": doc})


def require(condition: bool, value: str, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `condition` holds."""
    if not condition:
        raise ConfigError(value, rule, remedy)


def require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of those `known`."""
    require(value in known, f"{name} {value!r}", "must be known", f"use one of {', '.join(known)}")


class Strict:
    """Mix-in: build from a mapping, refusing keys that are not fields."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from `values`; raises `ConfigError` for an unknown key."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            require(
                key in known,
                f"unknown key {key!r} for {cls.__name__}",
                "only declared fields are read",
                f"use one of {', '.join(known)}",
            )
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Strict):
    """What is drafted in a cycle; names and meanings are SGLang's."""

    algorithm: str = option("EAGLE3", "EAGLE3, STANDALONE, NGRAM or NONE")
    num_steps: int = option(4, "depth of the draft tree")
    eagle_topk: int = option(1, "children tried per node; 1 is a chain")
    num_draft_tokens: int = option(
        5, "nodes verified per cycle, root included; steps + 1 in a chain"
    )
    attention_mode: str = option(
        "decode", "verify attends as decode does, or as prefill: one program walks all of the keys"
    )
    shared_noise: bool = option(True, "drafter samples with the target's noise; off: plain top-k")

    def __post_init__(self) -> None:
        require_known("speculative attention_mode", self.attention_mode, ATTENTION_MODES)
        require_known("speculative algorithm", self.algorithm, ALGORITHMS)
        if self.algorithm == "NONE":
            return
        for name in ("num_steps", "eagle_topk"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")
        if self.eagle_topk == 1:
            require(
                self.num_draft_tokens == self.num_steps + 1,
                f"num_draft_tokens={self.num_draft_tokens} with num_steps={self.num_steps}",
                "a chain verifies its steps and the root",
                f"give num_draft_tokens={self.num_steps + 1}",
            )
        pool = self.eagle_topk + (self.num_steps - 1) * self.eagle_topk**2
        require(
            2 <= self.num_draft_tokens <= min(MAX_NODES, pool + 1),
            f"num_draft_tokens={self.num_draft_tokens}",
            f"must lie in 2..{min(MAX_NODES, pool + 1)} for {self.num_steps} steps of top "
            f"{self.eagle_topk} (an ancestor mask has {MAX_NODES} bits)",
            "give fewer draft tokens or more steps",
        )
        require(
            (self.num_steps - 1) * self.eagle_topk <= MAX_NODES,
            f"num_steps={self.num_steps}, eagle_topk={self.eagle_topk}",
            f"drafting keeps (steps - 1) * topk <= {MAX_NODES} nodes",
            "give fewer steps or a smaller topk",
        )
        require(
            self.scratch <= MAX_NODES,
            f"num_steps={self.num_steps}, eagle_topk={self.eagle_topk} with {self.algorithm}",
            f"a cycle writes {self.scratch} positions ahead, at most {MAX_NODES} are kept",
            "give fewer steps or a smaller topk",
        )
        require(
            self.algorithm != "NGRAM" or self.eagle_topk == 1,
            f"eagle_topk={self.eagle_topk} with NGRAM",
            "n-gram lookup drafts a chain",
            "give eagle_topk=1",
        )

    @property
    def num_nodes(self) -> int:
        """N: nodes per request in one verify pass, root included."""
        return 1 if self.algorithm == "NONE" else self.num_draft_tokens

    @property
    def depth(self) -> int:
        """Most tokens a cycle can accept, bonus excluded."""
        return 0 if self.algorithm == "NONE" else min(self.num_steps, self.num_draft_tokens - 1)

    @property
    def scratch(self) -> int:
        """KV positions past the committed ones that a cycle may write."""
        if self.algorithm == "NONE":
            return 1
        # a language model drafts behind the root's own entry
        ahead = self.algorithm == "STANDALONE"
        drafting = (self.num_steps - 1) * self.eagle_topk
        return max(self.num_draft_tokens, drafting + ahead, self.depth + 1 + ahead)

    @classmethod
    def chain(cls, drafts: int, algorithm: str = "EAGLE3", **rest: Any) -> SpeculationConfig:
        """A chain of `drafts` tokens."""
        return cls(algorithm=algorithm, num_steps=drafts, num_draft_tokens=drafts + 1, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(Strict):
    """How an EAGLE-3 checkpoint is read where its own word is ambiguous or wrong."""

    aux_layers: tuple[int, ...] = option((), "target layers whose inputs it reads, one by one")
    feedback: str = option("auto", "state fed back: pre or post its last norm, or auto")
    rope_theta: float = option(0.0, "base of its rotary embedding; 0 takes the checkpoint's")

    def __post_init__(self) -> None:
        require_known("feedback", self.feedback, FEEDBACK)
        require(
            self.rope_theta >= 0,
            f"rope_theta={self.rope_theta}",
            "must not be negative",
            "give 0 for the checkpoint's own",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Strict):
    """How an engine runs: where, in which type, with how much memory."""

    device: str = option("auto", "cpu, cuda or auto")
    dtype: str = option("auto", "auto, bfloat16, float16 or float32")
    tp: int = option(1, "tensor-parallel ranks: processes, and GPUs, that share the target")
    max_running_requests: int = option(8, "requests decoded together")
    context_length: int = option(0, "longest request in tokens; 0 takes the model's")
    page_size: int = option(16, "KV positions per page")
    num_pages: int = option(0, "pages in the pool; 0: enough for every request, or what fits")
    memory_limit: float = option(0.0, "GiB that one rank may take; 0: what its device has free")
    chunked_prefill_size: int = option(512, "rows of prompts prefilled per step")
    seed: int = option(0, "seed of requests that bring none")
    disable_cuda_graph: bool = option(False, "run cycles without CUDA graphs")
    cuda_graph_max_bs: int = option(0, "most requests of a captured cycle; 0: all that may run")
    overlap: str = option("auto", "read results one cycle late: on, off, or auto (on a GPU)")
    deterministic: str = option(
        "auto", "rows depend on no other rows: on, auto (as the library has it), off (nor in trees)"
    )
    tokenizer: str = option("", "checkpoint whose tokenizer the model shares; none: its own")
    load_format: str = option("auto", "auto reads weights; dummy draws random ones, for timing")
    simulate_accept_length: float = option(0.0, "mean accept length by decree, for timing; 0: real")
    simulate_acceptance: tuple[float, ...] = option((), "the same, a rate for each draft position")
    draft_weights: str = option("auto", "weights of draft passes: full, int8, or auto")

    def __post_init__(self) -> None:
        require_known("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        require_known("load_format", self.load_format, LOAD_FORMATS)
        require(
            all(0 <= rate <= 1 for rate in self.simulate_acceptance),
            f"simulate_acceptance={self.simulate_acceptance}",
            "a rate lies in 0 .. 1",
            "give shares such as 0.7",
        )
        require(
            not (self.simulate_accept_length and self.simulate_acceptance),
            "simulate_accept_length and simulate_acceptance",
            "one of them says all",
            "give one",
        )
        require_known("overlap", self.overlap, OVERLAP)
        require_known("deterministic", self.deterministic, DETERMINISTIC)
        require_known("dtype", self.dtype, DTYPES)
        for name in ("tp", "max_running_requests", "page_size", "chunked_prefill_size"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}", "must be at least 1", f"give {name} >= 1")
        for name in ("context_length", "num_pages", "memory_limit", "cuda_graph_max_bs"):
            value = getattr(self, name)
            fine = 0 <= value < float("inf")
            require(fine, f"{name}={value}", "must not be negative", "give 0 for automatic")

    @property
    def simulated(self) -> str:
        """What of a run's output is made up; empty where nothing is."""
        parts = ["random weights"] if self.load_format == "dummy" else []
        if self.simulate_accept_length or self.simulate_acceptance:
            parts.append("acceptance by decree")
        return ", ".join(parts)


def require_request(condition: bool, value: str, rule: str, remedy: str) -> None:
    """Raise `RequestError` unless `condition` holds."""
    if not condition:
        raise RequestError(value, rule, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Strict):
    """How one request's tokens are drawn and where they end.

    The order of filters is temperature, top-k, top-p, min-p (as in SGLang and vLLM).
    """

    temperature: float = option(0.0, "0 is greedy")
    top_k: int = option(0, "keep the k likeliest tokens; 0 keeps all")
    top_p: float = option(1.0, "keep the likeliest tokens up to this mass; 1 keeps all")
    min_p: float = option(0.0, "drop tokens below this share of the likeliest; 0 keeps all")
    seed: int | None = option(None, "seed of this request's noise; none takes the engine's")
    max_tokens: int = option(128, "most tokens to write")
    stop: tuple[str, ...] = option((), "strings that end the answer and are not shown")
    stop_token_ids: tuple[int, ...] = option((), "tokens that end the answer")
    ignore_eos: bool = option(False, "go on past the end-of-sequence token")

    def __post_init__(self) -> None:
        require_request(
            0.0 <= self.temperature < float("inf"),
            f"temperature={self.temperature}",
            "must be finite and not negative",
            "give 0 for greedy or a value such as 0.7",
        )
        require_request(
            self.max_tokens >= 1,
            f"max_tokens={self.max_tokens}",
            "must be at least 1",
            "give the number of tokens to write",
        )
        require_request(
            self.top_k >= 0, f"top_k={self.top_k}", "must not be negative", "give 0 to keep all"
        )
        require_request(
            0.0 < self.top_p <= 1.0, f"top_p={self.top_p}", "must lie in (0, 1]", "give 1 for all"
        )
        require_request(
            0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}", "must lie in [0, 1]", "give 0 for all"
        )
        require_request(
            all(self.stop), f"stop={self.stop!r}", "a stop string must not be empty", "drop it"
        )
        require_request(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed={self.seed}",
            "must lie in 0 .. 2**63 - 1",
            "give another seed",
        )

    @property
    def filtered(self) -> bool:
        """Whether any filter can drop a token."""
        sampled = self.temperature > 0
        return sampled and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
