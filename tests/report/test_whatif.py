"""The what-if table: every change the planner knows, sorted, with nothing hidden in the sum."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from eyas.config import SpeculationConfig
from eyas.errors import CheckpointError, ConfigError
from eyas.estimate import Scenario, predict
from eyas.model_config import ModelConfig
from eyas.report.components import DEVICE
from eyas.report.html import page
from eyas.report.options import PlanConfig
from eyas.report.plan_table import show
from eyas.report.scenarios import read_target, scenario_of
from eyas.report.whatif import plan, resident_gb
from eyas.setting import Precision


def scenario(model: str = "shape:kimi-k2.5", drafter: str = "usual", **values: Any) -> Scenario:
    given: dict[str, Any] = {
        "profile": "rtx-pro-6000-tuned",
        "tp": 8,
        "expert_bits": 4.5,
        "draft_bits": 16.0,
    }
    given |= values
    return scenario_of(model, drafter, None, PlanConfig(**given))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return plan(scenario())


def row(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in record["rows"] if r["option"] == name)


def test_rows_hold_what_they_promise(record: dict[str, Any]) -> None:
    """Fault: a key missing, a ratio of other numbers, rows out of order."""
    asked = row(record, "as asked")
    assert asked["gain"] == 1
    gains = [r["gain"] for r in record["rows"]]
    assert gains == sorted(gains, reverse=True)
    assert record["schema"] == "eyas.plan" and record["version"] == 1
    for r in record["rows"]:
        assert r["costs"] or not r["group"], r["option"]
        assert r["break_even"] == pytest.approx(r["cycle_ms"] / r["decode_ms"])
        assert r["speedup"] == pytest.approx(r["accept_length"] / r["break_even"])
        assert r["tok_per_s"] == pytest.approx(r["accept_length"] / r["cycle_ms"] * 1e3)
        parts = r["draft_ms"] + r["verify_ms"] + r["extend_ms"] + r["idle_ms"]
        assert parts == pytest.approx(r["cycle_ms"])
        assert r["gain"] == pytest.approx(r["tok_per_s"] / asked["tok_per_s"])
    assert len({r["option"] for r in record["rows"]}) == len(record["rows"])
    json.dumps(record)


@pytest.mark.parametrize(
    ("option", "better"),
    [
        ("NVLink", True),
        ("PCIe without peer access", False),
        ("PCIe with peer access, NCCL by default", False),
        ("all-reduce nccl", False),
        ("all-reduce fused with residual and norm", True),
        ("a rank 50 us late at every all-reduce", False),
        ("a chain of 7 drafts, 8 rows a verify", False),
        ("no speculation", False),
        ("hidden states kept without copies", True),
        ("data-parallel attention", False),
        ("keys shared among all ranks", False),
        ("drafter shared among ranks", True),
        ("verify on prefill attention", False),
        ("keys read for every node", False),
        ("three blocking copies a cycle", False),
        ("a host stall of 1 ms a cycle", False),
        ("weights in 8 bits", True),
        ("keys and values in 8 bits", True),
        ("drafter in 8 bits", True),
        ("nodes choose experts as in real text", True),
        ("nodes choose experts the same", True),
    ],
)
def test_every_option_of_the_table_is_there(
    record: dict[str, Any], option: str, better: bool
) -> None:
    """Fault: an option of the planner dropped, or that changes the wrong way."""
    gain = row(record, option)["gain"]
    assert gain > 1 if better else gain < 1


def test_the_mode_of_attention_is_the_flags(record: dict[str, Any]) -> None:
    """Fault: `--speculative-attention-mode` that plans nothing, an option that changes nothing."""
    chain = SpeculationConfig.chain(3, attention_mode="prefill")
    given = PlanConfig(profile="rtx-pro-6000-tuned", tp=8, expert_bits=4.5, draft_bits=16.0)
    asked = plan(scenario_of("shape:kimi-k2.5", "usual", chain, given))
    walking, split = row(asked, "as asked"), row(record, "as asked")
    assert walking["verify_ms"] == row(record, "verify on prefill attention")["verify_ms"]
    assert row(asked, "verify on decode attention")["verify_ms"] == split["verify_ms"]


def test_trees_and_ranks_have_rows() -> None:
    """Fault: options that only some scenarios have missing where they belong."""
    names = {r["option"] for r in plan(scenario("shape:deepseek-v2-lite", tp=2))["rows"]}
    assert {"tp=1", "tp=4", "a tree of 5 steps, top 4, 16 nodes"} <= names
    assert "experts in 4 bits, groups of 32" not in names
    dense = {r["option"] for r in plan(scenario("shape:llama-3.1-8b", "none", tp=1))["rows"]}
    assert "as asked" in dense and "tp=2" in dense
    assert not any("expert" in name or "draft" in name for name in dense)
    assert not any("all-reduce" in name for name in dense)


def test_what_does_not_fit_is_no_option() -> None:
    """Fault: half of the ranks advised for a model that fills all of them."""
    names = {r["option"] for r in plan(scenario())["rows"]}
    assert "tp=4" not in names
    assert plan(scenario())["fits"]
    assert not plan(scenario(expert_bits=16.0))["fits"]
    gb = resident_gb(scenario(context=0))
    assert gb == pytest.approx(594 / 8 + 2.3, abs=0.3), "published weights; latents' on each rank"
    many = scenario(context=100_000, batch_size=8)
    assert resident_gb(many) - gb == pytest.approx(8 * 61 * 100_000 * 576 * 2 / 1e9)


def test_graphs_matter_where_kernels_are_short() -> None:
    """Fault: launches without graphs that cost nothing, or that slow down long kernels too."""
    small = plan(scenario("shape:smollm2-135m", profile="h200", tp=1, expert_bits=0.0))
    assert row(small, "graphs off")["gain"] < 0.6
    large = plan(scenario("shape:llama-3.1-8b", profile="h200", tp=1, expert_bits=0.0))
    assert row(large, "graphs off")["gain"] > 0.95


def test_the_sum_is_visible(record: dict[str, Any]) -> None:
    """Fault: time in a pass that no component and no term shows."""
    found = predict(scenario())
    sums = {r["component"]: r for r in record["breakdown"]}
    parts = [r for r in record["breakdown"] if r["component"] not in SUMS]
    for stage, estimate in (("decode", found.decode), ("verify", found.verify)):
        assert sums["device, ms"][stage] == pytest.approx(estimate.us / 1e3)
        assert sum(r[stage] for r in parts) == pytest.approx(estimate.us / 1e3)
        terms = [t for t in record["terms"] if t["stage"] == stage]
        assert sum(t["us"] for t in terms) == pytest.approx(estimate.us)
        assert sum(t["gb"] for t in terms) == pytest.approx(sums["traffic, GB"][stage])
        assert sums["floor, ms"][stage] < sums["device, ms"][stage]


def test_a_page_draws_a_plan(record: dict[str, Any]) -> None:
    """Fault: a record whose keys the page's figures take for something else."""
    text = page(record)
    for name in ("What if", "NVLink", "all-reduce", "Speculation pays"):
        assert name in text
    assert sum(record["components"].values()) == pytest.approx(record["device_ms"])
    assert record["device_ms"] + record["idle_ms"] == pytest.approx(record["cycle_ms"])
    stages = record["stages"].values()
    assert sum(s["device_ms"] for s in stages) == pytest.approx(record["device_ms"])
    given = record["acceptance"]["conditional_acceptance"]
    assert record["acceptance"]["acceptance_by_position"][1] == pytest.approx(given[0] * given[1])
    names = set(record["components"])
    assert names <= set(DEVICE), names - set(DEVICE)


