"""The README tells the truth: its commands exist, its example runs, its paths are there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from eyas.cli import app
from tests.chat_model import write_chat_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str) -> None:
    tool, *rest = shlex.split(line)
    if tool == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in rest:
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
        return
    assert tool == "eyas", line
    group: Any = typer.main.get_command(app)
    command = group.commands[rest[0]]
    with command.make_context(rest[0], rest[1:]):
        pass


def test_there_are_commands_and_an_example() -> None:
    assert len(COMMANDS) >= 6
    assert len(blocks("python")) == 1


def test_the_example_runs(tmp_path: Path, save_llama: Callable[..., Any]) -> None:
    model = write_chat_model(tmp_path / "model", save_llama)
    source = blocks("python")[0]
    assert 'LLM("smollm2")' in source
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(source.replace('"smollm2"', repr(str(model))), names)
    text = names["answer"].text
    assert text
    assert printed.getvalue() == f"{text} {names['answer'].accept_lengths}\n{text}"


def test_paths_and_links_exist() -> None:
    for path in re.findall(r"`(src/[^`]*)`", README):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_rooms_of_the_architecture_are_those_of_the_source() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [r for r in text.splitlines() if re.match(r"\| \d \|", r)]
    named = {n for row in rows for n in re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[2])}
    rooms = {n.split("/")[0] for n in named}
    found = {
        p.name
        for p in (ROOT / "src" / "eyas").iterdir()
        if (p.suffix == ".py" or (p / "__init__.py").is_file()) and p.name != "__init__.py"
    }
    assert rooms == found
