"""The answer of `eyas info` as tables on a terminal; reads the plain values alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.engine.admission import in_gib
from eyas.report.describe import Facts, count

BAR = 24
"""Columns of the largest part's bar."""


def show(console: Console, machine: Facts, answer: Facts) -> None:
    """Print the machine, then what a model is and whether it runs there."""
    console.print(Group(*_parts(machine, answer)))


def _parts(machine: Facts, answer: Facts) -> Iterator[RenderableType]:
    yield _facts("machine", _machine(machine))
    yield _facts(f"{answer['kind']} {answer['name']}", _checkpoint(answer))
    if answer.get("memory"):
        yield _memory(answer["memory"])
    if answer.get("ranks"):
        yield _facts("ranks", answer["ranks"])
    for drafter in answer.get("drafters", ()):
        yield _facts(f"drafter, {drafter['source']}", _drafter(drafter))
    if "drafting" in answer:
        yield _facts("what may draft for it", _drafting(answer["drafting"]))
    if "fits" in answer:
        yield _facts("targets that it fits", answer["fits"])
    yield from _verdict(answer)


def _verdict(answer: Facts) -> Iterator[Text]:
    if answer["runs"]:
        use = "drafts" if answer["kind"] == "drafter" else "runs"
        yield Text(f"{use} here", style="bold green")
        return
    yield Text("does not run here:", style="bold red")
    for refusal in answer["refusals"]:
        yield Text(f"  {refusal}", style="red")


def _facts(title: str, facts: Facts) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(_words(value)))
    return table


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return "none" if value is None else str(value)


def _machine(machine: Facts) -> Facts:
    code, cpu = machine["code"], machine["cpu"]
    commit = (code["commit"] or "unknown")[:12] + (" with changes" if code["dirty"] else "")
    memory = "" if cpu["memory"] is None else f", {in_gib(cpu['memory'])}"
    gpus = [f"{gpu['name']} of {in_gib(gpu['memory'])}" for gpu in machine["gpus"]]
    versions = [f"{name} {version}" for name, version in machine["versions"].items() if version]
    return {
        "code": f"commit {commit}",
        "versions": versions,
        "system": machine["os"],
        "cpu": f"{cpu['model']}, {cpu['cores']} cores{memory}; {' '.join(cpu['flags'])}",
        "gpus": gpus + ([f"driver {machine['driver']}"] if gpus else []),
        "takes": f"{machine['device']} in {machine['dtype']}, {machine['threads']} threads",
    }


def _checkpoint(answer: Facts) -> Facts:
    facts = {"folder": answer["folder"], **answer["checkpoint"]}
    facts["files"] = f"{facts.pop('files', 'unknown')}, {in_gib(facts.pop('bytes on disk', 0))}"
    tensors, types = facts.pop("tensors", 0), facts.pop("stored types", {})
    stored = [f"{kind} {in_gib(size)}" for kind, size in types.items()]
    facts["tensors"] = f"{tensors}: {', '.join(stored)}" if tensors else "none"
    total = facts.pop("parameters", None)
    if total is not None:
        active = facts.pop("active parameters", total)
        facts["parameters"] = count(total) + f", {count(active)} a token" * (active != total)
    first = ("folder", "architecture", "family", "format", "parameters", "files", "tensors")
    return {name: facts[name] for name in first if name in facts} | facts


def _memory(memory: Facts) -> Table:
    ranks = f" on each of {memory['tp']} ranks" if memory["tp"] > 1 else ""
    title = f"memory on {memory['device']} in {memory['dtype']}{ranks}"
    table = Table(title=title, title_justify="left", caption=_pages(memory), caption_justify="left")
    table.add_column("part")
    table.add_column("", justify="right")
    table.add_column("")
    table.add_column("", style="dim")
    most = max(part["bytes"] for part in memory["parts"])
    for part in memory["parts"]:
        bar = "█" * round(BAR * part["bytes"] / most)
        table.add_row(part["name"], in_gib(part["bytes"]), Text(bar, style="cyan"), part["remark"])
    table.add_section()
    room = memory["available"]
    fits = room is None or memory["total"] <= room
    style = "bold" if fits else "bold red"
    table.add_row("together", in_gib(memory["total"]), "", "", style=style)
    table.add_row("free for it", "unknown" if room is None else in_gib(room), "", "")
    return table


def _pages(memory: Facts) -> str:
    """What the pages hold, and whether they are fewer than every request may need."""
    pages, most = memory["num_pages"], memory["pages_for_every_request"]
    held, requests = (pages - 1) * memory["page_size"], memory["max_running_requests"]
    lines = [f"{pages} pages hold {held} positions of {memory['bytes_per_position']} bytes"]
    whole = f"{requests} requests of {memory['context_length']} tokens"
    if pages >= most:
        lines.append(f"enough for {whole}")
    else:
        lines.append(f"{most} would be enough for {whole}; the youngest may have to wait")
    if memory["device"] == "cpu":
        touched = memory["touched"]
        lines.append(
            "a pool on a CPU takes memory where it is written: with one request of "
            f"{touched['tokens']} tokens {in_gib(touched['bytes'])} together"
        )
    return "\n".join(lines)


def _drafter(drafter: Facts) -> Facts:
    facts = {name: value for name, value in drafter.items() if name not in ("source", "fits")}
    if not drafter["fits"]:
        return {"folder": facts["folder"], "does not fit": facts["reason"]}
    facts["parameters"] = count(facts["parameters"])
    return {"fits": "yes", **facts}


def _drafting(drafting: Facts) -> Facts:
    return {
        name: value["needs"] + ("; in " + ", ".join(value["formats"]) if "formats" in value else "")
        for name, value in drafting.items()
    }
