"""Ranges are put on and taken off without a trace, and change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.engine import Engine
from eyas.report.components import DEVICE
from eyas.report.explaining.host import logged
from eyas.report.explaining.log import Log, events, segments
from eyas.report.explaining.ranges import watched
from eyas.spans import NoSpans
from tests.helpers import (
    LATENT,
    NONE,
    TREES,
    Job,
    chain,
    make_engine,
    outputs,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_experts,
    tiny_model,
    tiny_target,
)

SHAPES = {
    "chain": chain(3),
    "tree": TREES[1],
    "ngram": chain(3, "NGRAM"),
    "none": NONE,
    "small model": chain(3, "STANDALONE"),
}
JOBS = [
    Job(prompt=p, params=SamplingParams(max_tokens=20, temperature=t, seed=3))
    for p, t in zip(random_prompts((5, 17)), (0.0, 1.0), strict=True)
]


def engine_of(shape: str, **changes: Any) -> Engine:
    speculation: SpeculationConfig = SHAPES[shape]
    drafter = tiny_model() if shape == "small model" else tiny_drafter()
    return make_engine(tiny_target(**changes), drafter, speculation)


def attributes(engine: Engine) -> dict[int, set[str]]:
    """Names that hang on the objects a cycle uses."""
    parts: Any = engine.runner.parts
    owners = [*parts.target.modules(), parts.pool, parts.attention, parts.drafter]
    growth = getattr(parts.drafter, "growth", None)
    return {i: set(vars(o)) for i, o in enumerate([*owners, growth]) if o is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_watched_run_writes_the_same_and_leaves_nothing(shape: str) -> None:
    """Faults: a wrapped norm with other bits; a range that stays on an engine for good."""
    expected = outputs(run_all(engine_of(shape), JOBS))
    engine = engine_of(shape)
    before = attributes(engine)
    with logged(engine, Log()):
        assert outputs(run_all(engine, JOBS)) == expected
        assert attributes(engine) != before
        if shape == "chain":
            network: Any = engine.runner.parts.drafter
            assert {"forward", "last", "fuse", "score"} <= vars(network.network).keys()
    assert attributes(engine) == before
    assert isinstance(engine.runner.spans, NoSpans)
    assert outputs(run_all(engine, JOBS)) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_segments_have_no_holes_and_known_names(shape: str) -> None:
    """Faults: time between ranges lost; a range that is never left."""
    engine, log = engine_of(shape), Log()
    with logged(engine, log):
        engine.add(JOBS[0].prompt, JOBS[0].params)
        for _ in range(4):
            log.mark(None)
            engine.step()
            log.mark(None)
            noted = events(log.take())
            found = segments(noted)
            assert all(s.length >= 0 for s in found)
            assert sum(s.length for s in found) == noted[-1].now - noted[0].now
            assert {s.part for s in found} <= {*DEVICE, "idle"}
    seen = {(s.stage, s.part) for s in found}
    for part in ("attention", "dense linear", "LM head", "norm/rope/elementwise", "KV write"):
        assert ("verify", part) in seen, part
    networks = {"chain", "tree", "small model"}
    assert (("draft", "sampling/acceptance") in seen) == (shape in networks)
    assert (("extend", "LM head") in seen) == (shape in networks)


def test_experts_and_latent_attention_have_their_components() -> None:
    """Fault: the linear layers of experts counted as dense ones; products of latents as norms."""
    changes = {"moe": tiny_experts(), "mla": LATENT, "num_kv_heads": 4}
    engine, log = engine_of("chain", **changes), Log()
    with logged(engine, log):
        engine.add(JOBS[0].prompt, JOBS[0].params)
        for _ in range(3):
            log.take()
            log.mark(None)
            engine.step()
            log.mark(None)
        found = segments(events(log.take()))
    verify = [s for s in found if s.stage == "verify"]
    assert sum(s.part == "MoE" for s in verify) >= 3
    total = {part: sum(s.length for s in verify if s.part == part) for part in DEVICE}
    assert total["dense linear"] > 0 and total["MoE"] > 0


def test_an_error_inside_takes_ranges_off() -> None:
    """Fault: an engine that is watched for ever once a step has failed."""
    engine = engine_of("chain")
    before = attributes(engine)
    with pytest.raises(RuntimeError, match="planted"), watched(engine.runner.parts, Log()):
        raise RuntimeError("planted")
    assert attributes(engine) == before
    assert torch.equal(engine.runner.parts.state.kv_lens, torch.zeros(9, dtype=torch.int64))
