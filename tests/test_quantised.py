"""Quantised weights are what their stored numbers mean, or the checkpoint is refused by name."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.checkpoint import read_config
from eyas.errors import CheckpointError
from eyas.model_config import ModelConfig
from eyas.models.eagle3 import Eagle3
from eyas.models.families import model_config
from eyas.models.registry import load_target
from eyas.quantised import dequantised, quantization_config, scheme_of
from eyas.speculate.checkpoints import load_drafter
from eyas.train.export import export_specforge
from tests.eagle3_reference import target_logits
from tests.quantising import Tensors, fp8_config, int4_config, quantise_folder, to_fp8, to_int4

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj.weight"


def is_linear(name: str) -> bool:
    return "_proj" in name


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def read(tensors: Tensors, quantization: dict[str, Any]) -> Tensors:
    return dict(dequantised(tensors.items(), quantization))


def refused(tensors: Tensors, quantization: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tensors, quantization)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("shape", "block"), [((64, 96), (16, 32)), ((50, 70), (16, 32)), ((3, 5), (128, 128))]
)
def test_fp8_is_exact(shape: tuple[int, int], block: tuple[int, int], scales: torch.dtype) -> None:
    """Fault: a scale on the wrong block, worst where blocks are cut by the matrix's edge."""
    stored, meant = to_fp8(NAME, random_matrix(*shape), block, scales)
    ours = read(stored, fp8_config(block))
    assert list(ours) == [NAME]
    assert ours[NAME].dtype == torch.float32
    assert torch.equal(ours[NAME], meant)


