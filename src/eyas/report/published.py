"""Public figures of 8 x RTX PRO 6000 boxes, and of engines on one H200, as scenarios to predict.

Figures are others' measurements of Kimi-K2.5 and K2.6 (61 layers, experts in 4 bits), and our own
of peers; nothing of a prediction is taken from a row of this list. What the planner can't express
is named in `LEFT_OUT`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eyas.config import SpeculationConfig
from eyas.estimate import EYAS, SGLANG, VLLM, Prediction, Scenario, Software
from eyas.hardware import Curve, load_profile
from eyas.report.scenarios import LATENT, read_drafter, read_target
from eyas.setting import Precision, Setting
from eyas.speculate.simulate import rates_for

WIKI = "github.com/local-inference-lab/rtx6kpro"
KIMI_PAGE = f"{WIKI}, models/kimi-k26.md"
KIMI_LOG = f"{WIKI}, findings on Kimi-K2.6 with long contexts"
THREAD = "reported for SGLang, Kimi-K2.5 and K2.6, TP=8"
PEERS = "measured on one H200, 2026-11-29 (eyas: f1e284d), random weights, accept length 1"

TRITON_MLA = Curve(
    ((5.76e6, 38.0), (17.28e6, 56.0), (57.6e6, 96.0), (69.12e6, 134.0), (138.24e6, 280.0))
)
"""vLLM's Triton MLA with 8 heads and 8-bit latents on this GPU, us over bytes: 10k, 30k and 100k
positions of one request, 30k of 4 and of 8 (`KIMI_LOG`)."""
SGLANG_BOX = dataclasses.replace(SGLANG, all_reduce="nccl")
"""Without NVLink SGLang takes NCCL."""
VLLM_BOX = dataclasses.replace(VLLM, latent_us=TRITON_MLA)
ACCEPTED = 2.34
"""Middle of the published mean accept lengths of 3 drafts, 2.0 .. 2.68 (`KIMI_LOG`)."""
TUNED, UNTUNED, CLIFF, NO_PEER = (
    f"rtx-pro-6000-{kind}" for kind in ("tuned", "untuned", "cliff", "no-peer")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure and the scenario that it is of."""

    what: str
    source: str
    low: float
    high: float
    unit: str
    """tok/s or ms."""
    scenario: Scenario
    quantity: Callable[[Prediction], float]

    @property
    def middle(self) -> float:
        """Of the published range."""
        return (self.low + self.high) / 2


def kimi(
    profile: str = TUNED,
    software: Software = SGLANG_BOX,
    *,
    drafts: int = 0,
    accepted: float = ACCEPTED,
    context: int = 500,
    batch: int = 1,
    kv_bits: float = 16.0,
    context_ranks: int = 1,
) -> Scenario:
    """Kimi-K2.5 over 8 ranks, with its published drafter of latent attention."""
    target = read_target("shape:kimi-k2.5")
    none = SpeculationConfig(algorithm="NONE")
    setting = Setting(
        ranks=8,
        batch=batch,
        context=context,
        precision=Precision(expert_bits=4.5, kv_bits=kv_bits),
        context_ranks=context_ranks,
        sharded_drafter=True,
        kv_per_node=software.latent_us is not None,
    )
    return Scenario(
        target=target,
        drafter=read_drafter(LATENT, target),
        speculation=SpeculationConfig.chain(drafts) if drafts else none,
        setting=setting,
        profile=load_profile(profile),
        software=software,
        rates=rates_for(accepted, drafts)[:1] if drafts else (),
    )


def _plain(found: Prediction) -> float:
    return found.plain_tok_per_s


def _tokens(found: Prediction) -> float:
    return found.tok_per_s


def _cycle(found: Prediction) -> float:
    return found.cycle_ms


def _decode(found: Prediction) -> float:
    return found.decode_ms


def _figure(
    what: str,
    source: str,
    value: float | tuple[float, float],
    scenario: Scenario,
    quantity: Callable[[Prediction], float] = _plain,
) -> Figure:
    low, high = value if isinstance(value, tuple) else (value, value)
    unit = "tok/s" if quantity in (_plain, _tokens) else "ms"
    return Figure(
        what=what,
        source=source,
        low=low,
        high=high,
        unit=unit,
        scenario=scenario,
        quantity=quantity,
    )


