"""Times from counts: against peers measured on one H200, and what each switch of an engine does."""

from __future__ import annotations

import dataclasses

import pytest

from eyas.checkpoint import read_config, resolve
from eyas.config import SpeculationConfig
from eyas.cost import LISTED_ROWS, target_pass
from eyas.errors import ConfigError
from eyas.estimate import (
    EYAS,
    SGLANG,
    VLLM,
    Scenario,
    Software,
    accept_length,
    estimate,
    op_us,
    predict,
)
from eyas.hardware import Curve, Family, Times, load_profile
from eyas.kernels import router
from eyas.model_config import ModelConfig
from eyas.models.dummy import dummy_drafter_config
from eyas.models.families import model_config
from eyas.operations import ATTENTION, LINEAR, MOE, Op, Work, linear
from eyas.setting import Precision, Setting

H200 = load_profile("h200")
BOX = load_profile("rtx-pro-6000-tuned")


def times(*points: tuple[float, float]) -> Times:
    """Of attention, whatever walks."""
    return Family(((1.0, Family(((1.0, Curve(points)),))),))


def shape(name: str) -> ModelConfig:
    return model_config(read_config(resolve(f"shape:{name}")))


def scenario(name: str, drafts: int, software: Software = EYAS, **setting: object) -> Scenario:
    target = shape(name)
    return Scenario(
        target=target,
        drafter=dummy_drafter_config(target),
        speculation=SpeculationConfig.chain(drafts),
        setting=Setting(**{"context": 512, **setting}),  # type: ignore[arg-type]
        profile=H200,
        software=software,
        rates=(0.0,),
    )


PEERS = [
    ("llama-3.1-8b", SGLANG, 3, (4.78, 5.09, 5.72), (6.79, 6.98, 8.39)),
    ("llama-3.1-8b", SGLANG, 7, (4.78, 5.09, 5.72), (8.14, 8.77, 11.48)),
    ("llama-3.1-8b", VLLM, 3, (4.88, 5.09, 5.79), (5.80, 6.17, 7.37)),
    ("llama-3.1-8b", VLLM, 7, (4.88, 5.09, 5.79), (7.00, 7.47, 10.74)),
    ("deepseek-v2-lite", SGLANG, 3, (3.45, 6.9), (6.63, 11.7)),
]
"""Shape, engine, drafts, ms of decode and cycle at batch 1, 8, 32; one H200, 2026-11-29."""


@pytest.mark.parametrize(("name", "software", "drafts", "decode", "cycle"), PEERS)
def test_engines_measured_on_an_h200(
    name: str,
    software: Software,
    drafts: int,
    decode: tuple[float, ...],
    cycle: tuple[float, ...],
) -> None:
    """Fault: a term of the sum missing or twice: 8 % off somewhere, of parts measured alone."""
    for batch, plain, whole in zip((1, 8, 32), decode, cycle, strict=False):
        found = predict(scenario(name, drafts, software, batch=batch))
        assert found.decode_ms == pytest.approx(plain, rel=0.08), f"decode, batch {batch}"
        assert found.cycle_ms == pytest.approx(whole, rel=0.08), f"cycle, batch {batch}"


def test_linear_layers_are_those_measured() -> None:
    """Fault: rows priced as if each read the weights, or not priced at all.

    All linear layers of the 8B shape took 4.066 ms at one row, 4.125 at 16, 4.229 at 32.
    """
    target = shape("llama-3.1-8b")
    for rows, ms in ((1, 4.066), (16, 4.125), (32, 4.229)):
        parts = estimate(target_pass(target, Setting(), rows), H200).by_component()
        assert (parts[LINEAR] + parts["LM head"]) / 1e3 == pytest.approx(ms, rel=0.015)


def test_many_rows_are_bound_by_arithmetic() -> None:
    """Fault: a prompt's thousand rows at the price of one."""
    few, many = (op_us(linear("x", 4096, 28_672, n, 16), H200) for n in (64, 4096))
    assert few == pytest.approx(op_us(linear("x", 4096, 28_672, 32, 16), H200), rel=0.05)
    assert many == pytest.approx(2 * 4096 * 4096 * 28_672 / 640e6, rel=0.02)


def test_nothing_beats_its_floor() -> None:
    """Fault: a curve that undercuts the bandwidth it was measured beside."""
    for name in ("llama-3.1-8b", "deepseek-v2-lite", "qwen3-30b-a3b"):
        for batch, context in ((1, 512), (32, 8192)):
            found = predict(scenario(name, 3, batch=batch, context=context))
            for part in (found.decode, found.verify, found.draft, found.extend):
                assert all(line.us >= line.floor_us for line in part.lines)
                assert part.us > part.floor_us > 0


