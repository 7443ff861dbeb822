"""The wires between rank 0 and the other ranks: one socket each, messages both ways.

Orders go from rank 0 to the others, answers and failures come back. No collective is involved, so
an idle engine never times out, and an end of the line is noticed at once on both sides: rank 0
learns of a dead rank from `Hub`'s watching thread, a rank whose rank 0 has gone ends itself. What
the messages say is not known here. Messages are pickled: a rank shows the key that rank 0 made
before a byte of it is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from eyas.distributed.rank_group import Seat
from eyas.errors import EyasError

KEY_BYTES = 32
GREETING_SECONDS = 10.0
"""How long a caller may take to show the key."""
KEEP_ALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 20_000,
}
"""Socket options by which a machine that vanished is noticed within 20 s."""
ORDERLY_END_SECONDS = 5.0
"""How long a rank may still work after rank 0 has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank can't do what it was told, in the words of an `EyasError`."""

    value: str
    rule: str
    remedy: str
    details: str
    """The rank's stack trace."""
    fatal: bool = True
    """False where the rank only refused, and goes on."""

    @classmethod
    def of(cls, error: BaseException, fatal: bool = True) -> Self:
        """`error` as it can be sent."""
        details = "".join(traceback.format_exception(error))
        if isinstance(error, EyasError):
            value, rule, remedy = error.value, error.rule, error.remedy
        else:
            value, rule = type(error).__name__, str(error).strip() or "failed"
            remedy = "see the rank's stack trace with --debug"
        return cls(value=value, rule=rule, remedy=remedy, details=details, fatal=fatal)


class Door:
    """Where rank 0 lets the others in: a listening socket, and the key they must show."""

    def __init__(self, everywhere: bool) -> None:
        """`everywhere`: for other machines too, not for this one alone."""
        if everywhere and socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("" if everywhere else "127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.key = secrets.token_bytes(KEY_BYTES)

    def admit(self, seconds: float) -> tuple[int, Connection] | None:
        """The next rank that shows the key, and its wire; None if there was none in time."""
        self._socket.settimeout(seconds)
        try:
            caller, _ = self._socket.accept()
        except TimeoutError:
            return None
        caller.settimeout(GREETING_SECONDS)
        try:
            greeting = _read(caller, KEY_BYTES + 4)
        except OSError:
            greeting = b""
        if not hmac.compare_digest(greeting[:KEY_BYTES], self.key):
            caller.close()
            return None
        return int.from_bytes(greeting[KEY_BYTES:], "big"), _connection(caller)

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


class RankZeroGoneError(Exception):
    """The line to rank 0 has ended without an order to end."""


class Wire:
    """A rank's end of its wire to rank 0."""

    def __init__(self, seat: Seat, host: str, port: int, key: bytes) -> None:
        """Go through the door at `host`, and watch for rank 0's end from then on."""
        self.seat = seat
        line = socket.create_connection((host, port), timeout=GREETING_SECONDS)
        line.sendall(key + seat.rank.to_bytes(4, "big"))
        self._connection = _connection(line)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def listen(self) -> Any:
        """The next order, None for the last; raises `RankZeroGoneError`."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise RankZeroGoneError from None

    def answer(self, message: Any) -> None:
        """Send `message` to rank 0; if that has gone, `listen` says so."""
        try:
            self._connection.send(message)
        except OSError:
            return

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this rank ends, and wait until it has hung up.

        Hanging up first, with orders unread, would make the socket drop what was said.
        """
        self.answer(Failure.of(error))
        with contextlib.suppress(RankZeroGoneError):
            while self.listen() is not None:
                pass

    def close(self) -> None:
        """This rank has ended in order."""
        self._ended.set()
        end_line(self._connection)
        self._watcher.join(ORDERLY_END_SECONDS)  # Python must not end around it
        self._connection.close()

    def _watch(self) -> None:
        """End the process if rank 0 goes while this rank is stuck in a collective.

        Only a hang-up wakes this thread: orders are read by the one that follows them.
        """
        poll = select.poll()
        poll.register(self._connection.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll()
        if not self._ended.wait(ORDERLY_END_SECONDS):
            os._exit(1)


def end_line(wire: Connection) -> None:
    """End both directions of a wire that another thread may be using."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(wire.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def _read(line: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes, fewer where the other end closes."""
    data = b""
    while len(data) < count and (more := line.recv(count - len(data))):
        data += more
    return data


def _connection(line: socket.socket) -> Connection:
    """`line` for whole messages, each sent at once; a machine that falls silent ends it."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(line.detach())