def full_graph() -> Iterator[Figure]:
    """vLLM with the whole verify in a graph: 3 drafts, 8-bit keys."""
    for context, rate in ((2000, 116.6), (10_000, 112.8), (30_000, 107.5)):
        scenario = kimi(software=VLLM_BOX, drafts=3, context=context, kv_bits=8)
        name = f"vLLM, 3 drafts, full graph, {context // 1000}k"
        yield _figure(f"{name}: cycle", KIMI_LOG, (19, 21), scenario, _cycle)
        yield _figure(f"{name}: rate", KIMI_LOG, rate, scenario, _tokens)


def decoding() -> Iterator[Figure]:
    """Plain decoding."""
    yield _figure("SGLang, decode in graphs", THREAD, (82, 83), kimi())
    yield _figure("SGLang, 2k", WIKI, (73, 90), kimi(context=2000))
    quick = dataclasses.replace(VLLM_BOX, latent_us=None)
    yield _figure("vLLM, FA2, 16-bit keys", WIKI, 90, kimi(software=quick))
    yield _figure("vLLM, Triton MLA, 16-bit keys", WIKI, 78, kimi(software=VLLM_BOX))
    short = kimi(software=VLLM_BOX, kv_bits=8, context=300)
    yield _figure("vLLM, 8-bit keys, early image", WIKI, 79, short)
    for context, rate in ((300, 88.5), (16_384, 82.6), (32_768, 77.5), (65_536, 68.6)):
        longer = kimi(software=VLLM_BOX, kv_bits=8, context=context)
        name = f"vLLM, 8-bit keys, last image, {context // 1024}k"
        yield _figure(name, KIMI_PAGE, rate, longer)
    longest = kimi(software=VLLM_BOX, kv_bits=8, context=131_072)
    yield _figure("vLLM, 8-bit keys, last image, 128k", KIMI_PAGE, 55.4, longest)
    quick_host = dataclasses.replace(SGLANG_BOX, all_reduce="best")
    yield _figure("peer access off", WIKI, 70, kimi(NO_PEER, quick_host))


def shared_keys() -> Iterator[Figure]:
    """Keys of a request shared among ranks (decode context parallel)."""
    for ranks, context, rate in (
        (4, 300, 74.5),
        (4, 131_072, 60.3),
        (8, 300, 74.1),
        (8, 131_072, 65.6),
    ):
        shared = kimi(software=VLLM_BOX, kv_bits=8, context=context, context_ranks=ranks)
        name = f"vLLM, keys over {ranks} ranks, {context // 1024}k"
        yield _figure(name, KIMI_PAGE, rate, shared)
    early = kimi(software=VLLM_BOX, kv_bits=8, context=300, context_ranks=8)
    yield _figure("vLLM, keys over 8 ranks, early image", WIKI, (65, 68), early)
    for context, profile, rate in (
        (300, NO_PEER, 44.0),
        (100_000, TUNED, 36.0),
        (100_000, NO_PEER, 29.0),
        (200_000, TUNED, 27.0),
        (200_000, NO_PEER, 23.0),
    ):
        words = "peer access" if profile == TUNED else "no peer access"
        shared = kimi(profile, VLLM_BOX, kv_bits=8, context=context, context_ranks=8)
        name = f"vLLM, keys over 8 ranks, early image, {context // 1000}k, {words}"
        yield _figure(name, WIKI, rate, shared)


def batches() -> Iterator[Figure]:
    """Several requests, no speculation."""
    for batch, rate in (
        (2, 148.4),
        (4, 233.8),
        (8, 340.7),
        (16, 475.2),
        (32, 823.6),
        (64, 1330.2),
        (128, 2026.3),
    ):
        many = kimi(software=VLLM_BOX, kv_bits=8, context=300, batch=batch)
        yield _figure(f"vLLM, {batch} requests", KIMI_PAGE, rate, many)
    many = kimi(software=VLLM_BOX, kv_bits=8, context=300, batch=128, context_ranks=8)
    yield _figure("vLLM, keys over 8 ranks, 128 requests", WIKI, (1144, 1527), many)


