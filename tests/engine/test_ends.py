"""How requests end: stops inside accepted runs, limits, aborts, and what is shown on the way.

The drafter is perfect, so every cycle commits a run of several tokens, and stops fall on every
place in a run. Expected ends are found by reading the plain text token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine.engine import Engine
from eyas.engine.request import FinishReason, Request, Status
from tests.helpers import (
    NONE,
    VOCAB,
    Job,
    ScriptedDrafter,
    alone,
    chain,
    check,
    make_engine,
    random_prompts,
    run_all,
    tiny_drafter,
    tiny_target,
    toy_tokenizer,
)

PROMPT = random_prompts([9], seed=5)[0]
LENGTH = 40
SAMPLED = {"temperature": 1.0, "seed": 12}
TARGET = tiny_target()
SHAPES = {
    "plain": NONE,
    "chain": chain(5),
    "tree": SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=10),
}


def params(**changes: object) -> SamplingParams:
    return SamplingParams.from_dict({**SAMPLED, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What plain decoding writes behind the prompt."""
    return alone(TARGET, [Job(prompt=PROMPT, params=params(max_tokens=LENGTH))])[0]


def engine_for(shape: str, text: list[int]) -> Engine:
    speculation = SHAPES[shape]
    drafter = ScriptedDrafter([[*PROMPT, *text]], speculation) if shape != "plain" else None
    return make_engine(TARGET, drafter, speculation, max_running_requests=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a request must end."""

    tokens: list[int]
    text: str
    reason: str


def expected_end(text: list[int], one: SamplingParams, eos: tuple[int, ...] = ()) -> End:
    """Read the text token by token."""
    decode = toy_tokenizer().decode
    stops = set(one.stop_token_ids) | (set() if one.ignore_eos else set(eos))
    for count in range(1, one.max_tokens + 1):
        tokens = text[:count]
        if tokens[-1] in stops:
            return End(tokens=tokens, text=decode(tokens[:-1]), reason="stop")
        shown = decode(tokens)
        found = [shown.index(s) for s in one.stop if s in shown]
        if found:
            return End(tokens=tokens, text=shown[: min(found)], reason="stop")
    return End(tokens=text[: one.max_tokens], text=decode(text[: one.max_tokens]), reason="length")


class Stream:
    """What a reader sees of every request, step by step; it may never be taken back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shown: dict[int, str] = {}
        self.requests: dict[int, Request] = {}

    def __call__(self) -> None:
        for request in self.engine.scheduler.active:
            self.requests[request.id] = request
        for request in self.requests.values():
            if request.detokenizer is None:
                continue
            now = request.text[: request.safe_text_length()]
            before = self.shown.get(request.id, "")
            assert now.startswith(before), "text was taken back"
            self.shown[request.id] = now


def run(
    shape: str, text: list[int], wanted: list[SamplingParams], stream: bool = False
) -> list[Request]:
    """Run requests that differ in their ends only, and compare each with its expected end."""
    engine = engine_for(shape, text)
    watch = Stream(engine)
    jobs = [Job(prompt=PROMPT, params=one, stream=stream) for one in wanted]
    requests = run_all(engine, jobs, after_step=watch)
    for request, one in zip(requests, wanted, strict=True):
        end, output = expected_end(text, one), engine.output(request)
        assert output.token_ids == end.tokens, one
        assert output.text == end.text, one
        assert output.finish_reason == end.reason, one
        assert output.prompt_token_ids == PROMPT
        committed = sum(output.accept_lengths) + 1
        assert committed >= len(output.token_ids), "fewer tokens committed than counted"
        if request.detokenizer is not None and request.id in watch.shown:
            assert watch.shown[request.id] == end.text
    return requests


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_tokens_at_every_offset(shape: str, text: list[int]) -> None:
    """Fault: a stop token inside an accepted run missed, or tokens past it leak (s#31599).

    Every offset of a run times every max_tokens; a stop that comes after max_tokens changes
    nothing, one that comes twice ends at its first place.
    """
    unseen = next(t for t in range(VOCAB) if t not in text)
    wanted = [
        params(max_tokens=limit, stop_token_ids=(text[offset], unseen))
        for offset in range(15)
        for limit in range(1, 16)
    ]
    requests = run(shape, text, wanted)
    assert {r.finish_reason for r in requests} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_strings_at_every_offset(shape: str, text: list[int]) -> None:
    """Fault: a stop string across tokens missed, shown in part, or cut late (s PR#23802).

    Every substring of the beginning, in tokens and across them, times limits around its place.
    """
    whole = toy_tokenizer().decode(text)[:26]
    strings = {whole[i : i + n] for i in range(22) for n in (1, 2, 3, 4)}
    strings = {s for s in strings if "\N{REPLACEMENT CHARACTER}" not in s}
    wanted = [
        params(max_tokens=limit, stop=(one,))
        for one in sorted(strings)
        for limit in (1, 4, 5, 6, 7, 12, LENGTH)
    ]
    run(shape, text, wanted, stream=True)


def test_several_stops_at_once(text: list[int]) -> None:
    """Fault: the wrong one of several stops. The earliest place in the text wins, then the cut."""
    whole = toy_tokenizer().decode(text)
    wanted = [
        params(max_tokens=LENGTH, stop=(whole[8:12], whole[5:9], "no such text")),
        params(max_tokens=LENGTH, stop=(whole[5:7], whole[4:9])),
        params(max_tokens=LENGTH, stop=(whole[6:10],), stop_token_ids=(text[4],)),
        params(max_tokens=LENGTH, stop=(whole[2:4],), stop_token_ids=(text[9],)),
        params(max_tokens=LENGTH, stop=("no such text",)),
    ]
    for shape in SHAPES:
        run(shape, text, wanted, stream=True)
        run(shape, text, wanted)


def test_part_of_a_stop_string_is_held_back(text: list[int]) -> None:
    """Fault: streaming shows the beginning of a stop string. A near miss is shown in the end."""
    whole = toy_tokenizer().decode(text)
    near = [whole[i : i + 4] + "#" for i in range(20)]
    wanted = [params(max_tokens=limit, stop=(s,)) for s in near for limit in (5, 13, LENGTH)]
    for request in run("chain", text, wanted, stream=True):
        assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("shape", SHAPES)
def test_eos_ends_unless_ignored(shape: str, text: list[int]) -> None:
    """Fault: the end-of-sequence token missed in a run, or honoured though ignored."""
    for offset in (0, 1, 3, 6, 7):
        eos = (text[offset],)
        drafter = ScriptedDrafter([[*PROMPT, *text]], SHAPES[shape]) if shape != "plain" else None
        engine = make_engine(TARGET, drafter, SHAPES[shape], eos=eos)
        wanted = [
            params(max_tokens=20, ignore_eos=False),
            params(max_tokens=20, ignore_eos=True),
            params(max_tokens=20, ignore_eos=False, stop_token_ids=(text[2],)),
        ]
        requests = run_all(engine, [Job(prompt=PROMPT, params=one) for one in wanted])
        for request, one in zip(requests, wanted, strict=True):
            end = expected_end(text, one, eos)
            assert engine.output(request).token_ids == end.tokens
            assert engine.output(request).text == end.text


def test_the_end_is_the_same_streamed_or_not(text: list[int]) -> None:
    """Fault: text that depends on how it is read. A stop token's own text is never shown."""
    one = params(max_tokens=20, stop_token_ids=(text[5],))
    outputs = []
    for stream in (False, True):
        engine = engine_for("chain", text)
        request = run_all(engine, [Job(prompt=PROMPT, params=one, stream=stream)])[0]
        outputs.append(engine.output(request))
    assert outputs[0] == outputs[1]


def test_what_a_stop_cuts_is_not_in_the_count(text: list[int]) -> None:
    """Fault: usage counts that disagree with the text (s#39826)."""
    one = params(max_tokens=LENGTH, stop_token_ids=(text[8],))
    request = run("chain", text, [one])[0]
    first = text.index(text[8])
    assert len(request.output) == first + 1
    assert request.length == len(PROMPT) + first + 1
    assert sum(request.accept_lengths) + 1 >= len(request.output)


STATES = ("waiting", "prefill", "running", "preempted", "finished")


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state: str) -> None:
    """Fault: pages or output of an aborted request (v#41190); an abort that harms the others."""
    network = tiny_drafter()
    prompts = random_prompts([40, 12, 30, 25], seed=3)
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=30, temperature=1.0, seed=i))
        for i, p in enumerate(prompts)
    ]
    expected = alone(TARGET, jobs)
    config: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 16}
    config |= {"waiting": {"max_running_requests": 2}, "preempted": {"num_pages": 30}}.get(
        state, {}
    )
    engine = make_engine(TARGET, network, chain(3), **config)
    requests = [engine.add(job.prompt, job.params) for job in jobs]

    def in_state(request: Request) -> bool:
        if state == "preempted":
            return request.status is Status.WAITING and request.num_preemptions > 0
        return request.status.value == state and not request.num_preemptions

    victim = None
    while victim is None:
        engine.step()
        check(engine)
        assert engine.scheduler.has_work, f"no request was ever {state}"
        partly = [r for r in requests if in_state(r) and (state != "prefill" or r.num_prefilled)]
        victim = partly[-1] if partly else None
    kept, free, held = list(victim.output), engine.scheduler.allocator.num_free, len(victim.pages)
    engine.abort(victim)
    engine.abort(victim)
    check(engine)
    assert engine.scheduler.allocator.num_free == free + held, "pages are free at once"
    while engine.scheduler.has_work:
        engine.step()
        check(engine)
    assert engine.scheduler.allocator.num_free == engine.config.num_pages - 1
    for request, want in zip(requests, expected, strict=True):
        if request is victim and state != "finished":
            assert request.output == kept == want[: len(kept)]
            assert engine.output(request).finish_reason == "abort"
        else:
            assert request.output == want


def test_a_new_request_takes_over_an_aborted_ones_slot() -> None:
    """Fault: leftovers of the former owner of a slot: length, pages, noise, candidates."""
    jobs = [
        Job(prompt=p, params=SamplingParams(max_tokens=12, temperature=t, seed=i), abort=a, join=j)
        for i, (p, t, a, j) in enumerate(
            zip(
                random_prompts([30, 3, 17, 9], seed=7),
                (1.0, 0.0, 0.7, 1.0),
                (4, None, None, None),
                (0, 5, 5, 6),
                strict=True,
            )
        )
    ]
    expected = alone(TARGET, jobs)
    for shape in (chain(4), chain(4, "NGRAM"), NONE):
        engine = make_engine(TARGET, tiny_drafter(), shape, max_running_requests=1, page_size=2)
        requests = run_all(engine, jobs)
        assert requests[0].finish_reason is FinishReason.ABORT
        assert [r.output for r in requests[1:]] == expected[1:]
