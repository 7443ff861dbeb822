"""Latent attention: absorbed equals naive, ranks add up, a row is the same in any company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eyas.attention.dense import DenseCausal, Documents
from eyas.distributed.group import SOLO, Group
from eyas.layers.linear import pad_rows, row_tile
from eyas.layers.mla import MLA, half_split
from eyas.layers.rotary import Rotary
from eyas.model_config import MLAConfig, RopeConfig
from eyas.models.registry import allocate, fill

CPU = torch.device("cpu")
HIDDEN, HEADS, ROWS = 48, 4, 19
ROPE = RopeConfig(theta=100.0)
SIZES: dict[str, Any] = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "nope_dim": 16,
    "rope_dim": 8,
    "value_dim": 24,
    "scale": 0.3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "half-split": {"interleaved": False},
    "direct queries": {"q_lora_rank": 0},
    "wide eps": {"norm_eps": 0.5},
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=list(VARIANTS))
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Half(Group):
    """One of two ranks that does not talk: what it would sum is left to the test."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def checkpoint(mla: MLAConfig, in_features: int, seed: int = 0) -> Weights:
    """Random tensors under a checkpoint's names."""
    generator = torch.Generator().manual_seed(seed)
    head, latent = mla.nope_dim + mla.rope_dim, mla.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (latent + mla.rope_dim, in_features),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (HEADS * (mla.nope_dim + mla.value_dim), latent),
        "o_proj": (HIDDEN, HEADS * mla.value_dim),
    }
    if mla.q_lora_rank:
        shapes["q_a_proj"] = (mla.q_lora_rank, in_features)
        shapes["q_a_layernorm"] = (mla.q_lora_rank,)
        shapes["q_b_proj"] = (HEADS * head, mla.q_lora_rank)
    else:
        shapes["q_proj"] = (HEADS * head, in_features)
    return {
        f"a.{name}.weight": torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def layer(
    mla: MLAConfig,
    weights: Weights,
    in_features: int = HIDDEN,
    group: Group = SOLO,
    dtype: torch.dtype = torch.float32,
) -> MLA:
    """Ours, filled from `weights`."""
    module = MLA(0, "a", in_features, HIDDEN, HEADS, mla, group)
    allocate(module, dtype, CPU)
    fill(module.places(), weights.items())
    return module


def run(module: MLA, x: torch.Tensor) -> torch.Tensor:
    """The layer over one document `x[T, in]`, rows padded to the tile."""
    tile = row_tile(CPU, x.dtype)
    rope = Rotary(ROPE, module.mla.rope_dim, 64)(pad_rows(torch.arange(len(x)), tile))
    shape = module.mla.attention_shape(1)
    attend = DenseCausal(Documents.of((len(x),), CPU, "loop"), shape)
    return module(pad_rows(x, tile), rope, attend)[: len(x)]


def turned(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding of `x[T, H, R]` at positions 0 .. T - 1, by complex numbers."""
    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * ROPE.theta ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    whole = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return whole.flatten(-2) if interleaved else whole.mT.flatten(-2)


def naive(mla: MLAConfig, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """The paper's form in float64: every head's keys and values are made."""
    w = {name.removeprefix("a.").removesuffix(".weight"): t.double() for name, t in weights.items()}
    x = x.double()

    def norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * (y.square().mean(-1, keepdim=True) + mla.norm_eps).rsqrt() * weight

    if mla.q_lora_rank:
        q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    else:
        q = x @ w["q_proj"].T
    kept = x @ w["kv_a_proj_with_mqa"].T
    latent, shared = kept.split((mla.kv_lora_rank, mla.rope_dim), -1)
    kv = norm(latent, w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    q_nope, q_rope = q.unflatten(-1, (HEADS, -1)).split((mla.nope_dim, mla.rope_dim), -1)
    k_nope, v = kv.unflatten(-1, (HEADS, -1)).split((mla.nope_dim, mla.value_dim), -1)
    k_rope = turned(shared[:, None], mla.interleaved).expand(-1, HEADS, -1)
    q = torch.cat((q_nope, turned(q_rope, mla.interleaved)), -1)
    k = torch.cat((k_nope, k_rope), -1)
    scores = torch.einsum("thd,shd->hts", q, k) * mla.scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    probs = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", probs, v).flatten(1) @ w["o_proj"].T


@each_variant
@pytest.mark.parametrize("in_features", [HIDDEN, 2 * HIDDEN], ids=["target", "drafter"])
def test_absorbed_equals_naive(changes: dict[str, Any], in_features: int) -> None:
    """Fault: a matrix absorbed on the wrong side, rotary pairs mixed up, a norm left out."""
    mla = MLAConfig(**{**SIZES, **changes})
    weights = checkpoint(mla, in_features)
    x = torch.randn(ROWS, in_features, generator=torch.Generator().manual_seed(1))
    expected = naive(mla, weights, x)
    assert expected.abs().max() > 1, "the reference says something"
    got = run(layer(mla, weights, in_features), x)
    assert torch.allclose(got.double(), expected, atol=2e-5, rtol=1e-5)


@each_variant
def test_ranks_share_the_heads(changes: dict[str, Any]) -> None:
    """Fault: a rank takes rows of other heads. Partial sums of two ranks add up to the whole."""
    mla = MLAConfig(**{**SIZES, **changes})
    weights = checkpoint(mla, HIDDEN)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    halves = [layer(mla, weights, group=Half(rank)) for rank in range(2)]
    for module in halves:
        module.o.group = SOLO
        assert module.kv_up.shape[0] == HEADS // 2
    expected = run(layer(mla, weights), x)
    total = torch.stack([run(module, x) for module in halves]).sum(0)
    assert torch.allclose(total, expected, atol=1e-5)


@each_variant
def test_places_give_back_what_they_took(changes: dict[str, Any]) -> None:
    """Fault: an export with rotary rows in our order, which other engines read as interleaved."""
    mla = MLAConfig(**{**SIZES, **changes})
    weights = checkpoint(mla, HIDDEN)
    places = layer(mla, weights).places()
    assert set(places) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(places[name].give(), tensor), name
        assert not places[name].into.requires_grad


def test_half_split_order() -> None:
    """Fault: the order of one head applied to all rows. Two heads of 2 + 4 rows, by hand."""
    assert half_split(2, 2, 4).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(4, 16, 24, 32), (16, 128, 128, 512), (8, 32, 32, 96)])
def test_a_row_has_the_same_bits_among_any_rows(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, threads: int
) -> None:
    """Fault: verify arithmetic that depends on the number of rows, in the products of each head.

    The attention in between is left out: it hands every query's front on as its output.
    """
    heads, nope, value, latent = sizes
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(threads)
    mla = MLAConfig(
        **{**SIZES, "nope_dim": nope, "value_dim": value, "kv_lora_rank": latent, "q_lora_rank": 64}
    )
    module = MLA(0, "a", 64, 64, heads, mla)
    allocate(module, dtype, CPU)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Any) -> Any:
        return (q[..., :latent] + v).flatten(1)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        tile = row_tile(CPU, dtype)
        return module(pad_rows(rows, tile), (rows, rows), attend)[: len(rows)]

    x = torch.randn(70, 64, generator=generator).to(dtype)
    single = torch.cat([padded(x[i : i + 1].clone()) for i in range(70)])
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64):
        for start in (0, 3):
            rows = padded(x[start : start + count].clone())
            assert torch.equal(rows, single[start : start + count]), (count, start)
