"""The GPU benchmark without a GPU: its rows and goals, its time, its record, and what it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import eyas.checkpoint
from eyas.cost import touched
from eyas.models.families import model_config
from tests.gpu_script import SHAPES, part, record, tiny_shapes
from tests.helpers import tiny_experts, tiny_target


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny networks under the names of the real shapes."""
    return tiny_shapes(tmp_path, monkeypatch)


def test_rows_are_held_against_their_goals() -> None:
    """Fault: a goal that is met from the wrong side, or a figure without one that fails."""
    goals = part("goals")
    below, above = (goals.row("llama-3.1-8b decode B=1", value) for value in (4.29, 4.31))
    assert (below.goal, below.floor, below.peer) == (4.30, 3.42, 4.78)
    assert below.holds is True
    assert above.holds is False
    assert goals.row("llama-3.1-8b decode B=64", 9.0).holds is None
    for name in ("x K=3 B=1 host gap", "attention 8B N=4 B=1 C=1024 / N=1", "x eager cycles"):
        assert goals.goal_of(name).goal is not None, name
    assert goals.goal_of("attention 8B N=4 B=1 C=1024").goal is None
    assert goals.goal_of("a b host gap of c").goal is None


def test_nothing_starts_that_would_not_end_in_time() -> None:
    """Fault: a machine taken away in the middle of a part; a part left out in silence."""
    module, goals = part("record"), part("goals")
    now = [5.0]
    clock = module.Clock.of(100.0, lambda: now[0])
    found = module.Record(clock, Console(quiet=True))

    def take(_: Any) -> Iterator[Any]:
        now[0] += 40
        yield goals.row("a figure", 1.0)

    units = [
        module.Unit(name=n, seconds=s, take=take)
        for n, s in zip("abcd", (50, 90, 50, 20), strict=True)
    ]
    found.run(units)
    assert list(found.seconds) == ["a", "c", "d"]
    assert list(found.skipped) == ["b"]
    assert found.as_dict()["complete"] is False


