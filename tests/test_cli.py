"""The command line: its options are frozen, and whatever is wrong with the input is said in a line.

Every bad input must end with status 2 and `error: value: rule; remedy` on stderr, without a stack
trace; nothing else of the commands' work is tested here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from eyas.cli import app
from eyas.config import SpeculationConfig
from eyas.flags import FlagGroup
from tests.chat_model import write_chat_model, write_drafter

ENGINE = (
    "--chunked-prefill-size --context-length --cuda-graph-max-bs --device --disable-cuda-graph "
    "--deterministic --draft-weights --dtype --load-format --memory-limit --overlap "
    "--simulate-accept-length --simulate-acceptance --tokenizer "
    "--max-running-requests --num-pages --page-size --tp"
)
DRAFTER = "--drafter-aux-layers --drafter-feedback --drafter-rope-theta"
SPECULATION = (
    "--no-speculative-shared-noise --speculative-algorithm --speculative-attention-mode "
    "--speculative-eagle-topk "
    "--speculative-num-draft-tokens --speculative-num-steps"
)
SAMPLING = (
    "--ignore-eos --max-tokens --min-p --seed --stop --stop-token-ids --temperature --top-k --top-p"
)
MODEL = f"--debug --drafter --help --model {DRAFTER}"
OPTIONS = {
    "demo": f"{MODEL} {ENGINE}",
    "info": f"{MODEL} {ENGINE} {SPECULATION} --json",
    "generate": f"{MODEL} {ENGINE} {SPECULATION} {SAMPLING} --prompts --raw prompt",
    "chat": f"{MODEL} {ENGINE} {SPECULATION} {SAMPLING} --system",
    "bench": f"{MODEL} {ENGINE} {SPECULATION} {SAMPLING} --batch-size --compare-noise --html "
    "--json --num-prompts --prompts --raw --rounds --stage-prompts",
    "explain": f"--debug --drafter --help {DRAFTER} {ENGINE} {SPECULATION} {SAMPLING} --batch-size "
    "--by-batch --cycles --html --json --lesson --num-prompts --profile --prompts --raw model",
    "trace": "--accept-length --debug --help --html --json files",
    "diff": "--debug --help --html --json a b",
    "calibrate": "--debug --device --dtype --help --json --name --seconds --tp",
    "plan": f"{SPECULATION} --accept-length --acceptance --all-reduce --batch-size --context "
    "--debug --draft-bits --drafter --engine --expert-bits --expert-overlap --help --html --json "
    "--kv-bits --markdown --nodes --profile --sharded-drafter --starting-case --tp --weight-bits "
    "model",
    "train": "--answer-tokens --attention --clip --conversations --debug --decay --device "
    "--draft-vocab-size --dtype --eval-every --evaluate-drafts --evaluate-prompts "
    "--evaluate-tokens --exclude --final-lr --folder --greedy-share --held-out --help "
    "--intermediate-size --log-every --long-share --loss-chunk --lr --max-length --max-minutes "
    "--model --no-fc-norm --no-norm-output --norm-before-residual --opening-share --prompts "
    "--resume --round-size --rows --save-every --seed --stage --steps --texts --ttt-steps "
    "--user-tokens --warmup --weight-decay --write-minutes --write-prefill --writers",
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny matrices: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable[..., Any]) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("chat"), save_llama))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_drafter(tmp_path_factory.mktemp("drafter")))


def eyas(*arguments: str, text: str = "") -> Any:
    return CliRunner().invoke(app, arguments, input=text)


def ok(*arguments: str, text: str = "") -> Any:
    result = eyas(*arguments, text=text)
    assert result.exit_code == 0, f"{arguments}\n{result.output}\n{result.exception!r}"
    return result


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_are_frozen(name: str) -> None:
    command: Any = typer.main.get_command(app)
    assert sorted(command.commands) == sorted(OPTIONS)
    context = typer.Context(command.commands[name])
    found = [opt for p in command.commands[name].get_params(context) for opt in p.opts]
    assert sorted(found) == sorted(OPTIONS[name].split())


def refused(message: str, *arguments: str) -> None:
    result = eyas(*arguments)
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: "), lines
    assert message in lines[0], lines
    assert lines[0].count(";") >= 1, f"no remedy: {lines}"
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("max_tokens=-1: must be at least 1", ("generate", "a", "--max-tokens", "-1")),
        ("temperature=-0.5: must be finite", ("generate", "a", "--temperature", "-0.5")),
        ("temperature=nan", ("generate", "a", "--temperature", "nan")),
        ("top_p=0.0", ("generate", "a", "--top-p", "0")),
        ("top_k=-2", ("chat", "--top-k", "-2")),
        ("empty prompt", ("generate", " ")),
        ("empty prompt", ("generate",)),
        ("stop=('',)", ("generate", "a", "--stop", "")),
        ("dtype 'int8'", ("generate", "a", "--dtype", "int8")),
        ("page_size=0", ("bench", "--page-size", "0")),
        ("feedback 'both'", ("generate", "a", "--drafter-feedback", "both")),
        ("rounds=0", ("bench", "--rounds", "0")),
        ("algorithm 'EAGLE9'", ("bench", "--speculative-algorithm", "EAGLE9")),
        ("attention_mode 'both'", ("bench", "--speculative-attention-mode", "both")),
        ("deterministic 'yes'", ("generate", "a", "--deterministic", "yes")),
        ("num_draft_tokens=9", ("generate", "a", "--speculative-num-draft-tokens", "9")),
        ("No such file", ("bench", "--prompts", "/nowhere/p.jsonl")),
        ("No such file", ("generate", "--prompts", "/nowhere/p.jsonl")),
        ("cannot be written", ("bench", "--json", "/nowhere/r.json")),
        ("rows=0", ("train", "--rows", "0")),
        ("accept_length=0.5", ("trace", "x.json", "--accept-length", "0.5")),
        ("No such file", ("trace", "/nowhere/t.json")),
        ("cannot be written", ("trace", "x.json", "--json", "/nowhere/r.json")),
        ("cannot be written", ("bench", "--html", "/nowhere/r.html")),
        ("No such file", ("diff", "/nowhere/a.json", "/nowhere/b.json")),
        ("seconds=0", ("calibrate", "--seconds", "0")),
        ("cannot be written", ("calibrate", "--json", "/nowhere/c.json")),
        ("is none of the shapes", ("plan", "shape:nothing")),
        ("profile 'abacus'", ("plan", "--profile", "abacus")),
        ("tp=3 for the query heads of 32", ("plan", "--tp", "3")),
        ("only the starting case is a page", ("plan", "--markdown", "page.md")),
        ("cannot be written", ("plan", "--json", "/nowhere/p.json")),
        ("nodes=4 with --speculative", ("plan", "--nodes", "4", "--speculative-num-steps", "2")),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(
    message: str, arguments: tuple[str, ...]
) -> None:
    refused(message, *arguments)


def test_bad_files_and_models(tmp_path: Path, model: str, save_llama: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    refused("rows.jsonl, line 2", "bench", "--prompts", str(rows))
    refused("is a folder or a .gguf file", "generate", "a", "--model", str(rows))
    refused(
        "is a folder or a .gguf file", "generate", "a", "--model", model, "--drafter", str(rows)
    )
    refused("config.json", "generate", "a", "--model", model, "--drafter", str(tmp_path))
    refused("tokenizer.json", "generate", "a", "--model", str(tmp_path))
    refused("tokenizer.json", "chat", "--model", str(tmp_path))
    plain = tmp_path / "gguf"
    plain.mkdir()
    (plain / "bad.gguf").write_bytes(b"not a model")
    refused("bad.gguf", "generate", "a", "--model", str(plain / "bad.gguf"))
    other = write_drafter(tmp_path / "other", target_hidden_size=96, own_embedding=True)
    refused("drafter", "generate", "a", "--model", model, "--drafter", str(other))


def test_what_needs_a_drafter_says_so(model: str) -> None:
    refused("no drafter was found", "demo", "--model", model)
    refused("bench without speculation", "bench", "--model", model)
    refused("bench without speculation", "bench", "--model", model, "--drafter", "none")
    steps = ("--speculative-num-steps", "3")
    refused("EAGLE3 without a drafter", "generate", "a", "--model", model, *steps)


def test_a_prompt_longer_than_the_context(model: str) -> None:
    long = "a" * 600
    refused("share a context of 512 tokens", "generate", long, "--model", model)
    tiny = ("--context-length", "40", "--model", model)
    refused("share a context of 40 tokens", "generate", "a" * 60, *tiny)
    refused("positions end at 512", "generate", "a", "--model", model, "--context-length", "513")


def test_debug_shows_the_error_itself() -> None:
    result = eyas("generate", " ", "--debug")
    assert type(result.exception).__name__ == "RequestError"


def test_generate_streams_one_and_lists_several(model: str, drafter: str) -> None:
    common = ("--model", model, "--dtype", "float32", "--max-tokens", "12", "--ignore-eos")
    alone = ok("generate", "hello", *common, "--drafter", "none").stdout
    both = ok("generate", "hello", *common, "--drafter", drafter)
    assert both.stdout == alone
    assert "12 tokens" in both.stderr
    several = ok("generate", "hello", "there", *common, "--drafter", drafter).stdout
    assert several.startswith(f"> hello\n{alone}")
    assert "> there\n" in several


def test_sampling_flags_reach_the_request(model: str) -> None:
    common = ("generate", "hello", "--model", model, "--max-tokens", "12", "--temperature", "1.5")
    texts = {ok(*common, "--seed", seed).stdout for seed in ("1", "2", "1")}
    assert len(texts) == 2


def test_chat_keeps_turns_and_survives_an_error(model: str) -> None:
    common = ("chat", "--model", model, "--max-tokens", "4", "--ignore-eos", "--system", "Be odd.")
    result = ok(*common, text=f"one\n\ntwo\n{'x' * 600}\n/reset\none\n/exit\nnever\n")
    assert result.stderr.count("4 tokens") == 3
    assert "share a context of 512" in result.stderr


def test_bench_ends_in_its_record(tmp_path: Path, model: str, drafter: str) -> None:
    file = tmp_path / "record.json"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one"}\n{"turns": ["two", "more"]}\n')
    flags = ("--max-tokens", "8", "--rounds", "1", "--temperature", "0.7", "--compare-noise")
    drawn = tmp_path / "record.html"
    place = ("--prompts", str(rows), "--json", str(file), "--html", str(drawn))
    result = ok(
        "bench", "--model", model, "--drafter", drafter, *flags, *place, "--batch-size", "2"
    )
    record = json.loads(result.stdout.strip().splitlines()[-1])
    assert record == json.loads(file.read_text())
    assert (record["schema"], record["version"]) == ("eyas.bench", 1)
    assert 'id="acceptance"' in drawn.read_text()
    compared = ok("diff", str(file), str(file), "--html", str(drawn))
    assert "alike within" in compared.stdout
    assert "A record.json, B record.json" in drawn.read_text()
    assert record["plain"]["tok_per_s"] > 0
    assert record["spec"]["tok_per_s"] > 0
    assert record["tokens_equal"] is True
    assert record["seeds"] == [0, 1]
    assert record["drafts_without_noise"]["accept_length"] >= 1
    assert record["flags"]["sampling"]["temperature"] == 0.7
    assert record["flags"]["bench"]["batch_size"] == 2
    assert record["flags"]["model"] == model
    assert record["flags"]["drafter_options"]["feedback"] == "auto"
    assert record["provenance"]["versions"]["torch"]
    keys = {"accept_length", "acceptance_by_position", "conditional_acceptance", "cycles"}
    assert keys <= set(record["spec"])
    keys = {"speedup", "verify_over_decode", "break_even", "stages_ms", "histogram", "warmup"}
    assert keys <= set(record)


def test_info_tells_memory_and_drafter(model: str, drafter: str) -> None:
    text = ok("info", "--model", model, "--drafter", drafter).stdout
    for words in ("LlamaForCausalLM", "keys and values", "drafter, given", "runs here"):
        assert words in text
    answer = json.loads(ok("info", "--model", model, "--drafter", drafter, "--json").stdout)
    assert answer["runs"]
    assert answer["machine"]["device"]
    assert answer["drafters"][0]["fits"]
    assert "drafter" in ok("info", "--model", drafter).stdout
    small = ("--speculative-num-steps", "1", "--max-running-requests", "1", "--memory-limit", "8")
    fewer = json.loads(ok("info", "--model", model, "--drafter", drafter, "--json", *small).stdout)
    assert fewer["memory"]["total"] < answer["memory"]["total"]


def test_info_reports_a_broken_folder(tmp_path: Path) -> None:
    """Fault: an error line instead of a report. Only a name that is nothing is refused."""
    assert "does not run here" in ok("info", "--model", str(tmp_path)).stdout
    refused("nowhere", "info", "--model", str(tmp_path / "nowhere"))


def test_a_small_model_drafts(tmp_path: Path, model: str, drafter: str, save_llama: Any) -> None:
    """Fault: a checkpoint's kind taken from its name, or an algorithm that is passed over."""
    small = str(write_chat_model(tmp_path / "small", save_llama, num_hidden_layers=2))
    common = ("generate", "hello", "--dtype", "float32", "--max-tokens", "12", "--ignore-eos")
    alone = ok(*common, "--model", model, "--drafter", "none").stdout
    algorithm = ("--speculative-algorithm", "STANDALONE")
    for flags in (("--drafter", small), ("--drafter", small, *algorithm)):
        result = ok(*common, "--model", model, *flags)
        assert result.stdout == alone
        assert "tokens a cycle" in result.stderr
    answer = json.loads(ok("info", "--model", model, "--drafter", small, "--json").stdout)
    assert answer["drafters"][0]["algorithm"] == "STANDALONE"
    refused("STANDALONE without a drafter", *common, "--model", model, *algorithm)
    refused(
        "STANDALONE with a drafter that is an EAGLE-3 network",
        *(*common, "--model", model, *algorithm, "--drafter", drafter),
    )
    refused(
        "EAGLE3 with a drafter that is a language model",
        *(*common, "--model", model, "--speculative-num-steps", "2", "--drafter", small),
    )