def test_what_an_engine_does_shows() -> None:
    """Fault: a switch of the planner that changes nothing, or the wrong way."""
    base = scenario("qwen3-30b-a3b", 3, ranks=8, context=4000).change(software=Software())
    cycle = predict(base).cycle_ms

    def with_(**values: object) -> float:
        return predict(base.change(**values)).cycle_ms

    base = base.change(ranks=4)
    cycle = predict(base).cycle_ms
    assert with_(all_reduce="nccl") > cycle
    assert with_(fused_all_reduce=True) < cycle
    assert with_(overlapped=True) <= cycle
    assert with_(graphs=False) > cycle
    assert with_(prefill_attention=True) > cycle
    assert with_(kv_per_node=True) > cycle
    assert with_(blocking_copies=3) == pytest.approx(cycle + 3 * H200.copy_us / 1e3)
    assert with_(cycle_gap_us=1000.0) == pytest.approx(cycle + 1)
    assert with_(expert_overlap=1.0) < with_(expert_overlap=0.5) < cycle
    assert with_(ranks=1) > with_(ranks=2) > cycle
    assert with_(precision=Precision(kv_bits=8)) < cycle
    assert with_(precision=Precision(expert_bits=4)) < cycle


def test_prefill_attention_is_of_verify_alone() -> None:
    """Fault: plain decoding slowed down by how verify attends."""
    base = scenario("llama-3.1-8b", 3, context=8000)
    slow = base.change(prefill_attention=True)
    assert predict(slow).decode_ms == predict(base).decode_ms
    walk = predict(slow).verify.by_component()[ATTENTION] / 32
    assert walk == pytest.approx(8000 * H200.serial_ns / 1e3, rel=0.01)


def test_overlap_hides_what_experts_can() -> None:
    """Fault: an overlap that hides more than half of either, or one in a dense model."""
    base = scenario("deepseek-v2-lite", 3, ranks=4, batch=64)
    whole, hidden = (predict(s).verify for s in (base, base.change(overlapped=True)))
    experts = whole.by_component()[MOE]
    reduce = sum(o.us for o in whole.lines if o.op.name == "all-reduce behind MLP")
    assert 0 < whole.us - hidden.us <= min(experts, reduce) / 2
    dense = scenario("llama-3.1-8b", 3, ranks=4)
    assert predict(dense).cycle_ms == predict(dense.change(overlapped=True)).cycle_ms


def test_small_kernels_of_few_rows_join_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: gates and choices priced that are no launches, or free where they are.

    A gate is in the linear layer's launch where that layer has a plan; few rows' heads are written
    where they are wanted, and latents normed beside.
    """

    def small(name: str, software: Software, **values: object) -> int:
        found = predict(scenario(name, 3, software, **values)).decode
        return sum(o.op.launches * o.op.times for o in found.lines if o.op.work is Work.SMALL)

    def fewer(name: str, **values: object) -> int:
        return small(name, SGLANG, **values) - small(name, EYAS, **values)

    monkeypatch.setattr("eyas.estimate.plan_of", lambda *layer, **_: None)
    assert fewer("smollm2-135m") == 0
    layers = 27 * (3 + 1) + 26 * (2 + 1)
    assert fewer("deepseek-v2-lite") == layers, "heads, latents, the choice, shared experts' gates"
    monkeypatch.setattr("eyas.estimate.plan_of", lambda *layer, **_: layer)
    assert fewer("smollm2-135m") == 30
    assert fewer("llama-3.1-8b") == 32
    assert fewer("deepseek-v2-lite") == layers + 1, "a dense layer's gate too"
    assert fewer("smollm2-135m", batch=128) == 0
    assert fewer("llama-3.1-8b", batch=128) == 32
    assert fewer("deepseek-v2-lite", batch=128) == 26 * 2 + 1, "the choice, and a large gate"
    cpu = dataclasses.replace(H200, eager_us=0.0)
    plain = predict(dataclasses.replace(scenario("smollm2-135m", 3), profile=cpu)).decode
    assert plain.launches == predict(scenario("smollm2-135m", 3, SGLANG)).decode.launches


def test_many_rows_of_an_expert_cost_more_than_its_bytes() -> None:
    """Fault: a pass of hundreds of rows at the price of one that touches as many experts."""
    machine = dataclasses.replace(H200, pairs_factor=Curve(((1.0, 1.0), (3.0, 1.0), (48.0, 4.0))))
    few, many = (
        next(op for op in target_pass(shape("deepseek-v2-lite"), Setting(batch=n), 1) if op.pairs)
        for n in (1, 512)
    )
    assert (few.pairs, many.pairs) == (1.0, 512 * 6 / 64)
    assert op_us(many, machine) == pytest.approx(4 * op_us(many, H200))
    assert op_us(few, machine) == op_us(few, H200)


def test_rows_are_cut_for_8_bit_layers_on_a_gpu_alone() -> None:
    """Fault: a CPU's plan that pays for launches that only a GPU makes."""
    layer = linear("layer", 576, 960, 1, 8)
    cut = dataclasses.replace(layer, launches=2)
    on_cpu = dataclasses.replace(H200, eager_us=0.0)
    assert op_us(cut, on_cpu) == op_us(layer, on_cpu)
    assert op_us(cut, H200) == pytest.approx(op_us(layer, H200) + H200.small_us)