def test_a_cut_run_leaves_what_it_found(tmp_path: Path) -> None:
    """Fault: rows lost with the run; a failing part that takes the others along."""
    module, goals = part("record"), part("goals")
    file = tmp_path / "gpu.json"
    found = record(file=file, about={"provenance": {"here": 1}})
    found.details["kernels of a"] = "a table"

    def good(_: Any) -> Iterator[Any]:
        yield goals.row("llama-3.1-8b decode B=1", 4.0)
        assert json.loads(file.read_text())["rows"], "written behind every figure"
        yield goals.row("another", 2.0, "x")

    def bad(_: Any) -> Iterator[Any]:
        yield goals.row("before the error", 1.0)
        raise RuntimeError("out of memory")

    def cut(_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    takes = {"bad": bad, "good": good, "cut": cut, "never": good}
    with pytest.raises(KeyboardInterrupt):
        found.run([module.Unit(name=n, seconds=1, take=t) for n, t in takes.items()])
    left = json.loads(file.read_text())
    assert (left["schema"], left["version"]) == ("eyas.gpu", 1)
    assert [r["name"] for r in left["rows"]] == [
        "before the error",
        "llama-3.1-8b decode B=1",
        "another",
    ]
    keys = {"name", "value", "unit", "goal", "floor", "peer", "holds"}
    assert all(set(r) == keys for r in left["rows"])
    assert left["rows"][1]["holds"] is True
    assert "out of memory" in left["failed"]["bad"]
    assert left["waiting"] == ["cut", "never"]
    assert left["complete"] is False
    assert left["provenance"] == {"here": 1}
    assert not list(tmp_path.glob("*.part"))


def test_rows_of_cycles_bear_the_names_of_goals(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a goal that no row is held against, since a name changed on one side."""
    start = part("start")
    monkeypatch.setattr(start, "probe", lambda *_: {"start to first token": 1.0, "import": 0.5})
    file, names = tiny / "gpu.json", set()
    runs = ["decode", "K=3", "K=7", "tree 5-4-16", "K=3 16-bit"]
    parts = ["cycles", "waits", "host", "batches", "capture", "modes", "deterministic", "start"]
    parts.append("attention")
    for flags in (
        ["--shapes", SHAPES[0], "--runs", *runs, "--parts", *parts],
        ["--shapes", *SHAPES[1:], "--runs", *runs[:2], "--parts", "cycles"],
    ):
        found = part("gpu").main(["--device", "cpu", "--json", str(file), *flags])
        assert not found.failed, found.failed
        assert len({row.name for row in found.rows}) == len(found.rows), "two rows of one name"
        names |= {row.name for row in found.rows}
        written = json.loads(file.read_text())
        assert written["flags"]["runs"] == flags[flags.index("--runs") + 1 : flags.index("--parts")]
        assert written["provenance"]["versions"]["torch"]
        assert set(written["skipped"]) == {"verify attention"} & set(written["seconds"])
    assert set(part("goals").GOALS) <= names
    assert "llama-3.1-8b K=3 B=32 host: plan" in names
    assert "llama-3.1-8b verify(4) B=1 C=20 deterministic on / auto" in names
    assert "llama-3.1-8b verify(4) B=1 C=40 as prefill / as decode" in names
    assert "llama-3.1-8b decode B=41, 40 captured / B=40" in names


def test_requests_that_end_while_timed_are_an_error(tiny: Path) -> None:
    """Fault: steps of an engine that has nothing left to do, timed as decoding."""
    module = part("builds")
    builds, decode = module.Builds("cpu"), module.SPECS["decode"]
    engine = builds.engine(SHAPES[0], decode, builds.config(1, context_length=40))
    timing = part("timing")
    with pytest.raises(RuntimeError, match="raise the context"), timing.running(engine, 1, 8):
        timing.step_ms(engine, 20)
    with timing.running(engine, 1, 8) as requests:
        assert requests[0].output
    assert not engine.scheduler.has_work


def test_engines_are_shared_until_another_shape_is_asked_for(tiny: Path) -> None:
    """Fault: a network built for every part, or two shapes' weights on one GPU."""
    module = part("builds")
    builds, decode = module.Builds("cpu"), module.SPECS["decode"]
    config = builds.config(1)
    first = builds.engine(SHAPES[0], decode, config)
    assert builds.engine(SHAPES[0], decode, config) is first
    other = builds.engine(SHAPES[0], module.SPECS["K=3"], config)
    assert other.runner.parts.target is first.runner.parts.target
    second = builds.engine(SHAPES[1], decode, config)
    assert second.runner.parts.target is not first.runner.parts.target
    assert builds.engine(SHAPES[0], decode, config) is not first


def test_touched_experts_are_counted() -> None:
    """Fault: experts counted once a row, or those of another layer."""
    cycles = part("cycles")
    target = tiny_target(moe=tiny_experts())
    sparse: list[Any] = [
        block.mlp.router for block in target.blocks if hasattr(block.mlp, "router")
    ]
    assert len(sparse) == 3
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))

    def run() -> None:
        for router in sparse:
            router(rows)

    apart = [len(set(router(rows)[0].flatten().tolist())) for router in sparse]
    assert cycles.touched_experts(target, run) == pytest.approx(sum(apart) / 3)
    assert min(apart) > 3
    rows = rows[:1].expand(6, -1)
    assert cycles.touched_experts(target, run) == 3
    assert not sparse[0]._forward_hooks


