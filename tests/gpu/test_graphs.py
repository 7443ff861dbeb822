"""Cycles as CUDA graphs: the same texts, no eager cycle, no sync, and padding that harms nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.engine import Engine
from eyas.engine.graphs import GraphKey, Reason
from tests.helpers import (
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
)

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
SHAPES: dict[str, SpeculationConfig] = {
    "none": NONE,
    "ngram": chain(4, "NGRAM"),
    "chain": chain(4),
    "tree": TREES[1],
}
each_shape = pytest.mark.parametrize("shape", SHAPES)


def jobs(heat: float = 0.0, top_k: int = 0) -> list[Job]:
    """Five requests that join one after the other and end apart."""
    return [
        Job(
            prompt=prompt,
            params=SamplingParams(max_tokens=20 + 5 * i, temperature=heat, top_k=top_k, seed=i),
            join=i,
        )
        for i, prompt in enumerate(random_prompts([5, 17, 33, 1, 50]))
    ]


def engine(shape: SpeculationConfig, **config: bool | int | str) -> Engine:
    return make_engine(
        tiny_target(device=DEVICE), tiny_drafter(device=DEVICE), shape, eos=(), **config
    )


@each_shape
@pytest.mark.parametrize(("heat", "top_k"), [(0.0, 0), (1.0, 0), (0.8, 9)])
def test_texts_equal_those_of_eager_cycles(shape: str, heat: float, top_k: int) -> None:
    """Faults: stale inputs at replay, padded rows that write real memory (s#25512, v PR#43682)."""
    plain = engine(SHAPES[shape], disable_cuda_graph=True, overlap="off")
    expected = outputs(run_all(plain, jobs(heat, top_k)))
    assert set(plain.runner.graphs.counts) == {Reason.DISABLED}
    graphed = engine(SHAPES[shape])
    assert outputs(run_all(graphed, jobs(heat, top_k))) == expected
    counts = graphed.runner.graphs.counts
    assert all(isinstance(key, GraphKey) for key in counts), f"eager cycles: {counts}"
    assert len({key.num_requests for key in counts if isinstance(key, GraphKey)}) > 1


@each_shape
def test_poisoned_padding_changes_nothing(shape: str) -> None:
    """Fault: a real row that reads the dummy page or slot. Three requests in a bucket of four."""
    texts = []
    for poison in (0.0, 1e4):
        one = engine(SHAPES[shape], max_running_requests=8, page_size=4)
        parts = one.runner.parts
        parts.pool.k[:, :, :4] = poison
        parts.pool.v[:, :, :4] = poison
        texts.append(outputs(run_all(one, jobs()[:3])))
    assert texts[0] == texts[1]


def test_more_requests_than_captured_run_eagerly_and_say_so() -> None:
    """Fault: collapse past the largest captured batch (s#5274), or silence about it."""
    one = engine(SHAPES["chain"], cuda_graph_max_bs=2)
    found = outputs(run_all(one, jobs()))
    assert found == outputs(run_all(engine(SHAPES["chain"]), jobs()))
    assert one.runner.graphs.counts[Reason.BATCH_NOT_CAPTURED] > 0


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """Restore the sync detector."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@each_shape
@pytest.mark.usefixtures("no_syncs")
def test_steady_steps_wait_for_nothing_but_the_late_result(shape: str) -> None:
    """Fault: hidden host sync around the graph (s PR#32885, s PR#16194, s#27689).

    Whole engine steps, page grants included, with torch's sync detector on error; the wait for the
    late result is an event's, which the detector does not count.
    """
    one = engine(SHAPES[shape], page_size=1)
    for prompt in random_prompts([9, 30, 2]):
        one.add(prompt, SamplingParams(max_tokens=150))
    for _ in range(4):
        one.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(12):
        one.step()
    torch.cuda.set_sync_debug_mode("default")
    assert all(r.num_coming > 0 for r in one.scheduler.active)
