"""The command line: thin. Flags derive from config fields (`flags.py`); work is done elsewhere.

An `EyasError` becomes one red line on stderr and exit status 2; `--debug` shows its stack trace.
Commands import what they need when they run, so that `eyas --help` is quick.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from eyas.config import DrafterOptions, EngineConfig, SamplingParams, SpeculationConfig, require
from eyas.errors import EyasError, RequestError
from eyas.flags import FlagGroup, with_configs
from eyas.report.options import BenchConfig, CalibrateConfig, ExplainConfig, PlanConfig
from eyas.report.records import require_writable
from eyas.train.settings import TrainConfig

if TYPE_CHECKING:
    from eyas.engine.engine import LLM
    from eyas.report.answering import Answering

app = typer.Typer(
    name="eyas",
    help="LLM inference with EAGLE-3 speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

Model = Annotated[
    str, typer.Option(help="smollm2, a checkpoint folder, a .gguf file or a hub repository")
]
Drafter = Annotated[
    str,
    typer.Option(
        help="EAGLE-3 drafter or small model that drafts; auto: the one shipped for the model; none"
    ),
]
Target = Annotated[
    str, typer.Argument(help="smollm2, a checkpoint folder, a .gguf file or a hub repository")
]
PlanModel = Annotated[
    str, typer.Argument(help="checkpoint folder, hub repository, or shape:NAME; only its config")
]
PlanDrafter = Annotated[
    str, typer.Option(help="usual, latent, none, auto, shape:NAME, or a checkpoint")
]
Json = Annotated[str, typer.Option("--json", help="file that the record is written to")]
Html = Annotated[str, typer.Option("--html", help="file that the record is drawn in")]
RunRecord = Annotated[Path, typer.Argument(help="a record that --json of a command wrote")]
Traces = Annotated[list[Path], typer.Argument(help="profiler traces, .json or .json.gz")]
AcceptLength = Annotated[
    float, typer.Option(help="tokens a cycle commits, where known: traces do not say")
]
AsJson = Annotated[bool, typer.Option("--json", help="print plain values instead of tables")]
Prompts = Annotated[list[str] | None, typer.Argument(help="prompts, answered together")]
PromptFile = Annotated[
    str, typer.Option("--prompts", help='JSON Lines file of {"prompt"} or {"turns"} rows')
]
Raw = Annotated[bool, typer.Option(help="send prompts as they are, without chat template")]
System = Annotated[str, typer.Option(help="system message of the conversation")]


def _complete_chain(given: dict[str, Any]) -> dict[str, Any]:
    """Without a number of draft tokens a chain verifies its steps and the root."""
    is_chain = given.get("eagle_topk", 1) == 1
    if "num_steps" in given and "num_draft_tokens" not in given and is_chain:
        return given | {"num_draft_tokens": given["num_steps"] + 1}
    return given


ENGINE = FlagGroup(config=EngineConfig, skip=("seed",), panel="Engine")
SPECULATION = FlagGroup(
    config=SpeculationConfig,
    prefix="speculative_",
    optional=True,
    panel="Speculation",
    complete=_complete_chain,
)
DRAFTER = FlagGroup(config=DrafterOptions, prefix="drafter_", panel="Drafter")
SAMPLING = FlagGroup(config=SamplingParams, panel="Sampling")
BENCH = FlagGroup(config=BenchConfig, panel="Bench")
EXPLAIN = FlagGroup(config=ExplainConfig, panel="Explain")
PLAN = FlagGroup(config=PlanConfig, panel="Plan")
CALIBRATE = FlagGroup(config=CalibrateConfig, panel="Calibrate")
TRAIN = FlagGroup(config=TrainConfig, panel="Training")


def command(**groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose parameters named in `groups` are configs made from flags."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        expanded = with_configs(**groups)(function)

        def guarded(*, debug: bool, **values: Any) -> None:
            try:
                expanded(**values)
            except EyasError as error:
                if debug:
                    raise
                _report(error)
                raise typer.Exit(2) from None

        signature = inspect.signature(expanded)
        flag = inspect.Parameter(
            "debug",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(False, "--debug", help="show the stack trace of an error"),
            annotation=bool,
        )
        guarded.__name__, guarded.__doc__ = function.__name__, function.__doc__
        guarded.__annotations__ = expanded.__annotations__ | {"debug": bool}
        cast(Any, guarded).__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), flag]
        )
        app.command()(guarded)
        return guarded

    return register


@command(engine=ENGINE, options=DRAFTER)
def demo(
    engine: EngineConfig,
    options: DrafterOptions,
    model: Model = "smollm2",
    drafter: Drafter = "auto",
) -> None:
    """Show plain decoding and EAGLE-3 side by side, their equal texts, and the speed-up."""
    from eyas.report.demo import demo as show_demo

    if not show_demo(
        _load(model, drafter, engine, None, options, engines=2), Console(highlight=False)
    ):
        raise typer.Exit(1)


@command(engine=ENGINE, speculation=SPECULATION, options=DRAFTER, sampling=SAMPLING)
def generate(
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    sampling: SamplingParams,
    prompt: Prompts = None,
    prompts: PromptFile = "",
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    raw: Raw = False,
) -> None:
    """Answer prompts: a single one as it is written, several together."""
    from eyas.report.answering import Answering
    from eyas.report.bench import encode
    from eyas.report.prompts import load_prompts

    texts = [*(prompt or []), *(load_prompts(prompts) if prompts else [])]
    if not texts or not all(text.strip() for text in texts):
        raise RequestError("empty prompt", "a prompt needs some text", "give one in quotes")
    llm = _load(model, drafter, engine, speculation, options)
    tokens = encode(llm, texts, not raw)
    run = Answering(llm.engine, tokens, [sampling] * len(tokens), stream=True)
    while not run.done:
        run.step()
        if len(texts) == 1:
            typer.echo(run.new_text(), nl=False)
    if len(texts) == 1:
        typer.echo()
    else:
        for text, request in zip(texts, run.requests, strict=True):
            typer.secho(f"> {text}", bold=True)
            typer.echo(f"{request.text}\n")
    _summary(run)


@command(engine=ENGINE, speculation=SPECULATION, options=DRAFTER, sampling=SAMPLING)
def chat(
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    sampling: SamplingParams,
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    system: System = "",
) -> None:
    """Talk with the model; /reset forgets the conversation, /exit or Ctrl-D ends it."""
    from eyas.chat import Conversation

    talk = Conversation(_load(model, drafter, engine, speculation, options), sampling, system)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if text == "/exit":
            return
        if text == "/reset":
            talk.reset()
        elif text:
            _turn(talk.ask(text))
            if talk.last is not None:
                _summary(talk.last)


@command(
    engine=ENGINE, speculation=SPECULATION, options=DRAFTER, sampling=SAMPLING, bench_config=BENCH
)
def bench(
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    sampling: SamplingParams,
    bench_config: BenchConfig,
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    json_file: Json = "",
    html_file: Html = "",
) -> None:
    """Measure speculation against plain decoding; prints tables, then the record as JSON."""
    from eyas.report.bench import bench as measure
    from eyas.report.bench import select
    from eyas.report.table import show

    texts = select(bench_config)
    require_writable(json_file, html_file)
    if engine.max_running_requests < bench_config.batch_size:
        engine = dataclasses.replace(engine, max_running_requests=bench_config.batch_size)
    engines = 2 + bench_config.compare_noise
    llm = _load(model, drafter, engine, speculation, options, engines)
    record = measure(llm, texts, bench_config, sampling, Console(stderr=True).is_terminal)
    record["flags"] |= {
        "model": model,
        "drafter": drafter,
        "drafter_options": dataclasses.asdict(options),
    }
    show(Console(highlight=False), record)
    _write(record, json_file, html_file)
    typer.echo(json.dumps(record))


@command(engine=ENGINE, speculation=SPECULATION, options=DRAFTER, sampling=SAMPLING, config=EXPLAIN)
def explain(
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    sampling: SamplingParams,
    config: ExplainConfig,
    model: Target = "smollm2",
    drafter: Drafter = "auto",
    json_file: Json = "",
    html_file: Html = "",
) -> None:
    """Run a workload and account for every millisecond of a cycle, and of a plain decode step."""
    from eyas.report.bench import select
    from eyas.report.explain import explain as take_apart
    from eyas.report.explain_table import show

    texts = select(config)
    require_writable(json_file, html_file)
    if engine.max_running_requests < config.most_requests:
        engine = dataclasses.replace(engine, max_running_requests=config.most_requests)
    llm = _load(model, drafter, engine, speculation, options, engines=2)
    record = take_apart(llm, texts, config, sampling, Console(stderr=True).is_terminal)
    record["flags"] |= {
        "model": model,
        "drafter": drafter,
        "drafter_options": dataclasses.asdict(options),
    }
    show(Console(highlight=False), record)
    _write(record, json_file, html_file)


@command()
def trace(
    files: Traces, accept_length: AcceptLength = 0.0, json_file: Json = "", html_file: Html = ""
) -> None:
    """Say where a cycle's time goes in torch-profiler traces of SGLang, vLLM or eyas."""
    from eyas.report.foreign import analyse
    from eyas.report.trace_table import show

    require_writable(json_file, html_file)
    known = accept_length == 0 or accept_length >= 1
    rule = "a cycle commits at least one token"
    require(known, f"accept_length={accept_length}", rule, "give 1 or more, or leave it out")
    record = analyse(files, accept_length or None)
    show(Console(highlight=False), record)
    _write(record, json_file, html_file)


