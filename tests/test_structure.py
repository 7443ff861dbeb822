"""The plan of the house: imports go down the floors only, and rooms stay small.

Ranks are those of docs/architecture.md, section "Rooms and floors".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "eyas"
TESTS = ROOT / "tests"

RANKS = {
    "config": 0,
    "model_config": 0,
    "batch": 0,
    "errors": 0,
    "spans": 0,
    "hardware": 1,
    "operations": 1,
    "setting": 1,
    "estimate": 1,
    "cost": 1,
    "fingerprint": 1,
    "gpu_state": 1,
    "checkpoint": 1,
    "gguf_folder": 1,
    "quantised": 1,
    "tokenizer": 1,
    "sampling": 1,
    "distributed": 1,
    "kernels": 1,
    "kv": 1,
    "attention": 2,
    "layers": 3,
    "models": 4,
    "speculate": 5,
    "engine": 6,
    "server": 7,
    "report": 7,
    "train": 7,
    "chat": 8,
    "flags": 8,
    "cli": 8,
    "__main__": 8,
    "__init__": 8,
}
"""Room (a file or folder of `eyas`) -> floor."""

GROUND = {
    "config": {"errors"},
    "model_config": {"config"},
    "kernels": {"sampling", "kv"},
    "checkpoint": {"gguf_folder"},
    "distributed": {"fingerprint"},
    "cost": {"kernels", "operations", "setting"},
    "estimate": {"cost", "hardware", "kernels", "operations", "setting"},
}
"""Rooms that may also use named ones of their own floor."""

LAZY = {"attention/__init__.py", "models/registry.py", "cli.py"}
"""The factories and the CLI: the only files with imports inside functions."""

SETTINGS = "distributed/settings.py"
"""The one file that reads environment variables, those of libraries, and hands them to ranks."""

NO_SYNC = ("engine/cycle.py", "speculate/", "attention/")
"""Where a host read of a device value would stall the cycle."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, MAX_COLUMNS = 450, 45, 120, 100

FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_rooms(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of `eyas` anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            modules = [node.module or ""]
            if node.module == "eyas":
                modules = [f"eyas.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] == "eyas":
                yield node.lineno, parts[1] if len(parts) > 1 else "__init__"


@each_file
def test_imports_go_down_only(path: Path) -> None:
    room = room_of(path)
    assert room in RANKS, f"{name_of(path)}: the architecture has no room {room!r}"
    for line, other in imported_rooms(tree_of(path)):
        # `from eyas import __version__`: a name of the package itself
        other = other if other in RANKS else "__init__"
        named = GROUND.get(room, set())
        fine = other == room or other in named or RANKS[other] < RANKS[room]
        fine = fine or (room in ("cli", "__main__") and RANKS[other] == RANKS[room])
        assert fine, (
            f"{name_of(path)}:{line}: {room} (floor {RANKS[room]}) imports "
            f"{other} (floor {RANKS[other]})"
        )


@each_file
def test_imports_stand_at_the_top(path: Path) -> None:
    if name_of(path) in LAZY:
        return
    for function in ast.walk(tree_of(path)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                assert not isinstance(node, (ast.Import, ast.ImportFrom)), (
                    f"{name_of(path)}:{node.lineno}: import inside {function.name}"
                )


@pytest.mark.parametrize("path", [*FILES, *sorted(TESTS.rglob("*.py"))], ids=lambda p: p.name)
def test_files_and_lines_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_FILE_LINES, f"{path}: {len(lines)} lines"
    for number, line in enumerate(lines, 1):
        assert len(line) <= MAX_COLUMNS, f"{path}:{number}: {len(line)} columns"


@each_file
def test_functions_are_short_and_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{name_of(path)}: module without docstring"
    longest = MAX_KERNEL_LINES if name_of(path).startswith("kernels/") else MAX_FUNCTION_LINES
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        docstring = ast.get_docstring(node)
        # the contract is not what makes a function long
        lines -= len(docstring.splitlines()) if docstring else 0
        assert lines <= longest, f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines"
    public = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name[0] != "_"]
    for node in [*tree.body, *(member for c in public for member in c.body)]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), (
                f"{name_of(path)}:{node.lineno}: {node.name} undocumented"
            )


@each_file
def test_no_print_and_no_environment(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{name_of(path)}:{node.lineno}: print"
        if isinstance(node, ast.Attribute):
            banned = node.attr in ("environ", "getenv", "putenv") and name_of(path) != SETTINGS
            assert not banned, f"{name_of(path)}:{node.lineno}: {node.attr}"


@each_file
def test_no_host_read_in_the_cycle(path: Path) -> None:
    if not name_of(path).startswith(NO_SYNC):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr != "item", f"{name_of(path)}:{node.lineno}: .item()"


@each_file
def test_no_loose_ends(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for word in ("TODO", "FIXME", "XXX"):
            assert word not in line, f"{name_of(path)}:{number}: {word}"


def test_tests_mirror_the_source() -> None:
    """A test file in a room's folder stands for a file of that room, or for a topic of it.

    `gpu` holds what runs on such a machine only, whatever room it is about.
    """
    for path in TESTS.rglob("test_*.py"):
        folder = path.relative_to(TESTS).parent
        known = folder.name == "gpu" or (SOURCE / folder).is_dir()
        assert known, f"{path}: no room {folder}"