def test_bytes_of_a_pass_follow_the_experts() -> None:
    """Fault: a ratio of bytes that takes routing for even, or counts the dense layers' weights."""
    cycles, goals = part("cycles"), part("goals")
    file = eyas.checkpoint.SHAPES / "deepseek-v2-lite" / "config.json"
    config = model_config(json.loads(file.read_text()))
    moe = config.moe
    assert moe is not None
    one = 3 * config.hidden_size * moe.intermediate_size * 2
    few, many = (cycles.pass_bytes(config, 4, 512, n) for n in (6, 20))
    assert many - few == pytest.approx(26 * 14 * one)
    even = cycles.pass_bytes(config, 4, 512)
    assert even == pytest.approx(cycles.pass_bytes(config, 4, 512, touched(moe, 4)))
    plain = cycles.pass_bytes(config, 1, 512)
    assert 4.7e9 < plain < 5.1e9
    floor = goals.GOALS["deepseek-v2-lite decode B=1"].floor
    assert plain / goals.READ_BANDWIDTH * 1e3 == pytest.approx(floor, rel=0.05)


def test_a_profile_is_sorted_by_where_things_ran() -> None:
    """Fault: calls on the host taken for kernels; copies to the device for copies to the host."""
    timing, host = part("timing"), part("host")
    events = [
        ("DeviceType.CUDA", "Memcpy DtoH (Device -> Pinned)", 1.0),
        ("DeviceType.CUDA", "Memcpy HtoD (Pinned -> Device)", 1.0),
        ("DeviceType.CUDA", "norm", 2.0),
        ("DeviceType.CUDA", "norm", 4.0),
        ("DeviceType.CPU", "cudaGraphLaunch", 9.0),
        ("DeviceType.CPU", "cudaLaunchKernel", 9.0),
        ("DeviceType.CPU", "cuLaunchKernelEx", 9.0),
        ("DeviceType.CPU", "aten::add", 9.0),
    ]
    seen = timing.sort_events(iter(events))
    assert seen.launches() == 4
    assert seen.named(timing.TO_HOST) == [1.0]
    assert seen.called(host.LAUNCH) == 2
    assert seen.called(host.REPLAY) == 1
    assert seen.table().splitlines()[0].split() == ["6.0", "us", "2", "x", "3.00", "norm"]


def test_collectives_are_known_by_their_kernels() -> None:
    """Fault: annotations counted beside the kernels, or a gather for a sum."""
    events = [
        ("DeviceType.CUDA", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", 9.0),
        ("DeviceType.CUDA", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 8.0),
        ("DeviceType.CUDA", "nccl:all_reduce", 9.0),
        ("DeviceType.CUDA", "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgs)", 7.0),
    ]
    seen = part("timing").sort_events(iter(events))
    found = {what: seen.named(name) for what, name in part("ranks").COLLECTIVES.items()}
    assert found == {"all-reduces": [9.0], "all-gathers": [8.0], "broadcasts": [7.0]}


def test_watched_calls_are_themselves_again() -> None:
    """Fault: an engine that stays slower, or a class that loses its method."""
    host = part("host")

    class Thing:
        def work(self, x: int) -> int:
            return x + 1

    thing, spent = Thing(), {"here": 0.0, "there": 0.0}
    original = Thing.work
    with host.watched(thing, "work", "here", spent), host.watched(Thing, "work", "there", spent):
        assert thing.work(1) == 2
        assert Thing().work(2) == 3
    assert spent["here"] > 0
    assert spent["there"] > 0
    assert Thing.work is original
    assert "work" not in vars(thing)


def test_attention_is_held_over_one_row() -> None:
    """Fault: a ratio over another context, or over a figure that failed."""
    module, found = part("attention_part"), record()
    taken = [
        {"model": "8B", "nodes": n, "context": c, "us": us}
        for n, c, us in ((1, 1024, 10.0), (4, 1024, 11.0), (4, 8192, 30.0))
    ]
    for one in taken:
        for row in module.attention_rows(one, found):
            found.add(row)
    ratios = [r for r in found.rows if r.unit == "x"]
    assert [(r.name, r.value) for r in ratios] == [("attention 8B N=4 B=1 C=1024 / N=1", 1.1)]
    assert ratios[0].holds is True
