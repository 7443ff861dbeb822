"""Text to tokens and back: the checkpoint's tokenizer, its chat template, incremental text.

Uses the tokenizers library and jinja2 directly: transformers' classes give the same ids and take
seconds to import. Knows nothing of models; ids are plain ints.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers.decoders import DecodeStream

from eyas.errors import CheckpointError, RequestError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    `eos_ids` are all ids that end a text: of generation_config.json, config.json and the
    tokenizer's own `eos_token`. `vocab_size` counts the tokenizer's ids; a model may have more.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: str | None,
        special: dict[str, str],
        eos_ids: tuple[int, ...],
    ) -> None:
        """`special` maps names such as `eos_token` to their text, for the chat template."""
        self._backend = backend
        self._special = special
        self._template = None if template is None else _compile(template)
        self.eos_ids = eos_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of `folder`.

        Raises `CheckpointError` for a missing or malformed file. A folder without a chat template
        serves plain prompts; `chat` refuses.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                str(path), "is missing", "save the tokenizer in its fast form (tokenizer.json)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises nothing narrower
            raise CheckpointError(
                str(path), f"is no tokenizer ({e})", "download the file again"
            ) from e
        backend.no_truncation()
        backend.no_padding()
        settings = _read(folder / "tokenizer_config.json")
        special = {**_read(folder / "special_tokens_map.json"), **settings}
        texts = {name: _text(special[name]) for name in _SPECIAL if special.get(name)}
        return cls(backend, _template(folder, settings), texts, _eos_ids(folder, backend, texts))

    @classmethod
    def of_ids(cls, vocab_size: int) -> Self:
        """A tokenizer whose text is the ids themselves, for models without one."""
        words = {str(i): i for i in range(vocab_size)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return cls(backend, None, {}, ())

    def vocabulary(self, added: bool = True) -> dict[str, int]:
        """Every token with its id; without `added` the tokens of the tokenizer's model alone."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=added)
        return tokens

    @property
    def has_template(self) -> bool:
        """Whether conversations have a form."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens the checkpoint puts around a text."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def chat_text(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of a conversation, generation prompt included.

        `messages` are `{"role": ..., "content": ...}`. Raises `RequestError` for messages of
        another form or that the template refuses.
        """
        if self._template is None:
            raise RequestError(
                "a conversation", "this checkpoint has no chat template", "give a plain prompt"
            )
        for message in messages or [{}]:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"message {message!r}",
                    "a conversation is a list of messages with role and content",
                    'give {"role": "user", "content": "..."}',
                )
            if not isinstance(message.get("content"), str):
                raise RequestError(
                    f"content {message.get('content')!r} of role {message['role']!r}",
                    "only text is read",
                    "give a string",
                )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError) as e:
            raise RequestError(
                "this conversation",
                f"the checkpoint's chat template refuses it ({e})",
                "use the roles and the order that the model was trained for",
            ) from e

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of `chat_text(messages)`; the template brings the special tokens itself."""
        ids: list[int] = self._backend.encode(
            self.chat_text(messages), add_special_tokens=False
        ).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; half a UTF-8 character becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """Incremental text of one answer."""
        return Detokenizer(self._backend)


class Detokenizer:
    """Text of a growing sequence, piece by piece.

    The pieces of `step`, and of one `flush` at the end, concatenate to `Tokenizer.decode` of all
    ids. A piece never ends inside a UTF-8 character; such bytes wait for the rest of it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._length = 0

    def step(self, token_id: int) -> str:
        """Text that `token_id` completes, perhaps empty."""
        self._ids.append(token_id)
        piece: str = self._stream.step(self._backend, token_id) or ""
        self._length += len(piece)
        return piece

    def flush(self) -> str:
        """What `step` still holds back when the sequence ends: an unfinished character."""
        text: str = self._backend.decode(self._ids, skip_special_tokens=True)
        rest = text[self._length :]
        self._length = len(text)
        return rest


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(str(path), f"is not JSON ({e})", "download the file again") from e
    if not isinstance(value, dict):
        raise CheckpointError(str(path), "must hold a JSON object", "download the file again")
    return value


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Source of the chat template: its own file, or the one named `default` in the settings."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return None if found is None else str(found)


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        found = _read(folder / file).get("eos_token_id")
        ids += [] if found is None else found if isinstance(found, list) else [found]
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an answer's text for trainers; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _compile(source: str) -> jinja2.Template:
    """A chat template in the environment that transformers' documentation promises.

    A checkpoint is not trusted: the environment is jinja2's sandbox without mutation.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as e:
        raise CheckpointError(
            "chat template", f"does not compile ({e})", "give a checkpoint with a valid template"
        ) from e
