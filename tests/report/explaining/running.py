"""Tiny networks behind the facade that `explain` takes, and runs of it."""

from __future__ import annotations

from typing import Any

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.drafters import Network
from eyas.engine.engine import LLM
from eyas.engine.ranks import Ranks
from eyas.models.decoder import Decoder
from eyas.report.explain import explain
from eyas.report.options import ExplainConfig
from tests.distributed.worlds import ranked_engine
from tests.helpers import NONE, make_engine

TEXT = "abcdeedcbaabcde"


def tiny_llm(
    target: Decoder,
    drafter: Network | None = None,
    speculation: SpeculationConfig = NONE,
    ranks: Ranks | None = None,
    **config: Any,
) -> LLM:
    """An `LLM` over networks that are there already."""
    values = {"max_running_requests": 4, "context_length": 256, **config}
    llm: Any = object.__new__(LLM)
    llm.engine = (
        ranked_engine(ranks, speculation, **values)
        if ranks
        else make_engine(target, drafter, speculation, **values)
    )
    llm.tokenizer, llm.target, llm.drafter = llm.engine.tokenizer, target, drafter
    llm.target_config, llm.ranks, llm.case, llm.facts = target.config, ranks, None, {}
    found: LLM = llm
    return found


def explained(llm: LLM, text: str = TEXT, tokens: int = 120, **config: Any) -> dict[str, Any]:
    """The record of a run over one prompt, as often as the batch is large."""
    values = {"raw": True, "cycles": 16, "profile": "h200", **config}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    texts = [text] * values.get("batch_size", 1)
    return explain(llm, texts, ExplainConfig(**values), params, progress=False)


def parts_ms(record: dict[str, Any]) -> float:
    """Everything that has a name."""
    total = sum(record["components"].values()) - record["overlap_ms"] + record["idle_ms"]
    return float(total)
