"""The memory that is predicted from configs is the memory that a run takes.

Measured by `tests.measuring`: all tensors that there are, and what the allocator hands out within
the run. Predicted with the shapes of the run's own plans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.admission import rough_working
from eyas.engine.budget import Budget, Case, Load, at_rest, hollow_runner, predict
from eyas.engine.engine import LLM, Engine, resolve_engine
from eyas.engine.rehearsal import ATTENTION, LOGITS
from eyas.model_config import ModelConfig
from eyas.models.families import model_config
from tests.helpers import (
    LATENT,
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)
from tests.measuring import DEEPSEEK, LLAMA, case_of, held_storages, peak_of, shapes_of

SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
GREEDY = SamplingParams(max_tokens=8)


def assert_near(budget: Budget, held: int, within: int) -> None:
    """The promise is 5 %; the parts are held to 1 % of it, since both are counted exactly."""
    measured = held + within
    assert abs(budget.peak / measured - 1) < 0.05, f"{budget.peak} predicted, {measured} measured"
    assert abs(budget.resting - held) < 0.01 * held, f"{budget.resting} at rest, {held} measured"
    assert abs(budget.peak - measured) < 0.01 * measured


def measure(make: Callable[[], tuple[Engine, Any]], params: SamplingParams) -> None:
    """Build an engine, run three requests, and hold the prediction against both."""
    before = held_storages()
    engine, drafter = make()
    made = {place: n for place, n in held_storages().items() if place not in before}
    vocab = engine.runner.parts.target.config.vocab_size
    jobs = [Job(prompt=p, params=params) for p in random_prompts((300, 90, 20), vocab=vocab)]
    prefills, cycles = shapes_of(engine)
    within = peak_of(lambda: run_all(engine, jobs))
    case = case_of(engine, drafter)
    budget = predict(case, Load(prefills=tuple(set(prefills)), cycles=tuple(set(cycles))))
    assert_near(budget, sum(made.values()), within)
    working = budget.prefill.total(), budget.cycle.total()
    assert min(working) > 0
    runner = hollow_runner(case)
    assert rough_working(case, runner) > max(working)


def with_drafter(target: dict[str, Any], **drafter: Any) -> Callable[..., tuple[Engine, Any]]:
    """An engine over a target and a drafter that was made for it."""

    def make(speculation: SpeculationConfig, dtype: torch.dtype) -> tuple[Engine, Any]:
        sizes = {"vocab_size": 8192, "draft_vocab_size": 2000, "max_position": 1024}
        hidden = {"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512}
        network = tiny_drafter(dtype, **{**sizes, **hidden, **drafter})
        config: dict[str, Any] = {"max_running_requests": 4, "context_length": 512}
        return make_engine(tiny_target(dtype, **target), network, speculation, **config), network

    return make


@pytest.mark.parametrize(
    ("dtype", "shape", "params"),
    [
        (torch.float32, chain(4), SAMPLED),
        (torch.bfloat16, chain(4), GREEDY),
        (torch.bfloat16, TREES[1], SAMPLED),
    ],
    ids=["fp32", "bf16", "tree"],
)
def test_a_llama_with_its_own_head(
    dtype: torch.dtype, shape: SpeculationConfig, params: SamplingParams
) -> None:
    """Fault: head, 8-bit drafter, tree masks or the filters' copies left out (s#6875)."""
    measure(lambda: with_drafter(LLAMA, own_embedding=True)(shape, dtype), params)


def test_a_deepseek() -> None:
    """Fault: a latent cache counted as keys and values, or experts by those that are chosen."""
    make = with_drafter(DEEPSEEK, mla=LATENT)
    measure(lambda: make(chain(3), torch.bfloat16), GREEDY)


@pytest.mark.parametrize("shape", [NONE, chain(4, "NGRAM")], ids=["plain", "ngram"])
def test_drafters_without_a_network(shape: SpeculationConfig) -> None:
    """Fault: a lookup or plain decoding that is booked as a network, or not at all."""
    measure(lambda: (make_engine(tiny_target(**LLAMA), None, shape), None), GREEDY)


def test_a_small_model_as_drafter() -> None:
    """Fault: the second model's weights or pool missing."""
    small = {**LLAMA, "num_layers": 2, "hidden_size": 64}
    shape = chain(3, "STANDALONE")

    def make() -> tuple[Engine, Any]:
        model = tiny_target(seed=2, **small)
        return make_engine(tiny_target(**LLAMA), model, shape, context_length=512), model

    measure(make, GREEDY)


