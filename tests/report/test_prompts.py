"""Prompt files are read, or refused with the line at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import RequestError
from eyas.report.prompts import PROMPTS, load_prompts


def test_both_kinds_of_row(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a\u2028b", "id": 7}\n\n{"turns": ["first", "second"]}\n', encoding="utf-8"
    )
    assert load_prompts(str(file)) == ["a\u2028b", "first"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object"),
        ('{"question": "a"}', "must be an object with prompt or turns"),
        ('{"prompt": ""}', "must be a text that is not empty"),
        ('{"prompt": 3}', "must be a text that is not empty"),
        ('{"turns": []}', "must be a text that is not empty"),
        ('{"turns": "a"}', "must be a text that is not empty"),
    ],
)
def test_a_bad_row_is_refused_by_number(tmp_path: Path, line: str, rule: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(RequestError, match=rule) as error:
        load_prompts(str(file))
    assert "p.jsonl, line 2" in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(RequestError, match="cannot be read"):
        load_prompts(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(RequestError, match="not UTF-8"):
        load_prompts(str(tmp_path / "latin.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no prompt"):
        load_prompts(str(tmp_path / "empty.jsonl"))


def test_built_in_prompts_differ() -> None:
    assert len(dict(PROMPTS)) == len({text for _, text in PROMPTS}) == len(PROMPTS) >= 8