def test_drafter_options_reach_the_drafter(model: str, drafter: str) -> None:
    """Fault: an override that does nothing."""
    common = ("generate", "a", "--model", model, "--drafter", drafter, "--max-tokens", "4")
    layers = [f for i in ("2", "4", "9") for f in ("--drafter-aux-layers", i)]
    refused("auxiliary layers [2, 4, 9]", *common, *layers)
    layers[-1] = "8"
    ok(*common, *layers, "--drafter-feedback", "pre", "--drafter-rope-theta", "500")


def test_plan_ends_in_its_record(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    flags = ("--tp", "2", "--batch-size", "4", "--speculative-num-steps", "2", "--json", str(file))
    text = ok("plan", "shape:qwen3-8b", *flags).stdout
    assert "What if" in text and "as asked" in text
    record = json.loads(file.read_text())
    assert (record["schema"], record["version"]) == ("eyas.plan", 1)
    keys = {"option", "decode_ms", "cycle_ms", "tok_per_s", "speedup", "break_even"}
    assert all(keys <= set(row) for row in record["rows"])
    assert record["flags"]["model"] == "shape:qwen3-8b"
    assert record["provenance"]["versions"]["torch"]
    page, case = tmp_path / "case.md", tmp_path / "case.json"
    ok("plan", "--starting-case", "--markdown", str(page), "--json", str(case))
    assert page.read_text().startswith("# The starting case")
    assert json.loads(case.read_text())["all_reduces"] == 122


def test_a_chain_needs_only_its_steps(model: str, drafter: str) -> None:
    flags = ("--max-tokens", "4", "--model", model, "--drafter", drafter)
    ok("generate", "a", *flags, "--speculative-num-steps", "2")
    tree = ("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
    ok("generate", "a", *flags, "--speculative-num-steps", "3", *tree)


def test_flags_that_are_not_given_leave_the_defaults_to_the_dataclass() -> None:
    group = FlagGroup(config=SpeculationConfig, prefix="speculative_", optional=True)
    names = {p.name: None for p in group.parameters()}
    assert group.build(names) is None
    given = names | {"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}
    assert group.build(given) == SpeculationConfig(num_steps=2, num_draft_tokens=3)
    off = names | {"speculative_shared_noise": True}
    assert group.build(off) == SpeculationConfig(shared_noise=False)
