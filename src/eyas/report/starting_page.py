"""The starting case as a page of Markdown; reads the record of `starting_case` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eyas.report.starting_case import errors

COMMAND = "eyas plan --starting-case --markdown docs/starting-case.md"


def page(record: dict[str, Any]) -> str:
    """The page's text, with a newline at its end."""
    parts = [
        "# The starting case",
        f"Written by `{COMMAND}`; a test computes every number again.",
        *_case(record),
        *_needed(record),
        *_figures(record),
        *_options(record),
        *_constants(record),
    ]
    return "\n\n".join(parts) + "\n"


def _case(record: dict[str, Any]) -> list[str]:
    stages = [name for name in record["breakdown"][0] if name != "component"]
    rows = [
        [row["component"], *(_number(row["component"], row[stage]) for stage in stages)]
        for row in record["breakdown"]
    ]
    return [
        "Kimi-K2.5 (61 layers, 384 experts, routed experts in 4 bits), SGLang, EAGLE-3 with two "
        "drafts, 8 x RTX PRO 6000 over PCIe, tensor-parallel over all. Decode takes 12 ms in CUDA "
        "graphs. A verify of three tokens took 29 ms after one start and 19 ms after another, with "
        "the same flags. What should it take?",
        "## What the parts take",
        f"Predicted from parts alone: decode {record['decode_ms']:.1f} ms (observed 12), verify of "
        f"three tokens {record['verify_ms']:.1f} ms, a cycle {record['cycle_ms']:.1f} ms. "
        "Milliseconds:",
        _table(["", *stages], rows),
        "What SGLang's latent attention takes at so short a context is assumed: as grouped-query "
        "attention on an H200. With vLLM's Triton kernel, whose times on this GPU are public, "
        f"decode would take {record['decode_ms_with_triton']:.1f} ms.",
        f"`floor` is traffic over bandwidth or arithmetic over peak, without collectives. The idle "
        f"time of a cycle is the engine's: {record['engine']}.",
    ]


def _needed(record: dict[str, Any]) -> list[str]:
    one, three = record["all_reduce_us"].values()
    rows = [
        [
            need["what"],
            f"{need['over_ms']:.1f}",
            f"{need['all_reduce_us']:.0f} ({need['times']:.1f} x)",
            f"{need['stall_ms']:.1f}",
            f"{need['tok_per_s']:.0f} ({need['observed_tok_per_s']:.0f})",
            f"{need['accept_length_needed']:.2f}",
        ]
        for need in record["needed"]
    ]
    head = ["observed", "over the prediction, ms", "as all-reduces, us each", "as one stall, ms"]
    head += ["tok/s that follow (observed)", "tokens a cycle for the observed rate"]
    boxes = [
        [
            box["machine"],
            f"{box['decode_ms']:.1f}",
            f"{box['all_reduce_us']:.0f}",
            f"{box['verify_ms']:.1f}",
            f"{box['tok_per_s']:.0f}",
        ]
        for box in record["profiles"]
    ]
    short, long = record["contexts"]
    return [
        "## What the observations need",
        f"A pass has {record['all_reduces']} all-reduces of 14 KB a token. NCCL's table says "
        f"{one:.0f} us for one token and {three:.0f} us for three, and decode's 12 ms leave at "
        f"most {record['most_all_reduce_us']:.0f} us for each. The rest of an observed verify is "
        "either all-reduces that cost so much at 43 KB, or time in which ranks wait, which shows "
        "up inside the all-reduce kernel too. At two tokens a cycle:",
        _table(head, rows),
        f"So a verify of 29 ms needs all-reduces {record['needed'][0]['times']:.0f} times as slow "
        f"at 43 KB as the table says, while they are as the table says at 14 KB, or a stall of "
        f"{record['needed'][0]['stall_ms']:.0f} ms a cycle. Only measuring transfer and waiting "
        "apart can tell which. What known tables of all-reduces lead to:",
        _table(["machine", "decode, ms", "all-reduce at 43 KB, us", "verify, ms", "tok/s"], boxes),
        "The table with a cliff would already slow decode down at 14 KB: if a cliff is to blame, "
        "it lies between 14 and 43 KB.",
        f"Reading keys does not explain that the rate fell as the context grew: from "
        f"{short['context']} to {long['context']} tokens a cycle grows from "
        f"{short['cycle_ms']:.2f} to {long['cycle_ms']:.2f} ms.",
    ]


def _figures(record: dict[str, Any]) -> list[str]:
    parts = [
        "## Predictions beside measured figures",
        "Figures are others' measurements of such boxes, and ours of engines on one H200. The "
        "profile's constants come from other sources than these rows, the engines' idle times "
        "from one run each on the H200 (3 drafts, batch 1), and vLLM's "
        "latent attention from a benchmark of its kernel. Rates of three drafts are at "
        "2.34 tokens a cycle, the middle of the published 2.0 .. 2.68. Errors are against the "
        "middle of a range.",
    ]
    for title, (median, worst) in errors(record).items():
        parts.append(f"### {title}")
        parts.append(f"Median error {median:.0%}, worst {worst:.0%}.")
        rows = [_figure(row) for row in record["figures"][title]]
        parts.append(_table(["figure", "published", "predicted", "error", "source"], rows))
    parts.append("### Not predicted")
    parts.append("\n".join(f"- {row['what']}: {row['why']}." for row in record["left_out"]))
    parts.append(
        "Where predictions miss: an engine whose host is slower than the device (SmolLM2) needs "
        "its host time measured; attention outside of graphs is taken for a walk without splits, "
        "which real kernels leave at long contexts; an early image of vLLM lost half of its rate "
        "at 100k tokens, which a later one got back."
    )
    return parts


def _figure(row: dict[str, Any]) -> list[str]:
    digits = 1 if row["unit"] == "tok/s" else 2
    low, high = (f"{row[key]:.{digits}f}" for key in ("low", "high"))
    span = low if low == high else f"{low} .. {high}"
    predicted = f"{row['predicted']:.{digits}f}"
    return [row["what"], f"{span} {row['unit']}", predicted, f"{row['error']:+.0%}", row["source"]]


def _options(record: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["option"],
            f"{row['decode_ms']:.1f}",
            f"{row['cycle_ms']:.1f}",
            f"{row['accept_length']:.2f}",
            f"{row['tok_per_s']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['break_even']:.2f}",
            f"{row['gain'] - 1:+.0%}",
            row["costs"],
        ]
        for row in record["rows"]
    ]
    head = ["option", "decode, ms", "cycle, ms", "tokens", "tok/s", "speed-up", "even at", "gain"]
    return [
        "## What would change it",
        "Gain is in tokens per second over the case as predicted; rows sorted by it.",
        _table([*head, "what it costs to do"], rows),
    ]


def _constants(record: dict[str, Any]) -> list[str]:
    rows = [[row["name"], row["value"], row["source"]] for row in record["constants"]]
    return ["## Constants", _table(["constant", "value", "source"], rows)]


def _number(name: str, value: float) -> str:
    return f"{value:.0f}" if name == "launches" else f"{value:.2f}"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
