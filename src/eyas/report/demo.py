"""The demo: plain decoding and speculation side by side, then the proof, then the bench.

Both sides generate in earnest. They take turns on the machine, always the one whose own clock is
behind, so that the columns grow as they would on two equal machines. A shade is one pass of the
target: plain decoding changes shade at every token, speculation at every accepted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eyas.config import SamplingParams, SpeculationConfig, require
from eyas.engine.engine import LLM, Engine
from eyas.report.answering import Answering
from eyas.report.bench import bench, encode
from eyas.report.options import BenchConfig
from eyas.report.prompts import PROMPTS
from eyas.report.table import show

SHOWN = ("explain", "maths", "code", "list")
SHOWN_TOKENS = 96
CHECKED, CHECKED_TOKENS = 4, 48
BENCHED, BENCHED_TOKENS = 4, 96
SHADES = ("black on bright_cyan", "black on bright_green", "black on bright_yellow")
FRAME_SECONDS = 0.12


class Column:
    """One side's answer as it grows: its text cut into what each step showed."""

    def __init__(self, title: str, engine: Engine, prompt: Sequence[int], tokens: int) -> None:
        self.title = title
        params = SamplingParams(max_tokens=tokens)
        self.answering = Answering(engine, [prompt], [params], stream=True)
        self.pieces: list[str] = []

    def step(self) -> None:
        """One engine step; its text, if any, becomes one piece."""
        self.answering.step()
        piece = self.answering.new_text()
        if piece:
            self.pieces.append(piece)

    def render(self) -> Panel:
        """The text so far, one shade a step, under the side's own clock."""
        text = Text()
        for i, piece in enumerate(self.pieces):
            text.append(piece, style=SHADES[i % len(SHADES)])
        return Panel(text, title=self.title, subtitle=self.summary(), title_align="left")

    def summary(self) -> str:
        """Clock, rate and tokens a pass."""
        run = self.answering
        cycles = len(run.requests[0].accept_lengths)
        each = (run.num_tokens - 1) / cycles if cycles else 0.0
        rate = run.decode_rate() or 0.0
        return f"{run.seconds:.1f} s, {rate:.0f} tok/s, {each:.1f} a pass"


def demo(llm: LLM, console: Console) -> bool:
    """Run the demo; returns whether every text was equal.

    Raises `ConfigError` if `llm` has no drafter.
    """
    require(
        llm.engine.speculation.algorithm == "EAGLE3",
        "demo without a drafter",
        "it shows EAGLE-3, and no drafter was found for this target",
        "give --drafter PATH, train one with `eyas train`, or use --model smollm2",
    )
    plain = llm.sibling(SpeculationConfig(algorithm="NONE")).engine
    texts = dict(PROMPTS)
    prompts = encode(llm, [texts[kind] for kind in SHOWN], chat_template=True)
    console.rule("1. The same answer twice: plain decoding and EAGLE-3")
    console.print(
        "Both are generated now, in turns; each clock counts its own work. "
        "A shade is one pass of the model.",
        style="dim",
    )
    equal = [
        side_by_side(plain, llm.engine, texts[kind], prompt, console)
        for kind, prompt in zip(SHOWN, prompts, strict=True)
    ]
    console.rule("2. The same text, token by token")
    equal.append(check_equality(llm, plain, console))
    console.rule("3. What it costs and gains")
    config, params = BenchConfig(rounds=1), SamplingParams(max_tokens=BENCHED_TOKENS)
    benched = [text for _, text in PROMPTS[:BENCHED]]
    record = bench(llm, benched, config, params, progress=console.is_terminal)
    show(console, record)
    return all(equal) and bool(record["tokens_equal"])


def side_by_side(
    plain: Engine, spec: Engine, question: str, prompt: Sequence[int], console: Console
) -> bool:
    """Answer `prompt` on both sides at once; returns whether the texts are equal."""
    left = Column("plain decoding", plain, prompt, SHOWN_TOKENS)
    right = Column("EAGLE-3", spec, prompt, SHOWN_TOKENS)
    console.print(Text(f"\n> {question}", style="bold"))
    if console.is_terminal:
        with Live(_frame(left, right), console=console, auto_refresh=False) as live:
            drawn = perf_counter()
            while _advance(left, right):
                if perf_counter() - drawn > FRAME_SECONDS:
                    live.update(_frame(left, right), refresh=True)
                    drawn = perf_counter()
            live.update(_frame(left, right), refresh=True)
    else:
        while _advance(left, right):
            pass
        for column in (left, right):
            console.print(f"{column.title}: {column.summary()}", markup=False)
        console.print("¦".join(right.pieces), markup=False, highlight=False)
    return left.answering.requests[0].output == right.answering.requests[0].output


def check_equality(llm: LLM, plain: Engine, console: Console) -> bool:
    """Compare both sides on several prompts, greedy and sampled; says so on `console`."""
    prompts = encode(llm, [text for _, text in PROMPTS[-CHECKED:]], chat_template=True)
    all_equal = True
    for temperature in (0.0, 0.8):
        equal = tokens = 0
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=CHECKED_TOKENS)
            runs = [Answering(e, [prompt], [params]).run() for e in (plain, llm.engine)]
            outputs = [run.requests[0].output for run in runs]
            equal += outputs[0] == outputs[1]
            tokens += len(outputs[0])
        kind = "greedy" if temperature == 0 else f"sampled at temperature {temperature}"
        good = equal == len(prompts)
        console.print(
            f"{kind}: {equal} of {len(prompts)} texts equal ({tokens} tokens compared)",
            style="green" if good else "bold red",
        )
        all_equal = all_equal and good
    return all_equal


def _advance(left: Column, right: Column) -> bool:
    """Step the unfinished side whose clock is behind; False when both have ended."""
    open_sides = [c for c in (left, right) if not c.answering.done]
    if not open_sides:
        return False
    min(open_sides, key=lambda c: c.answering.seconds).step()
    return True


def _frame(left: Column, right: Column) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left.render(), right.render())
    return Group(grid)
