"""A machine's profile, measured on small sizes; whether the numbers are right shows elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eyas.errors import ConfigError
from eyas.estimate import EYAS, joined, predict
from eyas.hardware import HardwareProfile, load_profile
from eyas.layers.linear import Linear
from eyas.operations import Joins, mlp
from eyas.report import parts
from eyas.report.calibrate import calibrate, show
from eyas.report.collectives import Rounds, collectives
from eyas.report.options import CalibrateConfig, PlanConfig
from eyas.report.parts import Crowd, Layer, Machine, Sizes, curve
from eyas.report.records import write_record
from eyas.report.scenarios import scenario_of
from eyas.report.timing import Call, Timer

CPU = torch.device("cpu")
SMALL = Sizes(
    tensor_bytes=2**18,
    layers=(Layer(256, 128),),
    large=Layer(256, 128),
    many_rows=(128,),
    experts=((8, 64, 32, 2),),
    crowds=(16,),
    small=(Layer(64, 64), Layer(128, 64, gated=True)),
    attention=(Crowd(1, (1, 4), (16, 64)), Crowd(2, (1, 2, 4), (16, 32))),
    longest=128,
    vocabularies=(256, 1024),
)


def machine(dtype: torch.dtype = torch.bfloat16) -> Machine:
    timer = Timer(device=CPU, seconds=0.0)
    return Machine(device=CPU, dtype=dtype, timer=timer, cache_bytes=2**16, sizes=SMALL)


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return calibrate(CalibrateConfig(device="cpu", seconds=0.001, name="mine"), sizes=SMALL)


def test_every_constant_is_measured(profile: HardwareProfile) -> None:
    """Fault: a constant left at zero that a CPU has, or without a source."""
    assert profile.name == "mine"
    assert profile.num_devices == 1
    record = profile.to_json()
    gpu_only = {"eager_us", "graph_us", "copy_us", "host_us", "skew_us"}
    may_vanish = gpu_only | {"serial_ns", "decode_us", "cycle_us", "step_us"}
    for name, entry in record["constants"].items():
        assert "eyas calibrate" in entry["source"], name
        if name not in may_vanish:
            assert all(number > 0 for number in numbers(entry["value"])), name
    xs = [x for x, _ in profile.linear_us.points]
    assert xs == [64 * 64 * 2, 128 * 64 * 2, 256 * 128 * 2]
    assert [x for x, _ in profile.rows_factor.points] == list(parts.FEW_ROWS)
    assert profile.rows_factor(1) == 1
    assert [key for key, _ in profile.small_rows_factor.members] == xs[:2]
    for _, member in profile.small_rows_factor.members:
        assert [x for x, _ in member.points] == [*parts.FEW_ROWS, *SMALL.many_rows]
        assert member(1) == 1


def numbers(value: Any) -> list[float]:
    """All that are measured in a constant's plain value."""
    if not isinstance(value, list):
        return [value]
    return [number for _, y in value for number in numbers(y)]


def test_what_was_written_can_be_planned_with(tmp_path: Path, profile: HardwareProfile) -> None:
    """Fault: a profile that eyas plan refuses, or reads as another."""
    file = tmp_path / "mine.json"
    write_record(file, profile.to_json())
    assert load_profile(str(file)) == profile
    found = predict(scenario_of("shape:smollm2-135m", "usual", None, PlanConfig(profile=str(file))))
    assert 0 < found.decode_ms < found.cycle_ms
    out = io.StringIO()
    show(Console(file=out, width=80), profile)
    assert all(name in out.getvalue() for name in ("read_gb_s", "linear_us", "attention_us"))
    wide = 2 * 8 * 128 * 2
    family = profile.attention_us.members[0][1]
    assert f"8: [4: [{16 * wide:.3g}: {family(4, 16 * wide):.3g}, " in " ".join(
        out.getvalue().replace("│", " ").split()
    )
    json.dumps(profile.to_json())


