"""Counts of a pass: against the networks' own parameters, and against known figures."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch

from eyas.checkpoint import read_config, resolve
from eyas.config import SpeculationConfig
from eyas.cost import (
    Cycle,
    cycle_ops,
    draft_pass,
    extend_pass,
    plain_step,
    require_shares,
    target_pass,
    touched,
    touched_in_pass,
    zipf_shares,
)
from eyas.engine.rehearsal import Shares, hollow
from eyas.errors import ConfigError
from eyas.layers.linear import Embedding
from eyas.model_config import DrafterConfig, ModelConfig, MoEConfig
from eyas.models.decoder import Decoder
from eyas.models.dummy import dummy_drafter_config
from eyas.models.eagle3 import Eagle3
from eyas.models.families import model_config
from eyas.operations import COMPONENTS, Op, Work, merged
from eyas.setting import Precision, Setting

SHAPES = ("llama-3.1-8b", "smollm2-135m", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite")


def shape(name: str) -> ModelConfig:
    return model_config(read_config(resolve(f"shape:{name}")))


def total(ops: list[Op] | tuple[Op, ...], field: str) -> float:
    return float(sum(getattr(op, field) * op.times for op in ops))


def matrices(network: torch.nn.Module, bits: dict[torch.dtype, float]) -> float:
    """Bytes of the parameters that matmuls read: all with two dimensions but embeddings."""
    tables = {id(m.weight) for m in network.modules() if isinstance(m, Embedding)}
    tied = getattr(network, "head", None)
    if tied is not None and id(tied.weight) in tables:
        tables = set()
    every = {id(p): p for p in network.parameters() if p.dim() > 1}
    return sum(p.numel() * bits[p.dtype] for key, p in every.items() if key not in tables)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in SHAPES),
        ("llama-3.1-8b", 4),
        ("qwen3-30b-a3b", 4),
        ("deepseek-v2-lite", 4),
        ("kimi-k2.5", 8),
        ("deepseek-v3", 8),
    ],
)
def test_weights_are_the_networks(name: str, ranks: int) -> None:
    """Fault: a projection forgotten, counted twice or of another width; a share not shared.

    With all experts touched, the bytes read are those of a rank's parameters on the meta device.
    """
    config = shape(name)
    network = hollow(partial(Decoder, group=Shares(ranks)), config, torch.bfloat16)
    expected = matrices(network, {torch.bfloat16: 2.0, torch.float32: 4.0})
    ops = target_pass(config, Setting(ranks=ranks))
    read = 0.0
    for op in ops:
        scale = 1.0
        if op.work is Work.EXPERTS and config.moe is not None:
            scale = config.moe.num_experts / config.moe.top_k
        read += op.weights * op.times * scale
    assert math.isclose(read, expected, rel_tol=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"fc_norm": True, "qk_norm": True, "num_layers": 2, "windows": (64, 0)},
        {"fused": False, "own_embedding": True, "aux_layers": (32,)},
        {"own_head": False, "draft_vocab_size": 128_256},
        {"mla": "kimi-k2.5"},
    ],
    ids=["usual", "two layers", "unfused", "headless", "latent"],
)
def test_a_drafters_weights_are_its_networks(change: dict[str, Any]) -> None:
    """Fault: the drafter's layers counted with the target's widths, or a part that it lacks."""
    if "mla" in change:
        change = {"mla": shape(change["mla"]).mla}
    target = shape("llama-3.1-8b")
    config = dataclasses.replace(dummy_drafter_config(target), **change)
    expected = matrices(hollow(Eagle3, config, torch.bfloat16), {torch.bfloat16: 2.0})
    if not config.own_head:
        expected += target.vocab_size * target.hidden_size * 2
    assert total(extend_pass(config, Setting(), 4), "weights") == expected


def test_known_figures() -> None:
    """Fault: a floor that is not the one that others computed by hand.

    Llama-3.1-8B reads 15.0 GB, which an H200 takes 3.42 ms for; V2-Lite 4.9 GB for one token, and
    2.4 times that for four, which touch 20.8 of 64 experts.
    """
    weights = total(target_pass(shape("llama-3.1-8b"), Setting()), "weights")
    assert round(weights / 1e9, 2) == 15.01
    assert round(weights / 4390e6, 2) == 3.42
    lite = shape("deepseek-v2-lite")
    assert lite.moe is not None
    one, four = (total(target_pass(lite, Setting(), n), "weights") for n in (1, 4))
    assert round(one / 1e9, 1) == 4.9
    assert round(four / 1e9, 1) == 11.6
    assert round(touched(lite.moe, 4), 1) == 20.8


def test_collectives_of_kimi() -> None:
    """Fault: a collective forgotten or of another size: two a layer, 14 KB a token, 43 KB three."""
    for nodes, message in ((1, 14_336), (3, 43_008)):
        ops = target_pass(shape("kimi-k2.5"), Setting(ranks=8), nodes)
        behind = [op for op in ops if op.name.startswith("all-reduce behind")]
        assert sum(op.times for op in behind) == 122
        assert {op.message for op in behind} == {message}
        rest = {op.name: op.message for op in ops if op.work in (Work.REDUCE, Work.GATHER)}
        assert rest["gather of logits"] == nodes * 163_840 * 2
        assert rest["all-reduce of embeddings"] == message
        assert rest["share of draws"] == nodes * 8
    assert not total(target_pass(shape("kimi-k2.5"), Setting()), "message")


def test_experts_touched() -> None:
    """Fault: the weight multiples of a verify pass, known for two models, not reproduced."""
    for name, multiples in (
        ("kimi-k2.5", (1.98, 2.94, 3.88, 7.4)),
        ("qwen3-30b-a3b", (1.94, 2.82, 3.64, 6.5)),
    ):
        moe = shape(name).moe
        assert moe is not None
        found = [touched(moe, t) / moe.top_k for t in (2, 3, 4, 8)]
        assert found == pytest.approx(multiples, abs=0.06)
        assert touched(moe, 1) == pytest.approx(moe.top_k)


def test_skewed_routing_touches_fewer() -> None:
    """Fault: shares that do not sum to K, or a skew that touches more experts than none."""
    moe = MoEConfig(num_experts=64, top_k=6, intermediate_size=8)
    for exponent in (0.0, 0.5, 1.0, 3.0):
        shares = zipf_shares(moe, exponent)
        assert sum(shares) == pytest.approx(6)
        assert max(shares) <= 1
    found = [touched(moe, 8, zipf_shares(moe, e)) for e in (0.0, 0.5, 1.0, 3.0)]
    assert found[0] == pytest.approx(touched(moe, 8))
    assert found == sorted(found, reverse=True)


def test_one_rank_leaves_the_sum_of_experts_to_the_norm() -> None:
    """Fault: a launch priced that the norm has taken in, or none where ranks add up."""
    lite = shape("deepseek-v2-lite")

    def launches(ranks: int, nodes: int) -> set[int]:
        ops = target_pass(lite, Setting(ranks=ranks), nodes)
        return {op.launches for op in ops if op.work is Work.EXPERTS}

    assert [launches(1, 1), launches(1, 64), launches(2, 1), launches(2, 64)] == [
        {2},
        {3},
        {3},
        {4},
    ]


def test_overlap_is_within_a_request() -> None:
    """Fault: requests that share experts because their own nodes do."""
    moe = MoEConfig(num_experts=384, top_k=8, intermediate_size=8)
    assert touched_in_pass(moe, 1, 4, 0.0) == pytest.approx(touched(moe, 4))
    assert touched_in_pass(moe, 1, 4, 1.0) == pytest.approx(8)
    assert touched_in_pass(moe, 16, 1, 1.0) == pytest.approx(touched(moe, 16))
    assert touched_in_pass(moe, 4, 4, 0.0) == pytest.approx(touched(moe, 16))


def test_keys_and_values() -> None:
    """Fault: KV bytes without the group, of all ranks, or of every node where one read serves."""
    llama, kimi = shape("llama-3.1-8b"), shape("kimi-k2.5")
    setting = Setting(context=1000)
    assert total(target_pass(llama, setting, 4), "kv") == 32 * 1000 * 2 * 8 * 128 * 2
    per_node = dataclasses.replace(setting, kv_per_node=True)
    assert total(target_pass(llama, per_node, 4), "kv") == 32 * 1000 * 2 * 8 * 128 * 2
    assert total(target_pass(llama, per_node, 4), "again") == 3 * 32 * 1000 * 2 * 8 * 128 * 2
    assert total(target_pass(llama, setting, 4), "again") == 0
    four = dataclasses.replace(setting, ranks=4)
    assert total(target_pass(llama, four), "kv") == 32 * 1000 * 2 * 2 * 128 * 2
    eight_bit = Setting(context=1000, ranks=8, batch=3, precision=Precision(kv_bits=8))
    assert total(target_pass(kimi, eight_bit), "kv") == 3 * 61 * 1000 * 576
    shared = dataclasses.replace(eight_bit, context_ranks=8)
    assert total(target_pass(kimi, shared), "kv") == 3 * 61 * 125 * 576
    window = dataclasses.replace(llama, windows=(100, 0) * 16)
    assert total(target_pass(window, setting), "kv") == 16 * 1100 * 2 * 8 * 128 * 2


def test_attention_of_each_rank_for_its_own_requests() -> None:
    """Fault: data-parallel attention that still shares heads, or adds up partial results."""
    kimi = shape("kimi-k2.5")
    shared, own = Setting(ranks=8, batch=16), Setting(ranks=8, batch=16, context=512)
    own = dataclasses.replace(own, data_parallel_attention=True)
    names = {op.name for op in target_pass(kimi, own)}
    assert not any(name.startswith("all-reduce behind") for name in names)
    out = [next(o for o in target_pass(kimi, s) if o.name == "o") for s in (shared, own)]
    assert out[1].weights == 8 * out[0].weights
    assert out[1].rows == out[0].rows / 8


def test_precision_scales_what_it_names() -> None:
    """Fault: 4-bit experts that shrink the router or the attention too."""
    kimi = shape("kimi-k2.5")
    full, small = (
        {op.name: op.weights for op in target_pass(kimi, Setting(precision=p))}
        for p in (Precision(), Precision(expert_bits=4.5))
    )
    assert {n for n in full if full[n] != small[n]} == {"experts"}
    assert small["experts"] == full["experts"] * 4.5 / 16


def test_a_rounded_drafter_extends_with_whole_weights() -> None:
    """Fault: keys of committed tokens priced as if computed from rounded weights."""
    drafter = dummy_drafter_config(shape("llama-3.1-8b"))
    whole, rounded = (Setting(precision=Precision(draft_bits=bits)) for bits in (16, 8))
    drafting = [total(draft_pass(drafter, s, 1), "weights") for s in (whole, rounded)]
    assert drafting[0] == 2 * drafting[1]
    extending = [total(extend_pass(drafter, s, 4), "weights") for s in (whole, rounded)]
    behind = 3 * drafter.hidden_size * drafter.intermediate_size  # what its last rows run through
    assert extending[0] - extending[1] == behind + drafter.draft_vocab_size * drafter.hidden_size


def test_only_last_rows_run_through_a_drafters_mlp() -> None:
    """Fault: all committed rows priced through it; a later layer, which reads all, given few."""
    drafter = dummy_drafter_config(shape("llama-3.1-8b"))
    for layers, rows in ((1, 8), (2, 32)):
        ops = extend_pass(dataclasses.replace(drafter, num_layers=layers), Setting(batch=8), 4)
        found = {op.name: op.rows for op in ops if op.name in ("qkv", "o", "MLP: gate and up")}
        assert found == {"qkv": 32, "o": 32, "MLP: gate and up": rows}


def test_a_cycle_is_its_passes() -> None:
    """Fault: a chain of K drafts that costs K passes, or an extend over fewer rows than it has."""
    target = shape("llama-3.1-8b")
    drafter = dummy_drafter_config(target)
    chain = cycle_ops(target, drafter, SpeculationConfig.chain(3), Setting())
    assert isinstance(chain, Cycle)
    passes = [draft_pass(drafter, Setting(), 1, level) for level in (1, 2)]
    assert total(chain.draft, "weights") == sum(total(p, "weights") for p in passes)
    assert next(op for op in chain.extend if op.name == "o").rows == 4
    assert next(op for op in chain.extend if op.name == "head").rows == 1
    assert next(op for op in chain.verify if op.name == "head").rows == 4
    tree = SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16)
    grown = cycle_ops(target, drafter, tree, Setting(batch=2))
    assert next(op for op in grown.draft if op.name == "o").rows == 8
    assert next(op for op in grown.verify if op.name == "o").rows == 32
    ngram = cycle_ops(target, None, SpeculationConfig.chain(3, "NGRAM"), Setting())
    assert not ngram.draft and not ngram.extend
    alone = cycle_ops(target, shape("smollm2-135m"), SpeculationConfig.chain(3), Setting())
    assert total(alone.draft, "weights") == 2 * total(
        target_pass(shape("smollm2-135m"), Setting()), "weights"
    )


def test_a_replicated_drafter_asks_for_the_shared_embedding_only() -> None:
    """Fault: a drafter that every rank has whole counted with all-reduces, or as a share."""
    target = shape("llama-3.1-8b")
    drafter = dummy_drafter_config(target)
    whole, shared = (
        draft_pass(drafter, Setting(ranks=4, sharded_drafter=sharded), 1)
        for sharded in (False, True)
    )
    assert [op.name for op in whole if op.message] == ["all-reduce of embeddings"]
    own = dataclasses.replace(drafter, own_embedding=True)
    assert not any(op.message for op in draft_pass(own, Setting(ranks=4), 1))
    assert total(whole, "weights") == 4 * total(shared, "weights")


def test_every_operation_has_a_known_component() -> None:
    """Fault: an operation that a breakdown by component would lose."""
    for name in (*SHAPES, "kimi-k2.5"):
        for op in plain_step(shape(name), Setting(ranks=1)):
            assert op.component in COMPONENTS, op.name


def test_merging_keeps_all() -> None:
    """Fault: operations of equal names but other sizes counted as one."""
    ops = target_pass(shape("deepseek-v2-lite"), Setting())
    assert total(merged([*ops, *ops]), "weights") == 2 * total(ops, "weights")
    assert len(merged([*ops, *ops])) == len(ops)
    assert {op.rows for op in target_pass(shape("qwen3-8b"), Setting(batch=3), 2)} == {6}


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ("ranks=0", {"ranks": 0}),
        ("context_ranks=3 of 8", {"ranks": 8, "context_ranks": 3}),
        ("expert_overlap=2", {"expert_overlap": 2}),
        ("context=-1", {"context": -1}),
    ],
)
def test_settings_that_cannot_be(message: str, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=message):
        Setting(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_bits=0"):
        Precision(kv_bits=0)


def test_ranks_that_do_not_divide_are_refused() -> None:
    """Fault: a share of 2.67 heads priced as if it ran."""
    require_shares(shape("kimi-k2.5"), 8)
    with pytest.raises(ConfigError, match="tp=3 for the query heads of 32"):
        require_shares(shape("llama-3.1-8b"), 3)


def test_drafters_of_both_kinds_can_be_counted() -> None:
    """Fault: latent attention in a drafter counted as heads."""
    drafter = DrafterConfig(
        vocab_size=163_840,
        draft_vocab_size=163_840,
        hidden_size=7168,
        target_hidden_size=7168,
        intermediate_size=18_432,
        num_heads=64,
        num_kv_heads=64,
        head_dim=192,
        max_position=4096,
        aux_layers=(1, 29, 57),
        mla=shape("kimi-k2.5").mla,
    )
    ops = draft_pass(drafter, Setting(context=100, ranks=8, sharded_drafter=True), 1)
    assert {op.work for op in ops if op.kv} == {Work.LATENT}
    assert total(ops, "kv") == 100 * 576 * 2


def test_a_drafter_in_8_bits_cuts_its_rows_in_launches_of_their_own() -> None:
    """Fault: 13 launches of a chain of 3 that a plan does not know (327 on an H200, 314 in 16)."""
    target = shape("llama-3.1-8b")
    counts = []
    for bits in (16.0, 8.0):
        setting = Setting(precision=Precision(draft_bits=bits, extend_bits=bits))
        cycle = cycle_ops(target, dummy_drafter_config(target), SpeculationConfig.chain(3), setting)
        ops = (*cycle.draft, *cycle.verify, *cycle.extend)
        counts.append(sum(op.launches * op.times for op in ops))
    assert counts[1] - counts[0] == 13
