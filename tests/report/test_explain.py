"""A run taken apart: its parts add up, and every figure is there, whatever drafts.

On tiny networks watching costs a share that is not small, so how close the sum is to the unwatched
cycle is looked at with the real small model.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM
from eyas.errors import ConfigError, RequestError
from eyas.report.bench import select
from eyas.report.components import DEVICE, STAGES
from eyas.report.explain import explain
from eyas.report.explain_table import show
from eyas.report.html import page
from eyas.report.options import ExplainConfig
from tests.helpers import (
    NONE,
    TREES,
    chain,
    tiny_drafter,
    tiny_experts,
    tiny_target,
)
from tests.report.explaining.running import TEXT, explained, parts_ms, tiny_llm
from tests.report.page_checks import faults

SHAPES = {"chain": chain(3), "tree": TREES[1], "ngram": chain(3, "NGRAM"), "none": NONE}
STABLE = {
    *("cycle_ms", "device_ms", "components", "idle_ms", "classified_fraction"),
    *("unexplained_fraction", "accept_length", "verdict", "stages", "gaps", "graph_fraction"),
    *("launches", "syncs", "copies_to_host", "collectives", "flags", "provenance"),
    *("graph_reasons", "context"),
}


def llm_of(shape: str, **changes: Any) -> LLM:
    return tiny_llm(tiny_target(**changes), tiny_drafter(), SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_record_of_a_tiny_run(shape: str, batch: int) -> None:
    """Faults: parts that don't add up to what was watched; a figure that knows chains alone."""
    record = explained(llm_of(shape), batch_size=batch, lesson=shape == "chain")
    assert record["schema"] == "eyas.explain"
    assert record.keys() >= STABLE
    json.dumps(record)
    for side in filter(None, (record, record["decode"])):
        watching = side["watching"]
        assert parts_ms(side) == pytest.approx(watching["watched_ms"], rel=1e-6)
        rest = side["cycle_ms"] - parts_ms(side)
        assert side["unexplained_ms"] == pytest.approx(rest, abs=1e-9)
        assert set(side["components"]) <= set(DEVICE)
        by_stage = sum(s["device_ms"] + s["idle_ms"] for s in side["stages"].values())
        assert by_stage == pytest.approx(parts_ms(side))
        assert sum(row["ms"] for row in side["cells"]) == pytest.approx(side["device_ms"])
        assert min(watching["watched_cycles"], watching["unwatched_cycles"]) >= 16
    assert (record["decode"] is None) == (shape == "none")
    target = "decode" if shape == "none" else "verify"
    assert record["stages"][target]["components"]["dense linear"] > 0
    assert 1 <= record["accept_length"] <= SHAPES[shape].depth + 1
    assert record["by_context"][0]["cycles"] > 0
    assert all(row["batch"] <= batch for row in record["by_batch"])
    assert record["reads"] == {}
    console = Console(width=80, record=True)
    show(console, record)
    text = console.export_text()
    assert record["verdict"][:20] in text
    assert "…" not in text
    assert faults(page(record)) == []


def test_every_way_of_the_record_has_its_figure() -> None:
    """Fault: a page without the lesson, the cells or the rates by batch."""
    llm = llm_of("chain")
    record = explained(llm, lesson=True, by_batch=(2,))
    assert [row["batch"] for row in record["by_batch"]] == [1, 2]
    names = ("timeline", "components", "cells", "acceptance", "context", "batch", "lesson")
    text = page(record)
    for name in (*names, "what-if", "beside-0-components"):
        assert f'id="{name}"' in text, name
    assert set(record["lesson"]["stages"]) <= set(STAGES)
    for one in record["lesson"]["stages"].values():
        assert one["host_ms"] == pytest.approx(one["true_ms"], abs=0.05, rel=0.2)


def test_what_a_gpu_tells_besides_is_in_the_tables() -> None:
    """Fault: the dearest event node, or kernels that wait for their turn, left unsaid."""
    record = explained(llm_of("none"))
    record |= {"early_ms": 0.417}
    record["watching"] |= {"dearest": "extend", "dearest_overhead": 0.0123}
    console = Console(width=80, record=True)
    show(console, record)
    text = " ".join(console.export_text().split())
    assert "and +1.2% where extend begins" in text
    assert "kernels are launched early: 0.417 ms" in text


def test_experts_are_counted_on_the_way() -> None:
    """Fault: experts of a prompt's pass counted, or those of a row instead of a pass."""
    moe = tiny_experts()
    record = explained(llm_of("chain", moe=moe))
    found, plain = record["experts"], record["decode"]["experts"]
    assert plain["mean"] == moe.top_k, "one row chooses its own experts"
    assert moe.top_k <= found["mean"] <= min(moe.num_experts, 4 * moe.top_k)
    assert len(found["by_layer"]) == sum(moe.sparse_layers)
    assert record["components"]["MoE"] > 0


def test_what_cannot_be_explained_is_refused_before_it_runs() -> None:
    """Fault: a long run that ends in an error that was known at its start."""
    llm = llm_of("chain")
    with pytest.raises(ConfigError, match="8 requests together"):
        explained(llm, by_batch=(8,))
    with pytest.raises(RequestError, match="context of 256"):
        explained(llm, text=TEXT * 40)
    with pytest.raises(ConfigError, match="no-such-profile"):
        explained(llm, profile="no-such-profile")
    with pytest.raises(RequestError, match="answers of 2 tokens"):
        explained(llm, tokens=2)
    with pytest.raises(ConfigError, match="by_batch"):
        ExplainConfig(by_batch=(0,))


@pytest.mark.parametrize(
    "speculation",
    [None, SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=6), chain(3, "NGRAM")],
    ids=["chain", "tree", "ngram"],
)
def test_parts_of_the_small_model_add_up(speculation: SpeculationConfig | None) -> None:
    """Fault: ranges that cost more than they show.

    Within 3 %, and what the machine's noise, which other tests make, leaves open.
    """
    config = EngineConfig(device="cpu", max_running_requests=1, context_length=384)
    llm = LLM("smollm2", speculation=speculation, config=config)
    wanted = ExplainConfig(num_prompts=1, cycles=8, profile="h200")
    params = SamplingParams(max_tokens=64)
    record = explain(llm, select(wanted), wanted, params, progress=False)
    for side in (record, record["decode"]):
        room = 0.03 + 4 * side["watching"]["noise"]
        assert abs(side["unexplained_fraction"]) < room, side["watching"]
    assert record["accept_length"] > 1
