"""The built-in prompts, and prompt files.

The built-in prompts were written for this project. They differ in kind on purpose: how much a
drafter gains depends on the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas.errors import RequestError

PROMPTS: tuple[tuple[str, str], ...] = (
    ("explain", "Explain to a curious child why the sky is blue by day and red at sunset."),
    (
        "maths",
        "A baker fills 7 trays with 12 rolls each and sells 59 of them. How many rolls are left? "
        "Show each step.",
    ),
    (
        "code",
        "Write a Python function that returns the n-th Fibonacci number without recursion, with a "
        "docstring and one example.",
    ),
    (
        "summary",
        "Summarise in two sentences: The lighthouse on the northern cape was built of local "
        "granite in 1871. For ninety years a keeper and his family lived there and lit the lamp "
        "every evening. In 1961 the light became automatic, and the keeper's house stood empty "
        "until the village turned it into a small museum of seafaring.",
    ),
    (
        "story",
        "Tell a short story about an old clockmaker who repairs a clock that runs backwards.",
    ),
    ("translate", "Translate into French: The train leaves at eight, and we must not be late."),
    ("list", "Give me five tips for growing tomatoes on a balcony, as a numbered list."),
    ("chat", "I feel tired after work and never find time for sport. What could I do about it?"),
    (
        "extract",
        "List the names and ages as JSON: Mara is 31 and lives in Oslo. Her brother Tom, 27, and "
        "their cousin Ines, who turned 40 last week, live in Porto.",
    ),
    ("compare", "What are the main differences between a virus and a bacterium?"),
    ("letter", "Write a polite e-mail that asks a landlord to repair a dripping kitchen tap."),
    ("reason", "If all gloms are fribs and no frib is a wug, can a glom be a wug? Explain."),
)
"""(kind, prompt) of twelve prompts."""


def load_prompts(path: str) -> list[str]:
    """The prompts of a JSON Lines file of `{"prompt": text}` or `{"turns": [text, ...]}`.

    Of several turns the first is taken; further keys and empty lines are passed over. Raises
    `RequestError` naming file and line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise RequestError(
            f"prompt file {path}", f"cannot be read ({reason})", "give a readable JSON Lines file"
        ) from e
    prompts = [
        _prompt(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"prompt file {path}", "holds no prompt", "give at least one row")
    return prompts


def _prompt(line: str, place: str) -> str:
    remedy = 'write {"prompt": "..."} or {"turns": ["..."]} on each line'
    try:
        row: Any = json.loads(line)
    except ValueError as e:
        raise RequestError(place, f"is not JSON ({e})", remedy) from e
    if not isinstance(row, dict) or not ("prompt" in row or "turns" in row):
        raise RequestError(place, "must be an object with prompt or turns", remedy)
    text = row.get("prompt")
    if "prompt" not in row:
        turns = row["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text.strip():
        raise RequestError(place, "the prompt must be a text that is not empty", remedy)
    return text