@command()
def diff(a: RunRecord, b: RunRecord, json_file: Json = "", html_file: Html = "") -> None:
    """Say what differs between two runs, ranked by the milliseconds it explains."""
    from eyas.report.compare import KINDS, compare
    from eyas.report.diff_table import show
    from eyas.report.records import kind_of, read_record

    require_writable(json_file, html_file)
    first = read_record(a, KINDS)
    record = compare(first, read_record(b, [kind_of(first)]))
    record["files"] = [Path(a).name, Path(b).name]
    show(Console(highlight=False), record)
    _write(record, json_file, html_file)


@command(config=TRAIN)
def train(config: TrainConfig) -> None:
    """Train an EAGLE-3 drafter on text that the target writes, and export it."""
    from eyas.train.trainer import run

    run(config)


@command(speculation=SPECULATION, config=PLAN)
def plan(
    speculation: SpeculationConfig | None,
    config: PlanConfig,
    model: PlanModel = "shape:llama-3.1-8b",
    drafter: PlanDrafter = "usual",
    json_file: Json = "",
    html_file: Html = "",
) -> None:
    """Predict decode, cycle and tokens per second from configs, and what changes would bring."""
    from eyas.report.planning import planned, taken_apart

    require_writable(json_file, html_file, config.markdown)
    console = Console(highlight=False)
    if config.starting_case:
        record = taken_apart(console, config.markdown)
    else:
        record = planned(console, model, drafter, speculation, config)
    _write(record, json_file, html_file)


