"""What `eyas info` says of a checkpoint: the truth about a sound one, the reason about a broken."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from eyas.checkpoint import read_config
from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.admission import GIB
from eyas.errors import CheckpointError
from eyas.report.info import Inquiry, machine
from eyas.report.info_table import show
from tests.chat_model import write_chat_model, write_drafter
from tests.quantising import fp8_config, int4_config, quantise_folder, to_fp8, to_int4
from tests.speculate.writing import Made, eagle, modelopt, specforge, speculators, write

CPU = EngineConfig(device="cpu", dtype="float32")
SaveLlama = Callable[..., Any]


def say(model: Path | str, drafter: Path | str | None = None, **config: Any) -> dict[str, Any]:
    """The answer, which must be JSON and make a table."""
    settings = EngineConfig(**{"device": "cpu", "dtype": "float32", **config})
    name = None if drafter is None else str(drafter)
    answer = Inquiry(model=str(model), drafter=name, config=settings).answer()
    json.dumps(answer)
    shown = io.StringIO()
    show(Console(width=120, file=shown), machine(settings), answer)
    text = "".join(shown.getvalue().split())
    assert all("".join(refusal.split()) in text for refusal in answer["refusals"])
    assert answer["runs"] == (not answer["refusals"])
    return answer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, save_llama: SaveLlama) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("sound"), save_llama)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to harm."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_a_sound_target(sound: Path) -> None:
    """Fault: sizes of another model; a verdict without having looked."""
    answer = say(sound)
    assert answer["kind"] == "target"
    assert answer["runs"]
    found = answer["checkpoint"]
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["family"] == "llama"
    assert found["attention"] == "grouped-query: 4 query and 2 KV heads of 16"
    saved = load_file(sound / "model.safetensors")
    assert found["parameters"] == sum(t.numel() for t in saved.values())
    assert found["stored types"] == {"float32": 4 * found["parameters"]}
    assert found["tensors"] == len(saved)
    assert answer["drafters"] == []
    assert "hidden size 64" in answer["drafting"]["EAGLE3"]["needs"]
    memory = answer["memory"]
    assert sum(part["bytes"] for part in memory["parts"]) == memory["total"] < memory["available"]
    assert memory["bytes_per_position"] == 8 * 2 * 2 * 16 * 4
    assert memory["num_pages"] == memory["pages_for_every_request"]
    assert memory["touched"]["bytes"] < memory["total"]


def test_a_latent_cache_and_experts(tmp_path: Path, save_deepseek: Callable[..., Any]) -> None:
    """Fault: a latent counted as keys and values of every head, or all experts as active."""
    reference = save_deepseek(tmp_path, "v3")
    answer = say(tmp_path)
    found = answer["checkpoint"]
    assert "multi-head latent: 4 heads over one latent of 32" in found["attention"]
    assert "experts" in found["feed forward"]
    biases = 3 * 8  # a buffer there, a parameter here
    assert found["parameters"] == sum(p.numel() for p in reference.parameters()) + biases
    assert found["active parameters"] < found["parameters"]
    assert answer["memory"]["bytes_per_position"] == 4 * (32 + 16) * 4


def test_ranks_and_requests_change_the_memory(sound: Path) -> None:
    """Fault: a budget that does not heed its flags."""
    one, two = say(sound), say(sound, tp=2)
    assert two["memory"]["tp"] == 2
    assert {"rank 0", "rank 1", "differences"} <= two["ranks"].keys()
    assert one["ranks"] is None
    assert two["memory"]["bytes_per_position"] == one["memory"]["bytes_per_position"] // 2
    parts = {part["name"]: part["bytes"] for part in two["memory"]["parts"]}
    assert parts["weights"] < 0.6 * one["memory"]["total"]
    assert "tp=3" in say(sound, tp=3)["refusals"][0]
    assert say(sound, max_running_requests=1)["memory"]["total"] < one["memory"]["total"]


def test_what_does_not_fit(sound: Path) -> None:
    """Fault: a table without a verdict; fewer pages without a word."""
    whole = say(sound)["memory"]
    pages = {part["name"]: part["bytes"] for part in whole["parts"]}["keys and values"]
    tight = say(sound, memory_limit=(whole["total"] - pages // 2) / GIB)
    assert tight["runs"]
    assert tight["memory"]["num_pages"] < tight["memory"]["pages_for_every_request"]
    refused = say(sound, memory_limit=0.0001)
    assert not refused["runs"]
    assert "cpu has" in refused["refusals"][0]
    assert refused["memory"]["total"] == whole["total"]


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_quantised_targets(folder: Path, form: str) -> None:
    """Fault: dynamic activations that nobody hears of; the packed size taken for the memory."""
    before = say(folder)["memory"]["total"]
    if form == "fp8":
        how: Any = (lambda n, w: to_fp8(n, w, (32, 32)), fp8_config((32, 32)))
    else:
        how = (lambda n, w: to_int4(n, w, 32), int4_config(32))
    quantise_folder(folder, lambda name: "_proj" in name, *how)
    answer = say(folder)
    assert answer["runs"]
    assert ("activations stay" in answer["checkpoint"]["quantisation"]) == (form == "fp8")
    assert answer["memory"]["total"] == before
    change(folder, quantization_config={"quant_method": "gptq"})
    assert "quant_method='gptq'" in say(folder)["refusals"][0]


def lose(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def put(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def alter(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return harm


def only_gguf(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


INDEX = json.dumps({"weight_map": {"a": "gone.safetensors"}})
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lose("config.json"), "config.json: cannot be read"),
    "config cut": (cut("config.json", 50), "is not JSON"),
    "config of a list": (put("config.json", "[]"), "must hold a JSON object"),
    "no weights": (lose("model.safetensors"), "holds none of"),
    "weights cut": (cut("model.safetensors", 5000), "no readable safetensors"),
    "header cut": (cut("model.safetensors", 40), "no readable safetensors"),
    "weights of nothing": (cut("model.safetensors", 0), "no readable safetensors"),
    "a shard lost": (
        lambda f: (lose("model.safetensors")(f), put("model.safetensors.index.json", INDEX)(f)),
        "gone.safetensors",
    ),
    "a tensor lost": (alter(lambda t: t.pop("model.norm.weight")), "'model.norm.weight': missing"),
    "a tensor more": (alter(lambda t: t.update(odd=torch.ones(1))), "'odd': is spare"),
    "a wrong shape": (
        alter(lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        r"'model.norm.weight' of shape [3]",
    ),
    "no tokenizer": (lose("tokenizer.json"), "tokenizer.json: is missing"),
    "a broken tokenizer": (put("tokenizer.json", "{"), "is no tokenizer"),
    "only a GGUF file": (only_gguf, "config.json: cannot be read"),
    "another architecture": (
        lambda f: change(f, architectures=["MixtralForCausalLM"]),
        "MixtralForCausalLM",
    ),
    "refused by name": (
        lambda f: change(f, architectures=["GptOssForCausalLM"]),
        "attention sinks",
    ),
    "no architecture": (lambda f: change(f, architectures=None), "architecture"),
    "architectures no list": (lambda f: change(f, architectures=7), "architecture"),
    "another activation": (lambda f: change(f, hidden_act="gelu"), "hidden_act='gelu'"),
    "a word for a number": (lambda f: change(f, rms_norm_eps="small"), "cannot be understood"),
    "absurd dimensions": (
        lambda f: change(f, hidden_size=2**31 - 1, intermediate_size=2**31 - 1),
        "no network has its",
    ),
    "more layers than tensors": (lambda f: change(f, num_hidden_layers=10**9), "below 4096"),
    "odd end of text": (lambda f: change(f, eos_token_id=[{}]), "eos_token_id"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_broken_folders_are_reported(folder: Path, harm: str) -> None:
    """Fault: a stack trace, or a verdict that it runs. The reason is the engine's own."""
    edit, words = HARMS[harm]
    edit(folder)
    answer = say(folder)
    assert not answer["runs"]
    assert any(words in refusal for refusal in answer["refusals"]), answer["refusals"]