def test_small_layers_and_narrow_heads_have_measures_of_their_own() -> None:
    """Fault: a small model's rows and keys at a large one's price; rows past the last point."""
    steep, flat = Curve(((1.0, 1.0), (512.0, 3.0))), Curve(((1.0, 1.0), (512.0, 1.0)))
    factors = Family(((576.0 * 576 * 2, flat), (576.0 * 3072 * 2, steep)))
    machine = dataclasses.replace(H200, small_rows_factor=factors, narrow_us=times((0.0, 3.0)))
    smallest, small, large = (linear("layer", 576, out, 512, 16) for out in (576, 3072, 65536))
    assert op_us(smallest, machine) == pytest.approx(H200.linear_us(smallest.weights))
    assert op_us(small, machine) == pytest.approx(3 * H200.linear_us(small.weights))
    more = dataclasses.replace(small, rows=700)
    assert op_us(more, machine) == pytest.approx(op_us(small, machine))
    assert op_us(large, machine) == op_us(large, H200)
    narrow, wide = (
        next(op for op in target_pass(shape(name), Setting(), 1) if op.kv)
        for name in ("smollm2-135m", "llama-3.1-8b")
    )
    assert op_us(narrow, machine) == pytest.approx(3.0, rel=0.1)
    assert op_us(wide, machine) == op_us(wide, H200)


def test_attention_depends_on_who_walks() -> None:
    """Fault: 8 requests at the price of one, 16 nodes at that of 4; a rank's heads uncounted."""
    known = Family(
        tuple(
            (walks, Family(tuple((side, Curve(((0.0, walks + side),))) for side in (4.0, 16.0))))
            for walks in (8.0, 64.0)
        )
    )
    machine = dataclasses.replace(H200, attention_us=known, attention_tflops=1e6)

    cases = {(1, 1, 1): 12, (8, 1, 1): 68, (8, 4, 1): 80, (8, 16, 8): 24, (64, 16, 1): 80}
    for (batch, nodes, ranks), us in cases.items():
        ops = target_pass(shape("llama-3.1-8b"), Setting(batch=batch, ranks=ranks), nodes)
        op = next(op for op in ops if op.kv)
        assert op_us(op, machine) == pytest.approx(us, rel=1e-3), (batch, nodes, ranks)
    latent = target_pass(shape("deepseek-v2-lite"), Setting(batch=2, ranks=4), 3)
    assert [(op.walks, op.side) for op in latent if op.kv] == [(2, 3 * 4)]
    again = target_pass(shape("deepseek-v2-lite"), Setting(kv_per_node=True), 3)
    assert [(op.walks, op.side) for op in again if op.kv] == [(1, 16)]
    shared = target_pass(shape("deepseek-v2-lite"), Setting(ranks=4, context_ranks=4), 3)
    assert [(op.walks, op.side) for op in shared if op.kv] == [(1, 3 * 16)]


def test_rows_past_those_known_are_bound_by_arithmetic() -> None:
    """Fault: a prompt's attention at the price of the most rows that were measured."""
    rows = Op(name="attention", component=ATTENTION, work=Work.HEADS, rows=4096, flops=4e12)
    assert op_us(rows, H200) == pytest.approx(10 + 4e6 / H200.attention_tflops)


