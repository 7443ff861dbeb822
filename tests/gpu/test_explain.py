"""`eyas explain` on a GPU: parts add up to the unwatched cycle, and planted faults come first.

Shapes with random weights, acceptance by decree: nothing is downloaded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM
from eyas.report.compare import compare
from eyas.report.explain import explain
from eyas.report.options import ExplainConfig
from tests.helpers import NONE, chain

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

SMALL = "shape:smollm2-135m"
ALIKE, OVERHEAD = 0.03, 0.02
TREE = SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=10)
PROMPT = " ".join(["7"] * 60)


def load(model: str = SMALL, speculation: SpeculationConfig | None = None, **config: Any) -> LLM:
    speculation = speculation or chain(3)
    values: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "max_running_requests": 1,
        "context_length": 1024,
    }
    if speculation.algorithm != "NONE":
        values["simulate_accept_length"] = 2.0
    return LLM(model, speculation=speculation, config=EngineConfig(**{**values, **config}))


def explained(llm: LLM, prompt: str = PROMPT, **config: Any) -> dict[str, Any]:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    config = {"raw": True, "cycles": 48, "profile": "h200", **config}
    texts = [prompt] * config.get("batch_size", 1)
    return explain(llm, texts, ExplainConfig(**config), params, progress=False)


def told(record: dict[str, Any]) -> str:
    """What a failure needs to know."""
    keys = (
        "cycle_ms device_ms idle_ms overlap_ms early_ms unexplained_ms idle components watching "
        "gaps graph_fraction kernels launches graph_launches syncs copies_to_host "
        "classified_fraction cycles unknown graph_reasons verdict"
    )
    found = {key: record.get(key) for key in keys.split()}
    found["stages"] = {
        name: {k: v for k, v in one.items() if k != "components"}
        for name, one in record["stages"].items()
    }
    found["kernels_by_time"] = record.get("kernels_by_time", [])[:12]
    return json.dumps(found, indent=1)


def check(record: dict[str, Any]) -> None:
    """The parts of a cycle, or of a plain step, add up; watching costs little."""
    parts = sum(record["components"].values()) - record["overlap_ms"] + record["idle_ms"]
    assert parts == pytest.approx(record["cycle_ms"], rel=ALIKE), told(record)
    assert record["unexplained_ms"] == pytest.approx(record["cycle_ms"] - parts, abs=1e-6)
    watching = record["watching"]
    assert abs(watching["overhead"]) < OVERHEAD, told(record)
    if watching["how"].startswith("one event node"):
        assert watching["marked_ms"].keys() >= {"draft", "verify", "accept", "extend", "collect"}
        spans = sum(one["span_ms"] for one in record["stages"].values())
        assert spans == pytest.approx(watching["watched_ms"], rel=0.01), told(record)
    assert record["overlap_ms"] < 0.15 * record["cycle_ms"], told(record)
    assert record["classified_fraction"] >= 0.95, told(record)
    assert record["graph_fraction"] > 0.95, told(record)
    assert record["copies_to_host"] <= 1.5, told(record)
    stages = {name for name, one in record["stages"].items() if one["device_ms"] > 0}
    assert stages & {"verify", "decode"}, told(record)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("model", [SMALL, "shape:llama-3.1-8b", "shape:deepseek-v2-lite"])
def test_parts_add_up_under_whole_cycle_graphs(model: str) -> None:
    """Faults: gaps taken from a profile that stretches them; kernels given to other stages."""
    record = explained(load(model))
    for side in (record, record["decode"]):
        check(side)
    assert {"draft", "verify", "extend"} <= record["stages"].keys(), told(record)
    assert record["stages"]["verify"]["device_ms"] > record["stages"]["draft"]["device_ms"]
    assert 1.7 < record["accept_length"] < 2.3
    assert record["components"]["dense linear"] > record["components"].get("metadata", 0.0)
    if "deepseek" in model:
        found = record["experts"]
        assert found["top_k"] <= found["mean"] <= 4 * found["top_k"], found
        assert record["components"]["MoE"] > 0


@pytest.mark.parametrize("shape", ["tree", "ngram", "none"])
def test_other_ways_to_draft_add_up(shape: str) -> None:
    """Fault: an account that knows chains alone."""
    speculation = {"tree": TREE, "ngram": chain(3, "NGRAM"), "none": NONE}[shape]
    record = explained(load(speculation=speculation))
    check(record)
    assert (record["decode"] is None) == (shape == "none")


def test_a_batch_adds_up() -> None:
    """Fault: cycles of other buckets, or of padded graphs, taken for the batch's."""
    record = explained(load(max_running_requests=3), batch_size=3)
    check(record)


def test_the_lesson() -> None:
    """Fault: a host clock that waits, and so teaches nothing."""
    record = explained(load(disable_cuda_graph=True), lesson=True)
    stages = record["lesson"]["stages"]
    assert stages["verify"]["true_ms"] > 0, record["lesson"]
    assert record["graph_reasons"], told(record)


def first_cause(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, str]:
    """Name of the first cause, and all of them for a failure."""
    found = compare(before, after)
    causes = [(c["name"], round(c["ms"], 4), c["evidence"]) for c in found["causes"]]
    assert causes, found["verdict"]
    return causes[0][0], "\n".join(map(str, [found["verdict"], *causes]))


def test_a_bucket_without_graph_is_named() -> None:
    """Fault: verify runs eagerly and only the clock knows."""
    before = explained(load(max_running_requests=2), batch_size=2)
    after = explained(load(max_running_requests=2, cuda_graph_max_bs=1), batch_size=2)
    name, words = first_cause(before, after)
    assert "graph" in name, words + told(after)


def test_verify_on_attention_without_splits_is_named() -> None:
    """Fault: verify takes prefill's attention, which walks keys in one program."""
    long = " ".join(["7"] * 1200)
    size: dict[str, Any] = {"context_length": 2048}
    records = [
        explained(load(speculation=chain(3, attention_mode=mode), **size), prompt=long)
        for mode in ("decode", "prefill")
    ]
    name, words = first_cause(*records)
    assert name in ("verify: attention", "speculation.attention_mode"), words


def test_a_host_that_sleeps_between_draft_and_verify_is_named() -> None:
    """Fault: the host's own time, which shows only as idle time of the device."""
    before = explained(load(disable_cuda_graph=True))
    llm = load(disable_cuda_graph=True)
    drafter: Any = llm.engine.runner.parts.drafter
    propose = drafter.propose

    def slow(context: Any) -> Any:
        draft = propose(context)
        time.sleep(0.005)
        return draft

    drafter.propose = slow
    after = explained(llm)
    name, words = first_cause(before, after)
    assert "draft" in name and ("host" in name or "idle" in name), words + told(after)


def test_a_copy_to_the_host_in_the_cycle_is_named() -> None:
    """Fault: a value is read in the middle of the cycle, and the host waits."""
    llm = load(disable_cuda_graph=True)
    drafter: Any = llm.engine.runner.parts.drafter
    propose = drafter.propose

    def reading(context: Any) -> Any:
        draft = propose(context)
        assert int(draft.tokens.sum().item()) >= 0
        return draft

    drafter.propose = reading
    record = explained(llm)
    assert "item in draft" in record["verdict"], told(record)
    assert record["copies_to_host"] > 1.5, told(record)
