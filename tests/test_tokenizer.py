"""Ids equal transformers', streamed text equals decoded text, bad conversations are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from eyas.errors import CheckpointError, RequestError
from eyas.tokenizer import Tokenizer

TEXTS = (
    "Hello 12345 world",
    "  def f(x):\n\treturn x**2  # 3.14\n\n",
    "x =  1\n    2",
    "naïve 日本語 😀 ümlaut",
    "👩‍👩‍👧 a\u0301 \u2003x",
    "² ½ ٣ and ½ a",
    "don't I'll 1st 2024-01-02",
    "<|im_start|>user\nhi<|im_end|>\n",
    "trail  ",
    " lead",
    "",
)
CHAT = [
    {"role": "user", "content": "Say hi"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "Again {{ 1 + 1 }}"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_folder)


def write_words(folder: Path, settings: dict[str, Any] | None = None) -> None:
    """A word-level tokenizer of four tokens."""
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?")
    backend = tokenizers.Tokenizer(words)
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers_and_decode_back(
    tokenizer: Tokenizer, reference: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.decode(ids) == plain


def test_digits_and_spaces_split_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    """Ids by the original splitter, every digit apart: spaces before a digit stay together."""
    spaces, one = tokenizer.encode("  1")
    assert tokenizer.decode([spaces]) == "  "
    assert tokenizer.decode([one]) == "1"


def test_gguf_ids_equal_where_no_digit_is_concerned(
    tokenizer: Tokenizer, smollm2_gguf: Path
) -> None:
    raw = transformers.AutoTokenizer.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name
    )
    assert tokenizer.vocab_size == len(raw)
    for text in TEXTS:
        if not any(c.isnumeric() for c in text):
            assert tokenizer.encode(text) == raw.encode(text)


def test_chat_equals_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for messages in (CHAT, [{"role": "system", "content": "Be brief."}, *CHAT]):
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.chat_text(messages) == text
        assert tokenizer.chat(messages) == reference.encode(text, add_special_tokens=False)
    assert tokenizer.chat_text(CHAT).startswith("<|im_start|>system\nYou are a helpful AI")
    assert tokenizer.eos_ids == (2,)


def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        many = rng.randrange(1, 30)
        # ids below 300 are mostly single bytes: broken and half UTF-8
        ids = [rng.randrange(rng.choice((300, tokenizer.vocab_size))) for _ in range(many)]
        stream = tokenizer.detokenizer()
        pieces = [stream.step(i) for i in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids), ids
        assert stream.flush() == ""


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    text = "日本語 😀👩‍👩‍👧 ok"
    stream = tokenizer.detokenizer()
    pieces = [stream.step(i) for i in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    ids = [*tokenizer.encode("yes"), 2, 1]
    assert "".join(stream.step(i) for i in ids) == tokenizer.decode(ids) == "yes"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "list of messages with role and content"),
        ([{"content": "hi"}], "list of messages with role and content"),
        (["hi"], "list of messages with role and content"),
        ([{"role": "user", "content": None}], "only text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "only text"),
    ],
)
def test_bad_conversations_are_refused(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        tokenizer.chat(messages)


def test_template_may_refuse_but_not_reach_out(tmp_path: Path) -> None:
    write_words(tmp_path)
    template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer.from_folder(tmp_path).chat_text(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.from_folder(tmp_path).chat_text(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="does not compile"):
        Tokenizer.from_folder(tmp_path)


def test_template_language_of_transformers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ eos_token }}\n{% endfor %}"
    )
    settings = {"eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": template}
    write_words(tmp_path, settings)
    ours = Tokenizer.from_folder(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "<é>"}]
    assert ours.chat_text(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.eos_ids == (2,)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    write_words(tmp_path, {"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_text(messages) == "y"


def test_eos_ids_of_every_source(tmp_path: Path) -> None:
    write_words(tmp_path, {"eos_token": "</s>"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (1, 2, 0)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    write_words(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).chat(CHAT)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        Tokenizer.from_folder(tmp_path)