SUMS = ("device, ms", "floor, ms", "launches", "traffic, GB")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_stand_alone_at_any_width(record: dict[str, Any], width: int) -> None:
    """Fault: a narrow terminal that shows numbers without the option they belong to."""
    out = io.StringIO()
    show(Console(file=out, width=width), record)
    text = out.getvalue()
    assert "NVLink" in text and "as asked" in text and "break-even" in text
    assert ("what it costs" in text or "another machine" in text) == (width == 200)
    assert "does not fit" not in text
    show(Console(file=out, width=width), record | {"fits": False})
    assert "does not fit" in out.getvalue()


def test_flags_become_a_scenario() -> None:
    """Fault: a flag that is read and not used."""
    found = scenario(
        "shape:deepseek-v2-lite",
        profile="h200",
        tp=2,
        batch_size=4,
        context=100,
        nodes=6,
        acceptance=(0.8, 0.5),
        all_reduce="nccl",
        engine="vllm",
        weight_bits=8.0,
        expert_bits=4.0,
        kv_bits=8.0,
        draft_bits=8.0,
        expert_overlap=0.5,
        sharded_drafter=True,
    )
    assert found.setting == dataclasses.replace(
        found.setting,
        ranks=2,
        batch=4,
        context=100,
        expert_overlap=0.5,
        sharded_drafter=True,
        precision=Precision(weight_bits=8, expert_bits=4, kv_bits=8, draft_bits=8, extend_bits=8),
    )
    assert found.speculation == SpeculationConfig.chain(5)
    assert found.rates == (0.8, 0.5)
    assert (found.software.name, found.software.all_reduce) == ("vllm", "nccl")
    assert found.profile.name == "h200"
    assert scenario(accept_length=2.5).accept_length == pytest.approx(2.5)
    assert scenario(nodes=1).speculation.algorithm == "NONE"
    assert scenario(drafter="none").drafter is None


