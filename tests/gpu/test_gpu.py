"""The essential engine tests again on a GPU, and what only a GPU can show: no hidden syncs.

float32 texts must equal plain decoding token for token. In bfloat16 library products may round a
row otherwise in another batch, so there a first difference must be a near tie in the reference's
own logits; it is counted and bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.batch import PassShape
from eyas.checkpoint import resolve
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.cycle import cycle
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Status
from eyas.errors import CheckpointError
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import load_target
from eyas.sampling import gumbel_noise
from eyas.spans import NoSpans
from eyas.speculate.checkpoints import find_drafter, load_drafter
from eyas.tokenizer import Tokenizer
from tests.eagle3_reference import target_logits
from tests.helpers import (
    CPU,
    NONE,
    TREES,
    Job,
    ScriptedDrafter,
    alone,
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
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEAR = 0.1
"""Difference of two bfloat16 logits, of about 10, that rounding can turn round."""
SHAPES: dict[str, SpeculationConfig] = {
    "none": NONE,
    "ngram": chain(4, "NGRAM"),
    "chain 1": chain(1),
    "chain 4": chain(4),
    "tree": TREES[1],
    "deep tree": TREES[2],
}
JOBS = [
    Job(prompt=p, params=SamplingParams(max_tokens=24, temperature=t, seed=i, top_k=k), join=i)
    for i, (p, t, k) in enumerate(
        zip(
            random_prompts([5, 17, 33, 1, 50]),
            (0.0, 1.0, 0.7, 0.0, 1.0),
            (0, 0, 9, 0, 5),
            strict=True,
        )
    )
]


@cache
def pair(dtype: str) -> tuple[Decoder, Eagle3]:
    """Tiny target and drafter on the GPU."""
    return tiny_target(TYPES[dtype], device=DEVICE), tiny_drafter(TYPES[dtype], device=DEVICE)


@cache
def reference(dtype: str) -> list[list[int]]:
    return alone(pair(dtype)[0], JOBS)


@torch.inference_mode()
def logits_behind(target: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits float32 [V] behind a text, computed on the CPU."""
    twin = tiny_target(target.embed.weight.dtype)
    twin.load_state_dict(target.state_dict())
    return target_logits(twin, tokens)[-1].float().cpu()


def compare(dtype: str, texts: list[list[int]]) -> None:
    """Equal texts; in bfloat16 a greedy text may part at a near tie, a sampled one rarely."""
    differences = 0
    for job, ours, wanted in zip(JOBS, texts, reference(dtype), strict=True):
        if ours == wanted:
            continue
        assert dtype == "bf16", f"{ours} instead of {wanted}"
        differences += 1
        place = next(i for i, (a, b) in enumerate(zip(ours, wanted, strict=True)) if a != b)
        if job.params.temperature == 0:
            row = logits_behind(pair(dtype)[0], [*job.prompt, *wanted[:place]])
            assert abs(float(row[ours[place]] - row[wanted[place]])) < NEAR
    assert differences <= 1, "more than a rare tie differs"


@pytest.mark.parametrize("dtype", TYPES)
def test_logits_equal_the_cpus(dtype: str) -> None:
    """Fault: a GPU kernel that computes something else. The same weights on both, by the engine."""
    target, _ = pair(dtype)
    twin = tiny_target(torch.float32)
    twin.load_state_dict({k: v.float() for k, v in target.state_dict().items()})
    prompt = random_prompts([60])[0]
    job = Job(prompt=prompt, params=SamplingParams(max_tokens=30))
    text = outputs(run_all(make_engine(target, page_size=4), [job]))[0]
    logits = target_logits(twin, [*prompt, *text])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    behind = (logits.amax(1) - chosen).max().item()
    assert behind < (1e-3 if dtype == "fp32" else 0.3), f"{behind} behind the likeliest token"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_speculation_is_lossless(shape: str, dtype: str) -> None:
    """Fault: speculation that changes the text. Joining late, in chunks, preempted, at page 1."""
    target, network = pair(dtype)
    configs: list[dict[str, Any]] = [
        {"max_running_requests": 8},
        {"max_running_requests": 3, "page_size": 1, "chunked_prefill_size": 7},
        {"page_size": 4, "num_pages": 1 + 26 + SHAPES[shape].scratch},
    ]
    for config in configs:
        engine = make_engine(target, network, SHAPES[shape], **config)
        compare(dtype, outputs(run_all(engine, JOBS)))


def always(_: int) -> bool:
    return True


def never(_: int) -> bool:
    return False


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [chain(1), chain(5), SpeculationConfig(num_steps=4, eagle_topk=3, num_draft_tokens=13)],
    ids=["chain 1", "chain 5", "tree"],
)
def test_perfect_and_wrong_drafters(shape: SpeculationConfig, dtype: str) -> None:
    """Fault: width off by one (s#8228). Every cycle full, or every cycle one token."""
    target, _ = pair(dtype)
    beyond = [
        Job(prompt=j.prompt, params=SamplingParams(max_tokens=32, temperature=0.0)) for j in JOBS
    ]
    expected = alone(target, beyond)
    texts = [[*j.prompt, *text] for j, text in zip(beyond, expected, strict=True)]
    jobs = [Job(prompt=j.prompt, params=SamplingParams(max_tokens=20)) for j in JOBS]
    for right, full in ((True, shape.depth + 1), (False, 1)):
        drafter = ScriptedDrafter(texts, shape, {True: always, False: never}[right])
        requests = run_all(make_engine(target, drafter, shape), jobs)
        same = [r for r, t in zip(requests, expected, strict=True) if r.output == t[:20]]
        assert len(same) >= len(jobs) - (dtype == "bf16")
        for request in same:
            assert set(request.accept_lengths) == {full}