def test_what_joins_experts_costs_its_bytes_on_a_calibrated_machine() -> None:
    """Fault: a curve that begins above the shared expert's bytes gives it for nothing."""
    target, machine = shape("deepseek-v2-lite"), load_profile("h200-eyas")
    assert target.moe is not None
    alone = dataclasses.replace(target, moe=dataclasses.replace(target.moe, shared_size=0))
    with_it, without = (
        estimate(target_pass(config, Setting(), 1), machine).us for config in (target, alone)
    )
    weights = 26 * 3 * 2 * target.hidden_size * target.moe.shared_size
    assert with_it - without > weights / machine.read_gb_s / 1e3


def test_few_rows_are_listed_by_the_router() -> None:
    """Fault: a launch counted that the kernel has taken in."""
    assert LISTED_ROWS == router.ROWS


def test_an_engines_own_attention() -> None:
    """Fault: a kernel's published times ignored, or used for heads."""
    slow = dataclasses.replace(EYAS, latent_us=Curve(((0.0, 50.0),)))
    latent = Op(name="attention", component=ATTENTION, work=Work.LATENT, rows=1, kv=1e6)
    heads = dataclasses.replace(latent, work=Work.HEADS)
    assert op_us(latent, BOX, slow) == 50
    assert op_us(heads, BOX, slow) == op_us(heads, BOX)


def test_keys_read_again_come_from_the_cache_where_they_fit() -> None:
    """Fault: a kernel that reads keys for every node priced as if memory served each time."""
    one = Op(name="attention", component=ATTENTION, work=Work.LATENT, rows=4, kv=20e6)
    twice = dataclasses.replace(one, again=20e6)
    share = H200.read_gb_s / H200.cache_gb_s
    slope = (H200.latent_us(1, 1, 1e9) - H200.latent_us(1, 1, 0)) / 1e9
    assert op_us(twice, H200) - op_us(one, H200) == pytest.approx(20e6 * share * slope)
    large = dataclasses.replace(twice, kv=200e6)
    assert op_us(large, H200) == pytest.approx(H200.latent_us(1, 1, 220e6))


def test_the_host_shows_where_the_device_is_quicker() -> None:
    """Fault: a tiny model as fast as its kernels, whatever the host needs."""
    slow_host = dataclasses.replace(H200, host_us=2000.0)
    tiny = scenario("smollm2-135m", 3)
    found = predict(dataclasses.replace(tiny, profile=slow_host))
    assert found.decode_ms == pytest.approx(2.0 + H200.graph_us / 1e3)
    assert found.idle_ms > 0.4
    assert predict(tiny).decode_ms < 1.3


def test_accept_length() -> None:
    """Fault: rates taken as shares of all cycles, or a tree no better than its chain."""
    assert accept_length((0.5,), SpeculationConfig.chain(3)) == 1.875
    assert accept_length((0.5, 0.4), SpeculationConfig.chain(3)) == pytest.approx(1 + 0.5 + 0.28)
    assert accept_length((), SpeculationConfig.chain(3)) == 1
    assert accept_length((0.9,), SpeculationConfig(algorithm="NONE")) == 1
    chain = accept_length((0.6,), SpeculationConfig.chain(5))
    narrow = SpeculationConfig(num_steps=5, eagle_topk=2, num_draft_tokens=11)
    wide = SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=21)
    found = [accept_length((0.6,), s) for s in (narrow, wide)]
    assert chain < found[0] < found[1] < 6
    hit = 1 - 0.4 * 0.7**0.5
    assert found[0] == pytest.approx(1 + sum(hit**i for i in range(1, 6)))


def test_rates_and_ratios() -> None:
    """Fault: tokens of one request reported for a batch, or break-even over the wrong step."""
    found = predict(scenario("llama-3.1-8b", 3, batch=8).change(rates=(0.7,)))
    assert found.accept_length == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert found.tok_per_s == pytest.approx(8 * found.accept_length / found.cycle_ms * 1e3)
    assert found.break_even == pytest.approx(found.cycle_ms / found.decode_ms)
    assert found.speedup == pytest.approx(found.accept_length / found.break_even)
    plain = scenario("llama-3.1-8b", 3).change(speculation=SpeculationConfig(algorithm="NONE"))
    assert predict(plain).cycle_ms == predict(plain).decode_ms
    assert predict(plain).speedup == 1
    assert predict(plain).idle_ms == pytest.approx(H200.graph_us / 1e3)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match=r"tp=16.*has 8 devices"):
        predict(scenario("llama-3.1-8b", 3, ranks=16))
    with pytest.raises(ConfigError, match="'gloo' among 8 ranks"):
        predict(scenario("llama-3.1-8b", 3, ranks=8).change(all_reduce="gloo"))