def test_odd_configs_never_crash(folder: Path) -> None:
    """Fault: a crash in a reader of a value it did not expect. 40 configs, three keys each."""
    rng = random.Random(0)
    config = json.loads((folder / "config.json").read_text())
    for _ in range(40):
        (folder / "config.json").write_text(json.dumps(harmed(config, rng)))
        say(folder)


NAN = float("nan")
ODD: tuple[Any, ...] = (None, -1, 0, 1.5, "x", [], [1], {}, {"a": 1}, True, 10**30, NAN, "", [None])


def harmed(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """`config` with odd values for three keys."""
    return config | {key: rng.choice(ODD) for key in rng.sample(sorted(config), 3)}


def test_names_that_are_nothing(tmp_path: Path) -> None:
    """Fault: a report about nothing. A file that is there is reported on."""
    with pytest.raises(CheckpointError):
        say(tmp_path / "nowhere")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    answer = say(tmp_path / "broken.gguf")
    assert answer["kind"] == "unknown"
    assert "no complete GGUF file" in answer["refusals"][0]


def test_nothing_is_read_of_a_large_model(tmp_path: Path, sound: Path) -> None:
    """Fault: minutes, or all of the memory, spent on reading weights. 16 GB of holes."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    shutil.copytree(sound, tmp_path / "big")
    change(tmp_path / "big", **sizes, **heads, num_hidden_layers=32, max_position_embeddings=8192)
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj": (r, 4096) for n, r in ROWS.items()}
    layer |= {"mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096)}
    layer |= {"mlp.down_proj": (4096, 14336), "input_layernorm": (4096,)}
    layer["post_attention_layernorm"] = (4096,)
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (128256, 4096)}
    shapes |= {"model.embed_tokens.weight": (128256, 4096), "model.norm.weight": (4096,)}
    for i in range(32):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    write_holes(tmp_path / "big" / "model.safetensors", shapes)
    answer = say(tmp_path / "big", dtype="bfloat16", context_length=2048)
    assert answer["checkpoint"]["parameters"] == 8030261248
    assert answer["checkpoint"]["bytes on disk"] > 16e9
    weights = answer["memory"]["parts"][0]
    assert (weights["name"], weights["bytes"]) == ("weights", 2 * 8030261248)


ROWS = {"q": 4096, "k": 1024, "v": 1024, "o": 4096}


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A bfloat16 safetensors file that takes no room: its data was never written."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_the_shipped_drafter(smollm2_folder: Path) -> None:
    """Fault: the drafter that `auto` takes, not named, or its memory left out."""
    del smollm2_folder
    answer = say("smollm2", "auto", dtype="bfloat16")
    (drafter,) = answer["drafters"]
    assert drafter["source"] == "shipped"
    assert drafter["fits"]
    assert drafter["draft tokens"] == 10240
    assert answer["memory"]["algorithm"] == "EAGLE3"
    assert any(part["name"] == "drafter in 8 bits" for part in answer["memory"]["parts"])
    plain = say("smollm2", None, dtype="bfloat16")
    assert plain["memory"]["algorithm"] == "NONE"
    assert plain["drafters"] == answer["drafters"], "it is shipped, wanted or not"


def test_given_drafters(sound: Path, tmp_path: Path, save_llama: SaveLlama) -> None:
    """Fault: a drafter of another target, or of another kind, said to fit."""
    fitting = say(sound, write_drafter(tmp_path / "fits"))
    assert fitting["drafters"][0]["fits"]
    assert fitting["drafters"][0]["format"] == "the format of SpecForge and SGLang"
    assert fitting["memory"]["algorithm"] == "EAGLE3"
    other = say(sound, write_drafter(tmp_path / "other", vocab_size=200))
    assert not other["drafters"][0]["fits"]
    assert "vocabulary has 288" in other["drafters"][0]["reason"]
    assert other["runs"], "the target runs without it"
    small = write_chat_model(tmp_path / "small", save_llama, num_hidden_layers=1)
    model = say(sound, small)["drafters"][0]
    assert (model["fits"], model["algorithm"]) == (True, "STANDALONE")
    missing = say(sound, tmp_path / "nothing")["drafters"][0]
    assert not missing["fits"]


FORMATS: dict[str, Callable[[Made], Any]] = {
    "the EAGLE authors' format": eagle,
    "the format of SpecForge and SGLang": specforge,
    "the format of speculators": speculators,
    "the format that ModelOpt and vLLM's converters export": modelopt,
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_drafter_as_the_model(tmp_path: Path, form: str) -> None:
    """Fault: a drafter's folder taken for a broken target. EAGLE's config says it is a Llama."""
    answer = say(write(tmp_path / "drafter", *FORMATS[form](Made.random())))
    assert answer["kind"] == "drafter"
    assert answer["runs"]
    assert answer["checkpoint"]["format"] == form
    assert answer["checkpoint"]["draft tokens"] == 40
    fits = answer["fits"]
    assert (fits["hidden size"], fits["vocabulary"]) == (32, 128)
    assert fits["layers at least"] in (5, 7)
    rng, file = random.Random(1), tmp_path / "drafter" / "config.json"
    config = json.loads(file.read_text())
    for _ in range(25):
        file.write_text(json.dumps(harmed(config, rng)))
        assert say(file.parent)["kind"] in ("drafter", "unknown")


def test_a_shipped_drafter_as_the_model() -> None:
    """Fault: a drafter whose target is known, not named."""
    shipped = Path(__file__).parent.parent.parent / "src/eyas/drafters/smollm2-135m-instruct"
    assert "smollm2" in say(shipped)["fits"]["made for"]


def test_a_drafter_that_nobody_can_use(tmp_path: Path) -> None:
    """Fault: an EAGLE-1 checkpoint called a target, or one that fits."""
    config, tensors = eagle(Made.random())
    kept = {name: t for name, t in tensors.items() if "hidden_norm" not in name}
    answer = say(write(tmp_path / "old", config, kept))
    assert answer["kind"] == "drafter"
    assert not answer["runs"]
    assert "EAGLE-1 or EAGLE-2" in answer["refusals"][0]


def test_speculation_is_part_of_the_question(sound: Path, tmp_path: Path) -> None:
    """Fault: memory of another algorithm than the one asked for."""
    drafter = str(write_drafter(tmp_path / "fits"))
    wide = SpeculationConfig(num_steps=3, eagle_topk=4, num_draft_tokens=16)
    answers = [
        Inquiry(model=str(sound), drafter=drafter, config=CPU, speculation=speculation).answer()
        for speculation in (wide, SpeculationConfig(algorithm="NGRAM"))
    ]
    assert [a["memory"]["algorithm"] for a in answers] == ["EAGLE3", "NGRAM"]
    assert answers[0]["memory"]["total"] > answers[1]["memory"]["total"]
    assert read_config(sound)["num_hidden_layers"] == 8