def test_every_fp8_number_is_read() -> None:
    """Fault: subnormal, negative or large FP8 numbers that go through a type without them."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([[1.0 + 2**-23]])
    ours = read({NAME: finite, f"{NAME}_scale_inv": scale}, fp8_config((1, 256)))[NAME]
    assert torch.equal(ours, finite.float() * scale)
    assert ours.abs().max() > 447


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "group"), [((6, 64), 32), ((5, 12), 4), ((3, 20), 20)])
def test_int4_is_exact(shape: tuple[int, int], group: int, scales: torch.dtype) -> None:
    """Fault: nibbles in another order, an offset of 7, a row's padding read as numbers."""
    stored, meant = to_int4(NAME, random_matrix(*shape), group, scales)
    assert stored[f"{NAME}_packed"].shape == (shape[0], -(-shape[1] * 4 // 32))
    ours = read(stored, int4_config(group))
    assert list(ours) == [NAME]
    assert torch.equal(ours[NAME], meant)


def test_every_nibble_in_every_place() -> None:
    """Fault: a sign bit that spreads. Word by word, all 16 values in all 8 places."""
    rows = [[(value + place) % 16 for place in range(8)] for value in range(16)]
    words = [sum(n << 4 * place for place, n in enumerate(row)) for row in rows]
    packed = torch.tensor([[word - (word >> 31 << 32)] for word in words], dtype=torch.int32)
    shape = torch.tensor([16, 8], dtype=torch.int32)
    scale = torch.ones(16, 1, dtype=torch.bfloat16)
    stored = {f"{NAME}_packed": packed, f"{NAME}_scale": scale, f"{NAME}_shape": shape}
    assert (read(stored, int4_config(8))[NAME] + 8).int().tolist() == rows


def test_whole_rows_and_other_spellings() -> None:
    """Fault: a scale per channel, a format per group or a flat config that is refused."""
    stored, meant = to_int4(NAME, random_matrix(4, 24), 24)
    whole = int4_config(24)
    whole["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    inner = int4_config(24)
    inner["config_groups"]["group_0"]["format"] = inner.pop("format")
    flat: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    flat |= {"num_bits": 4, "group_size": 24}
    for quantization in (whole, inner, flat):
        assert torch.equal(read(stored, quantization)[NAME], meant)


def test_groups_have_their_own_sizes() -> None:
    """Fault: one group's size taken for every module."""
    quantization = int4_config(8)
    other = json.loads(json.dumps(quantization["config_groups"]["group_0"]))
    other["targets"], other["weights"]["group_size"] = ["re:.*\\.b$", "exactly.c"], 4
    quantization["config_groups"] = {"own": other, **quantization["config_groups"]}
    stored: Tensors = {}
    meant: Tensors = {}
    for module, group in (("a", 8), ("x.b", 4), ("exactly.c", 4), ("not.exactly.c", 8)):
        name = f"{module}.weight"
        made, meant[name] = to_int4(name, random_matrix(3, 16), group)
        stored |= made
    ours = read(stored, quantization)
    assert all(torch.equal(ours[name], meant[name]) for name in meant)


@pytest.mark.parametrize("order", range(6))
def test_partners_come_in_any_order(order: int) -> None:
    """Fault: a pair that is found only when its weight comes first, or next to it."""
    generator = torch.Generator().manual_seed(order)
    for make, quantization in (
        (lambda n: to_fp8(n, random_matrix(8, 8), (4, 4)), fp8_config((4, 4))),
        (lambda n: to_int4(n, random_matrix(8, 8), 4), int4_config(4)),
    ):
        stored: Tensors = {"plain": torch.ones(3)}
        meant: Tensors = {"plain": torch.ones(3)}
        for name in ("a.weight", "b.weight", "c.weight"):
            made, meant[name] = make(name)
            stored |= made
        names = list(stored)
        shuffled = [names[i] for i in torch.randperm(len(names), generator=generator)]
        ours = read({name: stored[name] for name in shuffled}, quantization)
        assert ours.keys() == meant.keys()
        assert all(torch.equal(ours[name], meant[name]) for name in meant)


def test_nothing_is_held_once_it_is_whole() -> None:
    """Fault: memory that grows with the checkpoint: kept partners, or weights made early."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(20):
            stored, _ = to_int4(f"{i}.weight", random_matrix(4, 8), 8)
            alive.extend(weakref.ref(tensor) for tensor in stored.values())
            yield from stored.items()

    most = 0
    for _, weight in dequantised(stream(), int4_config(8)):
        alive.append(weakref.ref(weight))
        del weight
        most = max(most, sum(one() is not None for one in alive))
    assert most <= 8, "more than one weight and two sets of parts are alive"


def without(*suffixes: str) -> Callable[[Tensors], object]:
    return lambda t: [t.pop(NAME + suffix) for suffix in suffixes]


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., object]:
    return lambda t: t.update({NAME + suffix: change(t[NAME + suffix])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("_scale_inv"), rf"'{NAME}'.*'{NAME}_scale_inv' is missing"),
        (without(""), rf"'{NAME}_scale_inv'.*'{NAME}' is missing"),
        (changed("", torch.Tensor.bfloat16), rf"'{NAME}_scale_inv'.*'{NAME}' is missing"),
        (changed("_scale_inv", lambda s: s[:1]), r"_scale_inv' of shape \[1, 2\].*\[2, 2\]"),
        (changed("_scale_inv", torch.Tensor.int), "_scale_inv' of type int32.*float32"),
        (changed("", lambda w: w[0]), r"of shape \[8\]: must be a matrix"),
    ],
)
def test_broken_fp8_is_refused(change: Callable[[Tensors], object], words: str) -> None:
    """Fault: a partner that is missing or does not fit, read as something else."""
    stored, _ = to_fp8(NAME, random_matrix(8, 8), (4, 4))
    change(stored)
    refused(stored, fp8_config((4, 4)), words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("_scale"), rf"'{NAME}_packed'.*'{NAME}_scale' is missing"),
        (without("_packed", "_scale"), rf"'{NAME}_shape'.*'{NAME}_packed' is missing"),
        (without("_shape"), rf"'{NAME}_packed'.*'{NAME}_shape' is missing"),
        (changed("_scale", lambda s: s[:, :1]), r"_scale' of shape \[8, 1\].*\[8, 3\]"),
        (changed("_scale", torch.Tensor.int), "_scale' of type int32"),
        (changed("_packed", lambda p: p[:, :1]), r"_packed' of shape \[8, 1\].*\[8, 2\]"),
        (changed("_packed", torch.Tensor.long), "_packed' of type int64: must be int32"),
        (changed("_shape", lambda _: torch.tensor([8, 13])), r"\[8, 13\]: needs groups of 4"),
        (changed("_shape", lambda _: torch.tensor([8])), r"_shape' of shape \[1\]"),
        (lambda t: t.update({f"{NAME}_zero_point": torch.ones(1)}), "_zero_point.*symmetric"),
        (lambda t: t.update({f"{NAME}_g_idx": torch.ones(1)}), "_g_idx'.*own order"),
    ],
)
def test_broken_int4_is_refused(change: Callable[[Tensors], object], words: str) -> None:
    """Fault: the same for INT4; zero points and reordered columns left out of the product."""
    stored, _ = to_int4(NAME, random_matrix(8, 12), 4)
    change(stored)
    refused(stored, int4_config(4), words)


def test_a_part_twice_is_refused() -> None:
    """Fault: two shards with the same tensor, of which one is taken without a word."""
    twice = [("a.weight_scale", torch.ones(1, 1))] * 2
    with pytest.raises(CheckpointError, match=r"'a\.weight_scale': comes twice"):
        list(dequantised(twice, int4_config(4)))


def test_modules_and_groups_must_agree() -> None:
    """Fault: a packed tensor whose group's size is guessed."""
    stored, _ = to_int4(NAME, random_matrix(8, 8), 4)
    refused(stored, int4_config(4, ignore=["re:.*up_proj"]), "ignores its module")
    quantization = int4_config(4)
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    refused(stored, quantization, "no group of quantization_config has it")


def int4_weights(**changes: Any) -> dict[str, Any]:
    quantization = int4_config(4)
    quantization["config_groups"]["group_0"]["weights"] |= changes
    return quantization


def int4_group(**changes: Any) -> dict[str, Any]:
    quantization = int4_config(4)
    quantization["config_groups"]["group_0"] |= changes
    return quantization


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({}, "quant_method=None: only fp8 and compressed-tensors"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        (fp8_config((4, 4), weight_block_size=None), "weight_block_size=None"),
        (fp8_config((4, 4), weight_block_size=[128]), r"weight_block_size=\[128\]"),
        (fp8_config((4, 4), weight_block_size=[128, 0]), r"weight_block_size=\[128, 0\]"),
        (fp8_config((4, 4), activation_scheme="static"), "activation_scheme='static'"),
        (fp8_config((4, 4), fmt="e5m2"), "fmt='e5m2'"),
        (fp8_config((4, 4), scale_fmt="e4m3"), "scale_fmt='e4m3'"),
        (fp8_config((4, 4), expert_dtype="fp4"), "expert_dtype='fp4'"),
        (int4_config(4, format="float-quantized"), "format='float-quantized'"),
        (int4_config(4, format=None), "format=None"),
        (int4_config(4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
        (int4_config(4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config="),
        (int4_config(4, transform_config={"config_groups": {"R1": {}}}), "transform_config="),
        (int4_config(4, config_groups={}), "config_groups={}"),
        (int4_config(4, config_groups={"a": {}}), "must describe its weights"),
        (int4_config(4, ignore=["re:("]), "no regular expression"),
        (int4_config(4, ignore="lm_head"), "must be a list of names"),
        (int4_group(format="int-quantized"), "format='int-quantized'"),
        (int4_group(input_activations={"num_bits": 8}), "input_activations="),
        (int4_group(output_activations={"num_bits": 8}), "output_activations="),
        (int4_weights(num_bits=8), "num_bits=8"),
        (int4_weights(type="float"), "type='float'"),
        (int4_weights(symmetric=False), "symmetric=False"),
        (int4_weights(strategy="tensor"), "strategy='tensor'"),
        (int4_weights(strategy="block", block_structure="8x8"), "strategy='block'"),
        (int4_weights(dynamic=True), "dynamic=True"),
        (int4_weights(actorder="group"), "actorder='group'"),
        (int4_weights(group_size=None), "group_size=None"),
        (int4_weights(group_size=True), "group_size=True"),
        (int4_weights(strategy="channel"), "group_size=4"),
    ],
)
def test_other_forms_are_refused(quantization: dict[str, Any], words: str) -> None:
    """Fault: another arithmetic that is read as one of ours; said before any tensor is read."""
    with pytest.raises(CheckpointError, match=words):
        scheme_of(quantization)


def test_the_config_may_be_nested() -> None:
    """Fault: a multimodal checkpoint whose inner quantization_config is passed over."""
    own = fp8_config((128, 128))
    assert quantization_config({}) is None
    assert quantization_config({"quantization_config": None, "text_config": None}) is None
    assert quantization_config({"text_config": {"quantization_config": own}}) == own
    both = {"quantization_config": own, "text_config": {"quantization_config": own}}
    assert quantization_config(both) == own
    both["text_config"] = {"quantization_config": int4_config(4)}
    with pytest.raises(CheckpointError, match="differs from the one in text_config"):
        quantization_config(both)
    with pytest.raises(CheckpointError, match="must be an object"):
        quantization_config({"quantization_config": "fp8"})


def test_summaries_say_what_stays() -> None:
    """Fault: dynamic FP8 activations that are dropped without a word."""
    assert "128 x 64" in scheme_of(fp8_config((128, 64))).summary
    assert "activations stay" in scheme_of(fp8_config((128, 64))).summary
    assert "INT4 in groups of 32" in scheme_of(int4_config(32)).summary


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "fp8": (lambda n, w: to_fp8(n, w, (48, 40)), fp8_config((48, 40))),
    "ue8m0": (
        lambda n, w: to_fp8(n, w, (32, 32), torch.float8_e8m0fnu),
        fp8_config((32, 32), scale_fmt="ue8m0"),
    ),
    "int4": (lambda n, w: to_int4(n, w, 32), int4_config(32)),
}


def agree(folder: Path, reference: Any, meant: Tensors, ids: list[int]) -> None:
    """Logits of the quantised folder equal those of transformers' network of its weights."""
    known = reference.state_dict()
    reference.load_state_dict({name: meant[name] for name in known if name in meant}, strict=False)
    ours = target_logits(load_target(folder, torch.float32, CPU), ids)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_llama_is_its_dequantised_self(
    form: str, tied: bool, tmp_path: Path, save_llama: Callable[..., Any]
) -> None:
    """Fault: weights that arrive transposed, unscaled or at another place. Three shards."""
    reference = save_llama(tmp_path, tie_word_embeddings=tied)
    ids = list(range(3, 60))
    with torch.inference_mode():
        before = reference(torch.tensor([ids])).logits[0]
    quantise, quantization = FORMS[form]
    meant = quantise_folder(tmp_path, is_linear, quantise, quantization)
    agree(tmp_path, reference, meant, ids)
    ours = target_logits(load_target(tmp_path, torch.float32, CPU), ids)
    assert not torch.allclose(ours, before, atol=1e-2), "the forms lose something"


def test_a_form_that_is_not_read_is_refused_before_its_weights(
    tiny_llama_folder: Path,
) -> None:
    """Fault: an hour of loading that ends in a refusal."""
    config = read_config(tiny_llama_folder)
    asymmetric = {**config, "quantization_config": int4_weights(symmetric=False)}
    with pytest.raises(CheckpointError, match="symmetric=False"):
        model_config(asymmetric)


def test_a_quantised_drafter_is_its_dequantised_self(
    tmp_path: Path, make_drafter: Callable[..., Eagle3], drafter_target: ModelConfig
) -> None:
    """Fault: a drafter whose packed weights are refused, or taken unscaled."""
    export_specforge(make_drafter(), tmp_path, torch.float32)
    meant = quantise_folder(tmp_path, is_linear, *FORMS["fp8"])
    drafter = load_drafter(tmp_path, drafter_target, torch.float32, CPU)
    for name, place in drafter.places().items():
        assert torch.equal(place.into, meant[name]), name