@command(config=CALIBRATE)
def calibrate(config: CalibrateConfig, json_file: Json = "") -> None:
    """Measure this machine's profile, for eyas plan --profile."""
    from eyas.report.calibrate import calibrate as measure
    from eyas.report.calibrate import show
    from eyas.report.records import write_record

    require_writable(json_file)
    profile = measure(config, Console(stderr=True).is_terminal)
    show(Console(highlight=False), profile)
    if json_file:
        write_record(Path(json_file), profile.to_json())


@command(engine=ENGINE, speculation=SPECULATION, options=DRAFTER)
def info(
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    model: Model = "smollm2",
    drafter: Drafter = "auto",
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint is, whether it runs here, its memory, and which drafters fit it."""
    from eyas.report.info import Inquiry, machine
    from eyas.report.info_table import show

    inquiry = Inquiry(
        model=model,
        drafter=None if drafter == "none" else drafter,
        config=engine,
        speculation=speculation,
        options=options,
    )
    facts, answer = machine(engine), inquiry.answer()
    if engine.simulated:
        typer.secho(f"SIMULATED: {engine.simulated}", fg="red", err=True)
    if as_json:
        typer.echo(json.dumps({"machine": facts, **answer}, indent=2))
    else:
        show(Console(highlight=False), facts, answer)


def _load(
    model: str,
    drafter: str,
    engine: EngineConfig,
    speculation: SpeculationConfig | None,
    options: DrafterOptions,
    engines: int = 1,
) -> LLM:
    from eyas.engine.engine import LLM

    if engine.simulated:
        typer.secho(f"SIMULATED: {engine.simulated}", fg="red", err=True)
    return LLM(
        model,
        drafter=None if drafter == "none" else drafter,
        speculation=speculation,
        config=engine,
        drafter_options=options,
        progress=True,
        engines=engines,
    )


def _turn(pieces: Any) -> None:
    """Print an answer as it comes; Ctrl-C leaves it, an error leaves the conversation as it was."""
    try:
        for piece in pieces:
            typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        pieces.close()
    except RequestError as error:
        _report(error)
    typer.echo()


def _report(error: EyasError) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(str(error), style="red", markup=False)


def _summary(run: Answering) -> None:
    """One dim line on stderr: tokens, rate, tokens a cycle."""
    lengths = run.accept_lengths()
    parts = [f"{run.num_tokens} tokens", f"{run.end_to_end_rate():.1f} tok/s"]
    if lengths:
        parts.append(f"{sum(lengths) / len(lengths):.2f} tokens a cycle")
    Console(stderr=True, highlight=False).print(", ".join(parts), style="dim")


def _write(record: dict[str, Any], json_file: str, html_file: str) -> None:
    """Write a record where it is wanted; "" is no file."""
    from eyas.report.html import page
    from eyas.report.records import write_record

    if json_file:
        write_record(Path(json_file), record)
    if html_file:
        Path(html_file).write_text(page(record), encoding="utf-8")