def speculating() -> Iterator[Figure]:
    """Three drafts in other settings."""
    for context, rate in ((300, 114.1), (16_384, 108.1), (65_536, 85.6), (131_072, 66.6)):
        longer = kimi(software=VLLM_BOX, drafts=3, kv_bits=8, context=context)
        name = f"vLLM, 3 drafts, last image, {context // 1024}k"
        yield _figure(name, KIMI_PAGE, rate, longer, _tokens)
    for ranks, rate in ((4, 98.8), (8, 90.4)):
        shared = kimi(software=VLLM_BOX, drafts=3, kv_bits=8, context=300, context_ranks=ranks)
        name = f"vLLM, 3 drafts, keys over {ranks} ranks"
        yield _figure(name, KIMI_PAGE, rate, shared, _tokens)
    slow = dataclasses.replace(VLLM_BOX, prefill_attention=True)
    for context, cycle in ((2000, 31.4), (10_000, 71.2), (30_000, 92.4)):
        outside = kimi(software=slow, drafts=3, kv_bits=8, context=context)
        name = f"vLLM, 3 drafts, verify outside the graph, {context // 1000}k"
        yield _figure(name, KIMI_LOG, cycle, outside, _cycle)


BEFORE = dataclasses.replace(EYAS, joins=False, cache_launches=1)
"""eyas when its figures here were taken: every norm, gate and cache write a launch of its own."""


def peers() -> Iterator[Figure]:
    """SGLang, vLLM, and eyas on one H200."""
    for name, software, shape, decode, cycles in (
        ("eyas", BEFORE, "llama-3.1-8b", (4.93,), {3: (5.82,)}),
        ("eyas", BEFORE, "smollm2-135m", (1.03,), {3: (1.32,)}),
        ("eyas", BEFORE, "deepseek-v2-lite", (3.27,), {3: (5.65,)}),
        ("SGLang", SGLANG, "llama-3.1-8b", (4.78, 5.09, 5.72), {3: (6.79, 6.98, 8.39)}),
        ("SGLang", SGLANG, "llama-3.1-8b", (), {7: (8.14, 8.77, 11.48)}),
        ("vLLM", VLLM, "llama-3.1-8b", (4.88, 5.09, 5.79), {2: (5.51, 5.84, 6.86)}),
        ("vLLM", VLLM, "llama-3.1-8b", (), {3: (5.80, 6.17, 7.37), 7: (7.00, 7.47, 10.74)}),
        ("SGLang", SGLANG, "deepseek-v2-lite", (3.45, 6.9), {3: (6.63, 11.7)}),
        ("vLLM", VLLM, "deepseek-v2-lite", (3.19,), {}),
        ("SGLang", SGLANG, "smollm2-135m", (1.25,), {3: (5.07,)}),
        ("vLLM", VLLM, "smollm2-135m", (2.13,), {3: (2.97,)}),
    ):
        for batch, value in zip((1, 8, 32), decode, strict=False):
            what = f"{name}, {shape}, decode, batch {batch}"
            yield _figure(what, PEERS, value, _peer(shape, software, 0, batch), _decode)
        for drafts, values in cycles.items():
            for batch, value in zip((1, 8, 32), values, strict=False):
                what = f"{name}, {shape}, {drafts} drafts, batch {batch}"
                yield _figure(what, PEERS, value, _peer(shape, software, drafts, batch), _cycle)


def _peer(shape: str, software: Software, drafts: int, batch: int) -> Scenario:
    target = read_target(f"shape:{shape}")
    none = SpeculationConfig(algorithm="NONE")
    return Scenario(
        target=target,
        drafter=read_drafter("usual", target),
        speculation=SpeculationConfig.chain(drafts) if drafts else none,
        setting=Setting(batch=batch, context=512),
        profile=load_profile("h200"),
        software=software,
        rates=(0.0,) if drafts else (),
    )


LEFT_OUT = (
    ("Qwen3.5-397B, TP=4: 67 .. 76 tok/s", "its linear attention is not counted"),
    ("GLM-5, TP=8: 53 .. 102 tok/s", "its sparse attention is not counted"),
    (
        "Kimi-K2.5, experts spread over ranks, memory overclocked: 101 tok/s",
        "whole experts on single ranks, and other clocks, are not counted",
    ),
    ("8 % at 128 requests by the longest allowed length", "strides of page tables are not counted"),
    (
        "100 requests without peer access faster than with",
        "collectives of many megabytes through host memory are not in the tables",
    ),
)
"""Public figures of such boxes, and why the planner has no prediction for them."""
