"""Real weights: tokens a second with and without speculation, and what 8-bit drafts cost.

Greedy, one prompt at a time, a chain of 3 drafts. The small DeepSeek model comes with the
repository, SmolLM2 from its package where that is installed. `prompts.json` holds the built-in
prompts as tokens of SmolLM2's tokenizer, which both models use, so no tokenizer is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch

from eyas.checkpoint import resolve
from eyas.config import EngineConfig, SamplingParams
from eyas.distributed.group import SOLO
from eyas.engine.engine import Engine
from eyas.engine.networks import CheckpointSource, Networks
from eyas.engine.ranks import Ranks
from eyas.errors import CheckpointError
from eyas.report.answering import Answering
from eyas.speculate.checkpoints import find_drafter
from eyas.tokenizer import Tokenizer
from gpu_parts.builds import SPECS, Builds
from gpu_parts.goals import Row, row
from gpu_parts.record import Record

SMALL = Path(__file__).parents[2] / "assets" / "small-deepseek"
PROMPTS = Path(__file__).with_name("prompts.json")
END = 2
"""The token that ends an answer."""
RUN = "K=3"
CONTEXT = 1024


def prompts() -> list[list[int]]:
    """The built-in prompts as tokens."""
    found: list[list[int]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return found


def source_of(model: str, dtype: torch.dtype) -> CheckpointSource:
    """Target and drafter; raises `CheckpointError` where they are not at hand."""
    if model == "small-deepseek":
        return CheckpointSource(target=SMALL / "target", drafter=SMALL / "drafter", dtype=dtype)
    return CheckpointSource(target=resolve(model), drafter=find_drafter("auto", model), dtype=dtype)


def real(model: str, num_tokens: int, builds: Builds, record: Record) -> Iterator[Row]:
    """Plain decoding, speculation, and speculation with an 8-bit drafter."""
    try:
        source = source_of(model, torch.bfloat16)
    except CheckpointError as error:
        record.skip(f"{model} with real weights", str(error))
        return
    builds.free()
    device = torch.device(builds.device)
    networks = source.load(device, SOLO)
    engines = {
        "decode": engine_of(networks, "decode", device, draft_weights="full"),
        RUN: engine_of(networks, RUN, device, draft_weights="full"),
        f"{RUN} 8-bit drafter": engine_of(networks, RUN, device, draft_weights="int8"),
    }
    texts: dict[str, list[list[int]]] = {}
    lengths: dict[str, float] = {}
    for run, engine in engines.items():
        rate, lengths[run], texts[run] = answer(engine, num_tokens)
        yield row(f"{model} real {run}", rate, "tok/s")
        if run == "decode":
            continue
        yield row(f"{model} real {run}, accept length", lengths[run], "")
        apart = sum(a != b for a, b in zip(texts[run], texts["decode"], strict=True))
        yield row(f"{model} real {run}, texts that differ from plain", apart, "")
    rates = [record.value(f"{model} real {run}") for run in ("decode", RUN)]
    if rates[0] and rates[1]:
        yield row(f"{model} real {RUN} over decode", rates[1] / rates[0], "x")
    lost = 100 * (1 - lengths[f"{RUN} 8-bit drafter"] / lengths[RUN])
    yield row(f"{model} real 8-bit drafter, accept length lost", lost, "%")


def engine_of(
    networks: Networks,
    run: str,
    device: torch.device,
    ranks: Ranks | None = None,
    **changes: str | int,
) -> Engine:
    """An engine of one request over real networks, of all ranks if there are others."""
    values: dict[str, str | int] = {
        "device": device.type,
        "max_running_requests": 1,
        "context_length": CONTEXT,
        "tp": len(ranks.prints) if ranks else 1,
    }
    return Engine(
        networks.target,
        Tokenizer.of_ids(networks.target.config.vocab_size),
        drafter=networks.drafter,
        speculation=SPECS[run],
        config=EngineConfig.from_dict(values | changes),
        ranks=ranks,
    )


def answer(engine: Engine, num_tokens: int) -> tuple[float, float, list[list[int]]]:
    """Tokens a second without prefill, mean accept length, texts; one prompt after the other."""
    params = SamplingParams(max_tokens=num_tokens, stop_token_ids=(END,))
    Answering(engine, prompts()[:1], [params]).run()
    done = [Answering(engine, [prompt], [params]).run() for prompt in prompts()]
    steps = [step for one in done for step in one.steps if step.decoding]
    rate = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    lengths = [length for one in done for length in one.accept_lengths()]
    return rate, fmean(lengths), [one.requests[0].output for one in done]
