"""The bench counts what the engine did, on tiny engines whose drafter is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import Engine
from eyas.models.decoder import Decoder
from eyas.report import bench as module
from eyas.report.answering import Answering, staged
from eyas.report.bench import measure, warm_up
from eyas.report.options import BenchConfig
from eyas.report.table import STAGES, show
from eyas.speculate.drafter import Drafter
from tests.helpers import (
    Job,
    ScriptedDrafter,
    alone,
    make_engine,
    random_prompts,
    tiny_drafter,
    tiny_target,
)

PROMPTS = random_prompts((5, 17, 9))
CHAIN = SpeculationConfig.chain(3)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_target()


def params(tokens: int = 24, **rest: Any) -> list[SamplingParams]:
    one = SamplingParams(max_tokens=tokens, **rest)
    return [dataclasses.replace(one, seed=i) for i in range(len(PROMPTS))]


def perfect(target: Decoder, tokens: int) -> Drafter:
    jobs = [Job(prompt=p, params=SamplingParams(max_tokens=tokens + 8)) for p in PROMPTS]
    texts = [(*p, *text) for p, text in zip(PROMPTS, alone(target, jobs), strict=True)]
    return ScriptedDrafter(texts, CHAIN)


def record_of(plain: Engine, spec: Engine, one: list[SamplingParams], **rest: Any) -> Any:
    config = BenchConfig(**{"rounds": 2, "stage_prompts": 1, **rest})
    return measure(plain, spec, PROMPTS, one, config)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_record_of_a_random_drafter(target: Decoder, temperature: float) -> None:
    spec = make_engine(target, tiny_drafter(), CHAIN)
    record = record_of(make_engine(target), spec, params(temperature=temperature))
    assert record["tokens_equal"]
    assert record["differing_pairs"] == []
    assert record["num_pairs"] == 2 * len(PROMPTS)
    assert record["num_nodes"] == 4
    assert sum(record["histogram"]) == record["spec"]["cycles"]
    assert len(record["histogram"]) == 4
    assert record["plain"]["tokens"] == record["spec"]["tokens"] == 2 * 24 * len(PROMPTS)
    for side in ("plain", "spec"):
        for key in ("tok_per_s", "end_to_end_tok_per_s", "first_token_ms", "step_ms"):
            assert record[side][key] > 0, (side, key)
    assert set(STAGES) == set(record["stages_ms"]["spec"]) == set(record["stages_ms"]["plain"])
    for key in ("speedup", "speedup_end_to_end", "break_even", "verify_over_decode"):
        assert record[key] > 0, key
    shares = record["spec"]["acceptance_by_position"]
    assert shares == sorted(shares, reverse=True)
    assert record["spec"]["accept_length"] == pytest.approx(1 + sum(shares))


def test_a_perfect_drafter_is_counted_as_perfect(target: Decoder) -> None:
    """Also where the token limit cuts the last cycle: 22 tokens behind the first are 5.5 cycles."""
    spec = make_engine(target, perfect(target, 23), CHAIN)
    record = record_of(make_engine(target), spec, params(23))
    assert record["spec"]["accept_length"] == 4.0
    assert record["spec"]["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert record["histogram"] == [0, 0, 0, record["spec"]["cycles"]]
    assert record["spec"]["cycles"] == 2 * len(PROMPTS) * 6


def test_a_batch_gives_the_same_tokens_and_cycles(target: Decoder) -> None:
    spec = make_engine(target, perfect(target, 23), CHAIN)
    record = record_of(make_engine(target), spec, params(23), batch_size=2)
    assert record["tokens_equal"]
    assert record["num_pairs"] == 2 * 2
    assert record["spec"]["accept_length"] == 4.0


def test_a_cycle_cut_by_a_stop_is_left_out(target: Decoder) -> None:
    drafter = perfect(target, 23)
    text = alone(target, [Job(prompt=PROMPTS[0], params=SamplingParams(max_tokens=23))])[0]
    at = next(i for i in range(5, 23) if text.index(text[i]) == i and i % 4 not in (0,))
    run = Answering(
        make_engine(target, drafter, CHAIN),
        PROMPTS[:1],
        [SamplingParams(max_tokens=23, stop_token_ids=(text[at],))],
    ).run()
    assert run.requests[0].output == text[: at + 1]
    assert run.accept_lengths() == [4] * (at // 4)


def test_different_texts_are_told(target: Decoder) -> None:
    """Two targets: whoever breaks losslessness must not get a speed-up without a red line."""
    other = make_engine(tiny_target(seed=7), tiny_drafter(), CHAIN)
    record = record_of(make_engine(target), other, params())
    assert not record["tokens_equal"]
    assert record["differing_pairs"]
    console = Console(record=True, width=100)
    show(console, record)
    assert "DIFFER" in console.export_text()


def test_the_two_sides_swap_their_order(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[bool, tuple[int, ...]]] = []

    class Noted(Answering):
        def run(self) -> Answering:
            order.append((self.engine.speculation.algorithm != "NONE", self.requests[0].prompt))
            return super().run()

    monkeypatch.setattr(module, "Answering", Noted)
    spec = make_engine(target, tiny_drafter(), CHAIN)
    monkeypatch.setattr(module, "WARMUP_RUNS", (1, 1))
    record_of(make_engine(target), spec, params(4))
    turns = order[2 : 2 + 4 * len(PROMPTS)]
    first = [turns[i] for i in range(0, len(turns), 2)]
    assert [side for side, _ in first] == [False, True, False, True, False, True]
    assert [prompt for _, prompt in first] == PROMPTS * 2


def test_stages_fill_the_step(target: Decoder) -> None:
    engine = make_engine(target, tiny_drafter(), CHAIN)
    with staged(engine):
        run = Answering(engine, PROMPTS[:1], params()[:1]).run()
    steps = [s for s in run.steps if s.decoding]
    assert len(steps) == len(run.requests[0].accept_lengths)
    for step in steps:
        assert set(step.stages_ms) == set(STAGES)
        assert sum(step.stages_ms.values()) == pytest.approx(step.seconds * 1e3)
        assert all(value >= 0 for value in step.stages_ms.values())
    assert not any(s.stages_ms for s in Answering(engine, PROMPTS[:1], params()[:1]).run().steps)


def test_warm_up_is_bounded_and_says_how_it_ended(target: Decoder) -> None:
    found = warm_up(make_engine(target), (PROMPTS[:1], params()[:1]))
    assert 3 <= found["runs"] == len(found["tok_per_s"]) <= 8
    assert found["stable"] or found["runs"] == 8


def test_prompts_are_checked_before_anything_runs(target: Decoder) -> None:
    plain, spec = make_engine(target), make_engine(target, tiny_drafter(), CHAIN)
    bad = [*PROMPTS[:2], (999,)]
    with pytest.raises(Exception, match="token id 999"):
        measure(plain, spec, bad, params(), BenchConfig())
    assert not plain.scheduler.has_work
    assert not spec.scheduler.has_work


def test_the_table_shows_every_part(target: Decoder) -> None:
    spec = make_engine(target, tiny_drafter(), CHAIN, **dataclasses.asdict(EngineConfig(seed=1)))
    record = record_of(make_engine(target), spec, params())
    record["drafts_without_noise"] = {"accept_length": 1.5}
    console = Console(record=True, width=100)
    show(console, record)
    text = console.export_text()
    for part in ("warm-up", "decode tok/s", "verify", "Acceptance", "break-even", "equal", "1.50"):
        assert part in text, part


def test_stages_that_do_not_add_up_are_told(target: Decoder) -> None:
    """Fault: verify over decode of a busy moment, shown beside a cycle that it contradicts."""
    spec = make_engine(target, tiny_drafter(), CHAIN, **dataclasses.asdict(EngineConfig(seed=1)))
    record = record_of(make_engine(target), spec, params())
    texts = []
    for factor in (1.0, 4.0):
        record["plain"]["step_ms"] = sum(record["stages_ms"]["plain"].values())
        record["spec"]["step_ms"] = sum(record["stages_ms"]["spec"].values()) / factor
        console = Console(record=True, width=400)
        show(console, record)
        texts.append(console.export_text())
    assert "add up" not in texts[0]
    assert "spec: stages add up to" in texts[1]
    assert "plain: stages add up to" not in texts[1]
