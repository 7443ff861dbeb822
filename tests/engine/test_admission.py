"""What fits is taken in; what does not is refused before it is loaded, with what would fit."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine import admission
from eyas.engine.admission import GIB, admit, available, in_gib, pages_that_fit
from eyas.engine.budget import Case, predict
from eyas.engine.engine import LLM, resolve_engine
from eyas.errors import CapacityError, CheckpointError, ConfigError
from eyas.model_config import DrafterConfig, ModelConfig
from tests.chat_model import write_chat_model
from tests.helpers import NONE, chain

MODEL = ModelConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_position=8192,
)
"""230 million parameters, 460 MB in bfloat16; 24 kB a position in the float32 pool of a CPU."""
DRAFTER = DrafterConfig(
    vocab_size=32000,
    draft_vocab_size=8000,
    hidden_size=1024,
    target_hidden_size=1024,
    intermediate_size=2816,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_position=8192,
    aux_layers=(2, 6, 9),
)


def case_of(speculation: SpeculationConfig = NONE, device: str = "cpu", **config: Any) -> Case:
    engine = EngineConfig(device=device, **config)
    resolved = resolve_engine(engine, speculation, MODEL)
    return Case(
        target=MODEL,
        drafter=DRAFTER if speculation.algorithm == "EAGLE3" else None,
        config=dataclasses.replace(resolved, num_pages=engine.num_pages),
        speculation=speculation,
        device=torch.device(device),
        dtype=torch.bfloat16,
    )


def refusal(case: Case) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        admit(case)
    return caught.value


def remedies(error: CapacityError) -> dict[str, int]:
    """The settings that a refusal proposes."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", error.remedy)}


@pytest.mark.parametrize("speculation", [NONE, chain(4)], ids=["plain", "eagle"])
def test_what_fits_is_left_as_it_is(speculation: SpeculationConfig) -> None:
    """Fault: fewer pages than there is room for. The limit is what the budget says, to a byte."""
    case = case_of(speculation)
    whole = predict(case)
    assert whole.num_pages == case.num_pages
    exact = case.change(memory_limit=whole.total / GIB)
    assert admit(exact).num_pages == whole.num_pages
    tight = case.change(memory_limit=(whole.total - 1) / GIB)
    assert admit(tight).num_pages == whole.num_pages - 1
    assert admit(case.change(memory_limit=100.0)).num_pages == whole.num_pages


def test_a_plentiful_device_needs_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a second's delay at every start of a small model."""
    monkeypatch.delattr(admission, "predict")
    assert admit(case_of(memory_limit=100.0)).num_pages == case_of().num_pages


def test_automatic_pages_are_as_many_as_fit() -> None:
    """Fault: a refusal, or a crash later, where fewer pages would do."""
    case = case_of(chain(4))
    least = predict(case).with_pages(case.least_pages)
    for room in (least.total, least.total + 10**8):
        config = admit(case.change(memory_limit=room / GIB))
        budget = predict(case).with_pages(config.num_pages)
        assert budget.total <= room < budget.with_pages(config.num_pages + 1).total
        assert config.num_pages >= case.least_pages
    short = refusal(case.change(memory_limit=(least.total - 1) / GIB))
    assert in_gib(least.total) in short.value
    assert "keys and values" in short.value


def test_every_remedy_is_one() -> None:
    """Fault: advice that does not help."""
    weights = predict(case_of()).weights
    case = case_of(max_running_requests=4, memory_limit=(weights + 2 * 10**8) / GIB)
    error = refusal(case)
    assert "cpu has" in error.rule
    proposed = remedies(error)
    assert "context_length" in proposed
    assert "tp" in proposed
    for name, value in proposed.items():
        assert admit(case.change(**{name: value})).num_pages > 1, name
        bigger = value // 2 if name == "tp" else value * 2
        refusal(case.change(**{name: bigger}))


def test_too_many_pages_are_refused() -> None:
    """Fault: pages asked for by number that are taken without a look, or silently fewer."""
    room = 2 * 10**9
    case = case_of(num_pages=10**6, memory_limit=room / GIB)
    proposed = remedies(refusal(case))
    assert admit(case.change(num_pages=proposed["num_pages"])).num_pages == proposed["num_pages"]
    assert proposed["num_pages"] == pages_that_fit(predict(case), round(room / GIB * GIB))
    assert "context_length" not in proposed, "a shorter context does not shrink such a pool"


def test_nothing_helps_a_model_that_is_too_large() -> None:
    """Fault: an empty remedy."""
    error = refusal(case_of(memory_limit=0.001))
    assert error.remedy == "use a smaller model, or a device with more memory"


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every rank on a CPU plans with all of it; a limit that nobody heeds."""
    monkeypatch.setattr(admission, "free_memory", lambda _: 8 * GIB)
    assert available(case_of()) == int(8 * GIB * admission.HEADROOM)
    assert available(case_of(tp=2)) == int(8 * GIB * admission.HEADROOM) // 2
    assert available(case_of(device="cuda", tp=2)) == int(8 * GIB * admission.HEADROOM)
    assert available(case_of(memory_limit=32.0)) == 32 * GIB
    assert available(case_of(device="cuda", memory_limit=32.0)) == 8 * GIB
    monkeypatch.setattr(admission, "free_memory", lambda _: None)
    assert available(case_of()) is None
    assert admit(case_of()).num_pages == case_of().num_pages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save_llama: Any) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), save_llama)


def test_an_engine_that_cannot_fit_reads_no_weights(model: Path, tmp_path: Path) -> None:
    """Fault: minutes of loading that end in a refusal. The folder's weights are missing."""
    folder = Path(shutil.copytree(model, tmp_path / "empty"))
    (folder / "model.safetensors").unlink()
    tiny = EngineConfig(device="cpu", memory_limit=0.0001)
    with pytest.raises(CapacityError, match="cpu has"):
        LLM(str(folder), config=tiny)
    with pytest.raises(CheckpointError, match="holds none of"):
        LLM(str(folder), config=EngineConfig(device="cpu"))
    with pytest.raises(ConfigError, match="memory_limit"):
        EngineConfig(memory_limit=-1.0)


def test_an_engine_runs_with_the_pages_that_fit(model: Path) -> None:
    """Fault: a choice of pages that the engine does not hear of."""
    config = EngineConfig(device="cpu", dtype="float32")
    llm = LLM(str(model), config=config)
    whole = llm.budget()
    fewer = whole.with_pages(whole.num_pages // 2)
    tight = dataclasses.replace(config, memory_limit=fewer.total / GIB)
    small = LLM(str(model), config=tight)
    assert small.engine.config.num_pages == fewer.num_pages
    assert small.engine.runner.parts.pool.num_pages == fewer.num_pages
    assert small.budget().total == fewer.total
