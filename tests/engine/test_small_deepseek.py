"""The real small DeepSeek-V3-style model: transformers' texts, and speculation that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from eyas.checkpoint import tensor_stream
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import LLM
from eyas.kernels import planes
from eyas.quantised import dequantised

ASSETS = Path(__file__).parents[2] / "assets" / "small-deepseek"
QUESTIONS = (
    "What is photosynthesis?",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "List five fruits and their colours.",
)
SHAPES = {
    "chain": SpeculationConfig.chain(4),
    "tree": SpeculationConfig(num_steps=4, eagle_topk=3, num_draft_tokens=12),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(dtype: str, draft_weights: str = "auto") -> LLM:
    """The model with its drafter."""
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        context_length=256,
        max_running_requests=4,
        tokenizer="smollm2",
        draft_weights=draft_weights,
    )
    return LLM(
        str(ASSETS / "target"),
        drafter=str(ASSETS / "drafter"),
        speculation=SpeculationConfig.chain(4),
        config=config,
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return load(request.param)


def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.chat([{"role": "user", "content": q}]) for q in QUESTIONS]


def answers(llm: LLM, shape: SpeculationConfig, params: SamplingParams) -> tuple[Any, float]:
    """Texts, and the mean accept length."""
    outputs = llm.sibling(shape).generate(prompts(llm), params)
    lengths = [n for one in outputs for n in one.accept_lengths]
    return [one.token_ids for one in outputs], sum(lengths) / len(lengths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_is_lossless_and_pays(llm: LLM, temperature: float) -> None:
    """Faults: verify that is not decode for latent attention or experts; a drafter misread.

    Accept lengths were 3.37 on arithmetic and 2.4 elsewhere when the drafter was made.
    """
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=1, ignore_eos=True)
    plain, one = answers(llm, SpeculationConfig(algorithm="NONE"), params)
    assert one == 1
    for name, shape in SHAPES.items():
        texts, length = answers(llm, shape, params)
        assert texts == plain, name
        assert length > (1.6 if temperature == 0 else 1.1), f"{name}: accept length {length}"


def test_weights_of_8_bits_draft_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: rows or weights rounded so coarsely that fewer drafts are accepted.

    The drafter computes as on a GPU, in two planes of bytes; texts are the same, so the lengths are
    those of the same cycles.
    """
    params, rows = SamplingParams(max_tokens=128, ignore_eos=True), []

    def in_planes(x: torch.Tensor, *layer: Any, gates: bool = False) -> torch.Tensor:
        rows.append(x.shape[0])
        weight, scales, bias, _, *more = layer
        return planes.int8_linear_reference(x, weight, scales, bias, gates or any(more))

    texts, length = answers(load("bfloat16", "full"), SHAPES["chain"], params)
    monkeypatch.setattr("eyas.layers.linear.scale_type", lambda *_: torch.float32)
    monkeypatch.setattr(planes, "int8_linear", in_planes)
    monkeypatch.setattr("eyas.speculate.eagle3.QUICK_ROWS", {"cpu": planes.MOST_ROWS_8_BIT})
    same, quick = answers(load("bfloat16", "int8"), SHAPES["chain"], params)
    drafts, committed = len(QUESTIONS), len(QUESTIONS) * (SHAPES["chain"].num_steps + 1)
    assert {drafts, committed} <= set(rows), "it drafts or extends with other weights"
    assert same == texts
    assert quick == pytest.approx(length, rel=0.01)


@torch.inference_mode()
def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """Fault: FP8, latent attention or routing nearly right. transformers holds the same numbers."""
    llm = load("float32")
    config = json.loads((ASSETS / "target" / "config.json").read_text())
    scheme = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = dequantised(tensor_stream(ASSETS / "target"), scheme)
    weights = {name: tensor.float().contiguous() for name, tensor in tensors}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts, _ = answers(llm, SpeculationConfig(algorithm="NONE"), params)
    for prompt, text in zip(prompts(llm), texts, strict=True):
        logits = theirs(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text
