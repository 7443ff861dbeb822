"""Events of a Chrome trace file, one at a time, in memory that does not grow with the file.

The format is that of Google's "Trace Event Format" as Kineto (pytorch/kineto, output_json.cpp)
writes it: an object whose `traceEvents` is an array of objects, or that array alone. A file may be
gzip-compressed; that is told by its first bytes. What is wrong with a file does not end the
reading: an event that cannot be read is skipped and counted, and a file that ends early ends the
events, with the reason in `ended`. Knows nothing of what events mean.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eyas.errors import RecordError

CHUNK = 1 << 18
"""Bytes read, or decompressed, at once."""
MOST_VALUE = 1 << 22
"""Characters that one event may have; beyond it the rest is searched for the next event."""
MOST_HEADER = 1 << 22
"""Characters that one value beside `traceEvents` may have."""
GZIP = b"\x1f\x8b"

_SPACE = re.compile(r"[\s,]*")
_EVENT = re.compile(r'\{\s*"(?:ph|cat|name|ts|pid|tid|dur)"\s*:')
REMEDY = "give a torch-profiler trace (.json or .json.gz)"


class TraceEvents:
    """Iterates once over the events of `path`; `header`, `num_broken` and `ended` are full then.

    Raises `RecordError` for what is no trace at all: no file, no JSON, no `traceEvents`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        """Values that stand beside `traceEvents`."""
        self.num_broken = 0
        """Events skipped because they are no JSON."""
        self.ended: str | None = None
        """Why the file ended before its events did; None if it did not."""
        self._text, self._at, self._done = "", 0, False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                self._chunks = _texts(file, self)
                yield from self._events()
        except OSError as error:
            raise RecordError(str(self.path), error.strerror or str(error), REMEDY) from error

    def _events(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        if first == "[":
            self._at += 1
            yield from self._array()
            return
        if first != "{":
            rule = "is empty" if not first else "is no JSON"
            raise RecordError(str(self.path), rule, REMEDY)
        self._at += 1
        found = False
        while self._peek() not in ("}", ""):
            key = self._header_value()
            if self._peek() != ":":
                break
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                found, self._at = True, self._at + 1
                yield from self._array()
            else:
                self.header[str(key)] = self._header_value()
        if not found:
            raise RecordError(str(self.path), "is JSON without traceEvents", REMEDY)

    def _array(self) -> Iterator[dict[str, Any]]:
        """Events up to the closing bracket."""
        while True:
            first = self._peek()
            if first == "]":
                self._at += 1
                return
            if first == "":
                self.ended = self.ended or "the file ends inside traceEvents"
                return
            try:
                event = self._value(MOST_VALUE)
            except ValueError:
                if not self._to_next_event():
                    return
                continue
            if isinstance(event, dict):
                yield event
            else:
                self.num_broken += 1

    def _header_value(self) -> Any:
        try:
            return self._value(MOST_HEADER)
        except ValueError:
            self.ended = self.ended or "the file ends outside traceEvents"
            self._text, self._at, self._done = "", 0, True
            return None

    def _value(self, most: int) -> Any:
        """The JSON value here; raises `ValueError` if there is none within `most` characters."""
        self._peek()
        while True:
            # a number or a word may go on in the next chunk
            if len(self._text) - self._at < 64 and self._fill():
                continue
            try:
                value, self._at = self._decode(self._text, self._at)
                return value
            except (ValueError, RecursionError):
                if len(self._text) - self._at > most or not self._fill():
                    raise ValueError("no JSON value") from None

    def _to_next_event(self) -> bool:
        """Skip to what looks like the start of another event; False at the end of the file."""
        self._at += 1
        while True:
            match = _EVENT.search(self._text, self._at)
            if match:
                self.num_broken += 1
                self._at = match.start()
                return True
            self._at = max(self._at, len(self._text) - 64)
            if not self._fill():
                self.ended = self.ended or "the file ends inside an event"
                return False

    def _peek(self) -> str:
        """The next character that is neither space nor comma; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Read on, forgetting what was consumed; False if there is no more."""
        if self._done:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            self._done = True
            return False
        self._text, self._at = self._text[self._at :] + chunk, 0
        return True


def _texts(file: BinaryIO, events: TraceEvents) -> Iterator[str]:
    """The file as text, decompressed if it is compressed; bytes that are no UTF-8 are replaced."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    head = file.read(2)
    file.seek(0)
    for chunk in _inflated(file, events) if head == GZIP else iter(lambda: file.read(CHUNK), b""):
        yield decoder.decode(chunk)


def _inflated(file: BinaryIO, events: TraceEvents) -> Iterator[bytes]:
    """What a gzip file holds, as far as it can be read, `CHUNK` bytes at a time."""
    unpacker = zlib.decompressobj(wbits=31)
    packed = file.read(CHUNK)
    while packed:
        try:
            plain = unpacker.decompress(packed, CHUNK)
        except zlib.error as error:
            events.ended = f"the compressed data is damaged ({error})"
            return
        if plain:
            yield plain
        packed = unpacker.unconsumed_tail
        if unpacker.eof:  # another member may follow
            packed = unpacker.unused_data or file.read(CHUNK)
            unpacker = zlib.decompressobj(wbits=31)
            if not packed.strip(b"\0"):
                return
        elif not packed:
            packed = file.read(CHUNK)
            if not packed:
                tail = unpacker.flush()
                if tail:
                    yield tail
                events.ended = "the compressed data ends early"