def test_the_engine_drafts_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a plan of 16-bit drafts where the engine rounds, or of rounded ones elsewhere."""

    def rounded(config: Any, drafter: Any, device: Any, dtype: Any) -> bool:
        return device.type == "cuda" and drafter.hidden_size >= 2048

    monkeypatch.setattr("eyas.report.scenarios.drafts_rounded", rounded)
    large = scenario("shape:llama-3.1-8b", profile="h200", tp=1, draft_bits=0.0)
    assert large.setting.precision.draft_bits == large.setting.precision.extend_bits == 8
    many = scenario("shape:llama-3.1-8b", profile="h200", tp=1, draft_bits=0.0, batch_size=32)
    assert (many.setting.precision.draft_bits, many.setting.precision.extend_bits) == (8, 16)
    small = scenario("shape:smollm2-135m", profile="h200", tp=1, draft_bits=0.0)
    assert small.setting.precision.draft_bits == 16
    other = scenario("shape:llama-3.1-8b", profile="h200", tp=1, engine="vllm", draft_bits=0.0)
    assert other.setting.precision.draft_bits == 16
    asked = scenario("shape:llama-3.1-8b", profile="h200", tp=1, draft_bits=4.5)
    assert asked.setting.precision.draft_bits == 4.5


def test_drafters_by_name() -> None:
    """Fault: a drafter's name that leads to another network."""
    latent = scenario(drafter="latent").drafter
    assert latent is not None and latent.mla is not None and latent.vocab_size == 163_840
    small = scenario("shape:llama-3.1-8b", "shape:smollm2-135m", tp=1)
    assert isinstance(small.drafter, ModelConfig)
    assert small.speculation.algorithm == "STANDALONE"
    auto = scenario("shape:llama-3.1-8b", "auto", tp=1)
    assert auto.drafter == scenario("shape:llama-3.1-8b", tp=1).drafter
    assert read_target("shape:kimi-k2.5").num_layers == 61
    with pytest.raises(ConfigError, match="no latent attention"):
        scenario("shape:llama-3.1-8b", "latent")
    with pytest.raises(CheckpointError, match="is none of the shapes"):
        scenario("shape:llama-4")


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("tp=0", {"tp": 0}),
        ("context=-1", {"context": -1}),
        (r"acceptance=\(1.2,\)", {"acceptance": (1.2,)}),
        ("accept_length=0.5", {"accept_length": 0.5}),
        ("accept_length and acceptance", {"accept_length": 2.0, "acceptance": (0.5,)}),
        ("engine 'llama.cpp'", {"engine": "llama.cpp"}),
        ("accept_length=9", {"accept_length": 9.0}),
        ("weight_bits=64", {"weight_bits": 64.0}),
        ("expert_overlap=2", {"expert_overlap": 2.0}),
        ("profile 'abacus'", {"profile": "abacus"}),
    ],
)
def test_flags_that_mean_nothing(message: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario(**values)


def test_two_words_on_the_rows_of_a_verify() -> None:
    spec = SpeculationConfig.chain(2)
    with pytest.raises(ConfigError, match="nodes=4 with --speculative"):
        scenario_of("shape:llama-3.1-8b", "usual", spec, PlanConfig(nodes=4))