def test_a_linear_layer_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rows that are not padded as the engine pads them, or one copy from the cache."""
    seen: list[tuple[int, torch.dtype, int]] = []
    one = machine(torch.float32)

    def us(self: Timer, calls: list[Call]) -> float:
        seen.extend((call().shape[0], call().dtype, len(calls)) for call in calls[:1])
        return 1.0

    monkeypatch.setattr(Timer, "us", us)
    parts.linear_us(one, Layer(64, 64), 1)
    parts.linear_us(one, Layer(64, 64), 6)
    copies = round(3 * 2**16 / (64 * 64 * 4)) + 1
    assert seen == [(4, torch.float32, copies), (8, torch.float32, copies)]


def test_experts_are_counted_as_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: bytes of all experts, or of every row's, instead of the distinct ones."""
    monkeypatch.setattr(Timer, "us", lambda self, calls: float(len([call() for call in calls])))
    found, factors = parts.routed_experts(machine())
    one = 3 * 64 * 32 * 2
    fewest, most = found.points[0][0], found.points[-1][0]
    assert fewest == 2 * one
    assert 7 * one < most <= 8 * one
    (alone, few, all_of_8), ys = zip(*factors.points, strict=True)
    assert (alone, all_of_8) == (1, 32 * 2 / 8), "rows of an expert at 32 rows"
    assert 16 * 2 / 8 <= few < 16 * 2 / 7, "and at 16, by the experts that they touch"
    assert ys == (1, 1, 1)


def test_attention_is_of_the_positions_asked_for() -> None:
    """Fault: keys of one layer timed over and over, or of fewer positions than are counted."""
    kinds = ((parts.HEADS, 8, 4, 4096), (parts.NARROW, 3, 3, 768), (parts.LATENT, 1, 16, 1152))
    for kind, kv_heads, group, values in kinds:
        times, tflops = parts.attention(machine(), kind)
        assert tflops > 0
        found = {
            (walks / kv_heads, side / group): [x / values for x, _ in points.points]
            for walks, over_rows in times.members
            for side, points in over_rows.members
        }
        assert found == {
            (1, 1): [16, 64],
            (1, 4): [16, 64],
            (2, 1): [32, 64],
            (2, 2): [32, 64],
            (2, 4): [32, 64],
        }


def test_arithmetic_is_taken_where_it_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a rate of few rows or short contexts, or the launch counted as arithmetic."""

    def us(one: Machine, kind: parts.Kind, batch: int, context: int, rows: int = 1) -> float:
        return 5.0 + batch * context * rows

    monkeypatch.setattr(parts, "attention_us", us)
    _, tflops = parts.attention(machine(), parts.LATENT)
    flops = 2 * 2 * 32 * 4 * 16 * (576 + 512)
    assert tflops == pytest.approx(flops / (5 + 2 * 32 * 4 - (5 + 2 * 16)) / 1e6)


@pytest.mark.parametrize(("rows", "gates"), [(1, True), (64, True), (128, False)])
def test_a_gate_is_measured_where_it_is_in_the_launch(
    monkeypatch: pytest.MonkeyPatch, rows: int, gates: bool
) -> None:
    """Fault: a gate that a plan counts twice, or a launch without the gate that it has."""
    seen = []
    product = Linear.product

    def spy(self: Linear, x: torch.Tensor, gates: bool = False) -> torch.Tensor:
        seen.append(gates)
        return product(self, x, gates)

    monkeypatch.setattr(Linear, "product", spy)
    layer = Layer(1024, 512, gated=True)
    parts.linear_us(machine(), layer, rows)
    assert not any(seen), "a CPU's gates are operations of their own"
    seen.clear()
    monkeypatch.setattr(Machine, "is_gpu", True)
    parts.linear_us(machine(), layer, rows)
    parts.linear_us(machine(), layer._replace(gated=False), rows)
    assert set(seen[: len(seen) // 2]) == {gates}
    assert not any(seen[len(seen) // 2 :])
    _, gate, _ = mlp("MLP", 512, 512, rows, 1, 16)
    assert (gate.joins, gate.layer) == (Joins.GATE, (1024, 512, 16))
    assert joined(gate, load_profile("h200"), EYAS) is gates


def test_points_of_one_place_are_averaged() -> None:
    assert curve([(2, 4.0), (1, 1.0), (2, 6.0)]).points == ((1.0, 1.0), (2.0, 5.0))


def test_collectives_of_two_ranks() -> None:
    """Fault: ranks that do different rounds and hang, or processes left behind."""
    rounds = Rounds(device="cpu", dtype=torch.bfloat16, sizes=(4096, 8192), count=2)
    (table,), skew = collectives(2, rounds)
    assert (table.kind, table.ranks) == ("gloo", 2)
    assert [x for x, _ in table.us.points] == [4096, 8192]
    assert all(us > 1 for _, us in table.us.points)
    assert skew >= 0
    assert collectives(1, rounds) == ((), 0.0)


@pytest.mark.parametrize(
    ("message", "values"),
    [("tp=0", {"tp": 0}), ("seconds=0", {"seconds": 0}), ("seconds=90", {"seconds": 90})],
)
def test_flags_that_mean_nothing(message: str, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrateConfig(**values)  # type: ignore[arg-type]