@pytest.mark.parametrize("dtype", TYPES)
def test_noise_is_the_cpus(dtype: str) -> None:
    """Fault: draws that depend on the device. The hash is the same, the logarithm nearly."""
    del dtype
    seed, index = torch.tensor([0, 7, 2**40 + 3]), torch.tensor([1, 500, 9])
    ids = torch.arange(5000)
    ours = gumbel_noise(*(x.to(DEVICE) for x in (seed, index, ids))).cpu()
    assert torch.allclose(ours, gumbel_noise(seed, index, ids), atol=1e-4)


def steady(engine: Engine) -> tuple[torch.Tensor, list[Request]]:
    """Run prompts and two cycles, then give every running request all pages it can use."""
    state, scheduler = engine.runner.parts.state, engine.scheduler
    for _ in range(3):
        engine.step()
    running = [r for r in scheduler.active if r.status is Status.RUNNING]
    width = state.page_table.shape[1]
    for request in running:
        request.pages += scheduler.allocator.allocate(width - len(request.pages))
        row = torch.tensor(request.pages)
        state.page_table[request.slot] = row.to(state.page_table.device)
    slots = torch.tensor([r.slot for r in running]).to(state.kv_lens.device)
    return slots, running


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """Restore the sync detector."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("no_syncs")
def test_cycles_never_wait_for_the_device(shape: str, kind: str, dtype: str) -> None:
    """Fault: hidden host sync in the cycle (s#10226, v PR#29957, v#20078).

    Steady cycles straight through `cycle`, with torch's sync detector on error.
    """
    target, network = pair(dtype)
    engine = make_engine(target, network, SHAPES[shape])
    params = {
        "greedy": SamplingParams(max_tokens=200),
        "sampled": SamplingParams(max_tokens=200, temperature=1.0),
        "filtered": SamplingParams(max_tokens=200, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01),
    }[kind]
    for prompt in random_prompts([9, 30, 2]):
        engine.add(prompt, params)
    slots, running = steady(engine)
    assert len(running) == 3
    before = max(r.kv_len for r in running)
    plan = PassShape(
        num_requests=3,
        num_new=SHAPES[shape].num_nodes,
        max_kv_len=before + 12 * (SHAPES[shape].depth + 1) + SHAPES[shape].scratch,
        sampled=kind != "greedy",
        filtered=kind == "filtered",
    )
    parts, results = engine.runner.parts, []
    with torch.inference_mode():
        cycle(parts, slots, plan, NoSpans())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(8):
            results.append(cycle(parts, slots, plan, NoSpans()))
        torch.cuda.set_sync_debug_mode("default")
    counts = torch.stack(results)[:, :, 0]
    assert counts.min() >= 1
    assert counts.max() <= SHAPES[shape].depth + 1


QUESTIONS = (
    "Explain photosynthesis to a child.",
    "Write a python function that adds two numbers.",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "List five fruits and their colours.",
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model's folder, where its package is installed."""
    try:
        return resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(f"no weights: {error.value}")


def answer(
    folder: Path, device: torch.device, dtype: torch.dtype, shape: SpeculationConfig
) -> list[Request]:
    """Four greedy answers of 64 tokens."""
    target, tokenizer = load_target(folder, dtype, device), Tokenizer.from_folder(folder)
    place = find_drafter("auto", "smollm2")
    assert place is not None, "a drafter for SmolLM2 is part of the package"
    network = load_drafter(place, target.config, dtype, device)
    config = EngineConfig(device=device.type, context_length=512, draft_weights="full")
    engine = Engine(target, tokenizer, drafter=network, speculation=shape, config=config)
    chats = ([{"role": "user", "content": q}] for q in QUESTIONS)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    return run_all(engine, [Job(prompt=tuple(tokenizer.chat(c)), params=params) for c in chats])


def mean_length(requests: list[Request]) -> float:
    lengths = [n for r in requests for n in r.accept_lengths]
    return sum(lengths) / len(lengths)


def test_the_real_model_says_what_it_says_on_a_cpu(smollm2: Path) -> None:
    """Fault: a GPU path that is nearly right. float32 texts equal; accept length within 3 %."""
    ours = answer(smollm2, DEVICE, torch.float32, chain(4))
    theirs = answer(smollm2, CPU, torch.float32, chain(4))
    equal = [a.output == b.output for a, b in zip(ours, theirs, strict=True)]
    assert sum(equal) >= len(equal) - 1, "more than one text differs"
    assert abs(mean_length(ours) / mean_length(theirs) - 1) < 0.03


@pytest.mark.parametrize("shape", ["chain 4", "tree", "ngram"])
def test_the_real_model_is_lossless(smollm2: Path, shape: str) -> None:
    """Fault: speculation that changes the text of the real model, in float32."""
    plain = answer(smollm2, DEVICE, torch.float32, NONE)
    drafted = answer(smollm2, DEVICE, torch.float32, SHAPES[shape])
    equal = [a.output == b.output for a, b in zip(plain, drafted, strict=True)]
    assert sum(equal) >= len(equal) - 1, "more than one text differs"
    assert mean_length(drafted) > 1.2