def test_smollm2_with_its_drafter(smollm2_folder: Path) -> None:
    """Fault: a real model's memory off by 5 %. Planned before loading, by `LLM` itself."""
    del smollm2_folder
    before = held_storages()
    config = EngineConfig(device="cpu", context_length=768, max_running_requests=2)
    llm = LLM("smollm2", config=config)
    held = sum(n for place, n in held_storages().items() if place not in before)
    prefills, cycles = shapes_of(llm.engine)
    prompts = random_prompts((200, 100), vocab=49152)
    within = peak_of(lambda: llm.generate(prompts, SamplingParams(max_tokens=4)))
    case = llm.case.change(num_pages=llm.engine.config.num_pages)
    budget = predict(case, Load(prefills=tuple(prefills), cycles=tuple(cycles)))
    assert_near(budget, held, within)
    assert budget.drafter_8bit > 0
    assert budget.weights == 134515008 * 2, "tied weights count once"
    assert llm.budget().peak > budget.peak, "the largest passes take more than these"


def test_pages_that_are_written() -> None:
    """Fault: a CPU's pool counted where no page was touched, or touched pages that are not."""
    target = tiny_target(**LLAMA)
    engine = make_engine(target, None, NONE, max_running_requests=4, page_size=8)
    jobs = [Job(prompt=p, params=GREEDY) for p in random_prompts((40, 21), vocab=8192)]
    run_all(engine, jobs)
    pool = engine.runner.parts.pool
    used = pool.k.abs().amax((0, 1, 3)).view(-1, 8).amax(1) > 0
    wanted = 1 + sum(-(-(n + 8) // 8) for n in (40, 21))
    assert abs(int(used.sum()) - wanted) <= 1
    budget = at_rest(case_of(engine), hollow_runner(case_of(engine)))
    saved = budget.peak - budget.touched(wanted)
    assert saved == (budget.num_pages - wanted) * (pool.k.nbytes + pool.v.nbytes) // pool.num_pages


@pytest.fixture
def llama_8b() -> ModelConfig:
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
        }
    )


def plain_case(target: ModelConfig, device: str = "cpu", **config: Any) -> Case:
    """`target` alone in bfloat16, with resolved settings."""
    engine = resolve_engine(EngineConfig(device=device, **config), NONE, target)
    return Case(
        target=target,
        drafter=None,
        config=engine,
        speculation=NONE,
        device=torch.device(device),
        dtype=torch.bfloat16,
    )


def test_known_sizes_of_a_large_model(llama_8b: ModelConfig) -> None:
    """Fault: a size off by a factor. Figures from the published configs; nothing is allocated."""
    case = plain_case(llama_8b, "cuda", context_length=8192, max_running_requests=4)
    budget = predict(case)
    assert budget.weights == 8030261248 * 2
    assert budget.kv == (4 * 513 + 1) * 16 * 131072
    assert budget.cycle[LOGITS] > 4 * 128256 * 16, "filters keep some copies"
    assert budget.total == budget.resting + budget.prefill.total() + budget.cycle.total()
    eager = predict(case.change(disable_cuda_graph=True))
    assert eager.total == eager.peak == budget.peak - 2**25, "the workspace of captures"


def test_ranks_share_weights_and_heads(llama_8b: ModelConfig) -> None:
    """Fault: every rank planned with the whole model, or norms divided."""
    whole, half = (predict(plain_case(llama_8b, tp=n, context_length=4096)) for n in (1, 2))
    norms = 65 * 4096 * 2
    assert half.weights - norms == (whole.weights - norms) // 2
    assert half.kv == whole.kv // 2
    assert half.tables == whole.tables
    assert half.prefill[ATTENTION] < 0.6 * whole.prefill[ATTENTION]


def test_engines_over_the_same_weights(llama_8b: ModelConfig) -> None:
    """Fault: a bench's second engine that no longer fits."""
    one = plain_case(llama_8b, context_length=4096)
    single, double = predict(one), predict(Case(**{**fields(one), "engines": 2}))
    assert double.total - single.total == single.pages + single.state


def fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def test_the_table_adds_up(llama_8b: ModelConfig) -> None:
    """Fault: a part that is planned with and not shown."""
    for device in ("cpu", "cuda"):
        budget = predict(plain_case(llama_8b, device, context_length=2048))
        assert sum(size for _, size, _ in budget.rows()) == budget.total
        fewer = budget.with_pages(budget.num_pages // 2)
        assert sum(size for _, size, _ in fewer.rows()) == fewer.total < budget.total


def test_a_gpu_keeps_workspaces() -> None:
    """Fault: 270 MB of two attention backends and 34 of the library's missing, as once measured."""
    target, drafter = tiny_target(), tiny_drafter()
    case = Case(
        target=target.config,
        drafter=drafter.config,
        config=resolve_engine(EngineConfig(), chain(3), target.config),
        speculation=chain(3),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    with_graphs = predict(case)
    eager = predict(case.change(disable_cuda_graph=True))
    assert eager.workspace == 2 * (2**27 + 2**24 + 4 * 4096)
    assert with_graphs.workspace - eager.workspace == 2**25
    assert sum(size for _, size, _ in eager.rows()) == eager.total
