"""Whether speculation writes the tokens of plain decoding: real models, long greedy texts.

    python3 benchmarks/lossless.py --json lossless.json
    python3 benchmarks/lossless.py --models smollm2 --prompts 2 --tokens 32 --batches 1 2

Every prompt is answered by plain decoding alone, then by plain decoding and by speculation at every
batch size, all with rows that depend on no others (`--deterministic on`, unless told). Tokens must
be equal one by one; where they part, the place is said. Ends with status 1 if any text differs.
Times are of one run each, prefill included: what determinism costs, not what the engine can do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eyas import LLM, EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.engine import RequestOutput
from eyas.fingerprint import fingerprint
from eyas.report.prompts import PROMPTS

ASSETS = Path(__file__).parent.parent / "assets" / "small-deepseek"
ROOM = 512
"""Positions for a prompt, beside those for its answer."""
PLAIN = "plain"
RUNS = {
    PLAIN: SpeculationConfig(algorithm="NONE"),
    "chain": SpeculationConfig.chain(4),
    "tree": SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A target, its drafter, and whose tokenizer it has."""

    target: str
    drafter: str = "auto"
    tokenizer: str = ""


MODELS = {
    "smollm2": Model(target="smollm2"),
    "small-deepseek": Model(
        target=str(ASSETS / "target"), drafter=str(ASSETS / "drafter"), tokenizer="smollm2"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One answer held against plain decoding alone."""

    model: str
    run: str
    batch: int
    prompt: int
    tokens: int
    first_difference: int | None
    """Index of the first token that differs; None: all are equal."""
    accept_length: float | None
    """Mean tokens a cycle; None: one each."""


def first_difference(ours: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where two texts part; one that ends early parts there."""
    if list(ours) == list(wanted):
        return None
    pairs = zip(count(), ours, wanted, strict=False)
    shorter = min(len(ours), len(wanted))
    return next((i for i, a, b in pairs if a != b), shorter)


def answers(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    batch: int,
    done: Callable[[int], None],
) -> tuple[list[RequestOutput], float]:
    """What `llm` writes, `batch` prompts at a time, and the seconds that it took.

    Prompts read backwards come first, as long and as many: kernels are compiled before the clock.
    """
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([prompt[::-1] for prompt in prompts[:batch]], few)
    found, start = [], perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        found += llm.generate(group, params)
        done(len(group))
    return found, perf_counter() - start


def load(model: Model, args: argparse.Namespace) -> LLM:
    """The model with its drafter, and room for the longest answer."""
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        deterministic=args.deterministic,
        context_length=ROOM + args.tokens,
        max_running_requests=max(args.batches),
        tokenizer=model.tokenizer,
    )
    return LLM(
        model.target, drafter=model.drafter, speculation=RUNS["chain"], config=config, engines=2
    )


def compare(name: str, model: Model, args: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    """Every run of one model: texts, rates, and what was found of its rows at start."""
    llm = load(model, args)
    questions = [text for _, text in PROMPTS[: args.prompts]]
    prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    batches = [(run, batch) for run in (PLAIN, *args.runs) for batch in args.batches]
    task = bar.add_task(name, total=(1 + len(batches)) * len(prompts))
    plain = llm.sibling(RUNS[PLAIN])
    wanted, seconds = answers(plain, prompts, params, 1, lambda n: bar.advance(task, n))
    texts: list[Text] = []
    rates = {f"{name} {PLAIN} alone": len(prompts) * args.tokens / seconds}
    for run, batch in batches:
        bar.update(task, description=f"{name}, {run}, batch {batch}")
        side = llm.sibling(RUNS[run])
        found, seconds = answers(side, prompts, params, batch, lambda n: bar.advance(task, n))
        rates[f"{name} {run} batch {batch}"] = len(prompts) * args.tokens / seconds
        for i, (ours, alone) in enumerate(zip(found, wanted, strict=True)):
            lengths = ours.accept_lengths if run != PLAIN else []
            text = Text(
                model=name,
                run=run,
                batch=batch,
                prompt=i,
                tokens=len(ours.token_ids),
                first_difference=first_difference(ours.token_ids, alone.token_ids),
                accept_length=sum(lengths) / len(lengths) if lengths else None,
            )
            texts.append(text)
        del side
    check = llm.engine.runner.row_check.record()
    return {"texts": texts, "tok_per_s": rates, "row_check": check}


def groups(texts: Sequence[Text]) -> Iterator[tuple[str, list[Text]]]:
    """Texts of one model, run and batch, with their name."""
    names = dict.fromkeys((t.model, t.run, t.batch) for t in texts)
    for model, run, batch in names:
        mine = [t for t in texts if (t.model, t.run, t.batch) == (model, run, batch)]
        yield f"{model} {run} batch {batch}", mine


def rows(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """How many texts of each run are equal."""
    made = []
    for name, mine in groups(texts):
        equal = sum(t.first_difference is None for t in mine)
        row = {"name": f"{name}: equal texts", "value": equal, "unit": f"of {len(mine)}"}
        made.append(row | {"goal": len(mine), "floor": None, "holds": equal == len(mine)})
    return made


def show(console: Console, texts: Sequence[Text], rates: dict[str, float]) -> None:
    """A line a run, a cell a prompt."""
    most = 1 + max(t.prompt for t in texts)
    table = Table("run", *map(str, range(1, most + 1)), "accept length", "tok/s")
    for name, mine in groups(texts):
        lengths = [t.accept_length for t in mine if t.accept_length is not None]
        mean = f"{sum(lengths) / len(lengths):.2f}" if lengths else ""
        cells = [
            "equal" if t.first_difference is None else f"[red]at {t.first_difference}[/red]"
            for t in mine
        ]
        table.add_row(name, *cells, mean, f"{rates[name]:.0f}")
    console.print(table)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    made.add_argument("--runs", nargs="+", default=["chain", "tree"], choices=["chain", "tree"])
    made.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    made.add_argument("--prompts", type=int, default=8, help="the first so many built-in ones")
    made.add_argument("--tokens", type=int, default=1000, help="of an answer")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="auto")
    made.add_argument("--deterministic", default="on", choices=["auto", "on", "off"])
    made.add_argument("--json", nargs="?", const="-", default="", help="file; alone: to stdout")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Compare the models asked for; 0 if all texts are equal."""
    args = parser().parse_args(arguments)
    console = Console(stderr=args.json == "-", width=140)
    texts: list[Text] = []
    record: dict[str, Any] = {"tok_per_s": {}, "row_checks": {}}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for name in args.models:
            found = compare(name, MODELS[name], args, bar)
            texts += found["texts"]
            record["tok_per_s"] |= found["tok_per_s"]
            record["row_checks"][name] = found["row_check"]
    show(console, texts, record["tok_per_s"])
    record |= {"rows": rows(texts), "texts": [asdict(t) for t in texts]}
    record |= {"flags": vars(args), "provenance": fingerprint()}
    if args.json == "-":
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    elif args.json:
        Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int(any(t.first_difference is not None for t in texts))


if __name__ == "__main__":
    sys.exit(main())
