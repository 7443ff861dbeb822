"""Rank 0's end of all wires, and the thread that notices a rank's end.

The first sign of a failure frees whoever waits in a collective. Signs of half a second are then
weighed, because a rank that fails makes the others fail too: one that went without a word is at
fault before one that complains. After a failure nothing goes on: every later call raises it.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from typing import Any

from eyas.distributed.control import Failure, end_line
from eyas.distributed.rank_group import Seat
from eyas.errors import EyasError, RankError

WEIGHING_SECONDS = 0.5
VERDICT_SECONDS = 3.0
"""How long an error of rank 0 waits for signs that another rank caused it."""
FREED_SECONDS = 3.0
STUCK_SECONDS = 15.0
"""After a failure, how long rank 0 may take to leave a collective: before it is interrupted, and
before the process is ended."""
ORDERLY_SECONDS, DISORDERLY_SECONDS = 10.0, 0.5
"""How long other ranks may take to end by themselves."""


def _nothing() -> None:
    """No collective can wait yet."""


class Hub:
    """All other ranks, as rank 0 sees them."""

    def __init__(
        self, seat: Seat, wires: dict[int, Connection], processes: dict[int, BaseProcess]
    ) -> None:
        """`processes` are the ranks that this process started: they end with the hub."""
        self.seat = seat
        self.release: Callable[[], None] = _nothing
        """Frees a thread that waits in a collective for a rank that will not come."""
        self.at_end: Callable[[], None] = _nothing
        """Ends the group, once the other ranks have ended: what `close` does last."""
        self._wires, self._processes = wires, processes
        self._inbox: queue.Queue[tuple[int, Any] | None] = queue.Queue()
        self._failure: RankError | None = None
        self._alarm, self._settled, self._outside = (threading.Event() for _ in range(3))
        self._outside.set()
        self._closed = False
        self._thread = 0
        self._woken, self._wake = os.pipe()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        atexit.register(self.close)

    def tell(self, order: Any) -> None:
        """Send `order` to every other rank; None tells it to end."""
        data = ForkingPickler.dumps(order)
        for wire in self._wires.values():
            try:
                wire.send_bytes(data)
            except OSError:
                continue  # the watching thread says why

    def hear(self) -> list[Any]:
        """One answer of every other rank, in rank order; waits as long as all of them live."""
        answers: dict[int, Any] = {}
        while len(answers) < self.seat.size - 1:
            self.check()
            if found := self._inbox.get():
                answers[found[0]] = found[1]
        return [answers[rank] for rank in sorted(answers)]

    def check(self) -> None:
        """Raise the ranks' failure, if there was one; also if they have been closed."""
        if self._alarm.is_set():
            self._settled.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closed:
            raise RankError("tensor-parallel ranks", "have been closed", "load the model again")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work that all ranks do: an error in it ends them, and its cause is what is raised.

        Not to be nested.
        """
        self._thread = threading.get_ident()
        self._outside.clear()
        try:
            self.check()
            yield
            self.check()
        except BaseException as error:
            mine = isinstance(error, EyasError) or not isinstance(error, Exception)
            self._settled.wait(0 if mine else VERDICT_SECONDS)
            self._outside.set()
            self.close(orderly=False)
            if self._failure is None or error is self._failure:
                raise
            raise self._failure from error
        finally:
            self._outside.set()

    def close(self, orderly: bool = True) -> None:
        """End the other ranks: when they are ready, or not `orderly`, at once."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if orderly:
            self.tell(None)
        os.write(self._wake, b".")
        os.close(self._wake)
        if not orderly:
            self._hang_up()
        until = monotonic() + (ORDERLY_SECONDS if orderly else DISORDERLY_SECONDS)
        for process in self._processes.values():
            process.join(max(0.0, until - monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(DISORDERLY_SECONDS)  # Python must not end around it
        if orderly:
            self._await_ends(until)
            self._hang_up()
        self.at_end()

    def _await_ends(self, until: float) -> None:
        """Wait for ranks that other processes started: they may be in the last collective yet."""
        lines = set(self._wires.values())
        while lines and (ready := wait(lines, max(0.0, until - monotonic()))):
            for wire in ready:
                assert isinstance(wire, Connection)
                try:
                    wire.recv_bytes()
                except (EOFError, OSError):
                    lines.remove(wire)

    def _hang_up(self) -> None:
        for wire in self._wires.values():
            wire.close()

    def _watch(self) -> None:
        """Sort what comes in until the hub is closed or a rank fails; runs in its own thread."""
        lines = {wire: rank for rank, wire in self._wires.items()}
        told: dict[int, Failure] = {}
        silent: list[int] = []
        until: float | None = None
        while until is None or monotonic() < until:
            patience = None if until is None else max(0.0, until - monotonic())
            for ready in wait([*lines, self._woken], patience):
                if not isinstance(ready, Connection):
                    os.close(self._woken)
                    return
                failed = self._take(ready, lines, told, silent)
                if failed and until is None:
                    until = monotonic() + WEIGHING_SECONDS
                    self._alarm.set()
                    threading.Thread(target=self.release, daemon=True).start()
        self._settle(told, silent)

    def _take(
        self,
        wire: Connection,
        lines: dict[Connection, int],
        told: dict[int, Failure],
        silent: list[int],
    ) -> bool:
        """Read one message or the end of a line; returns whether a rank has failed."""
        rank = lines[wire]
        try:
            message = wire.recv()
        except (EOFError, OSError):
            del lines[wire]
            if not self._closed and rank not in told:
                silent.append(rank)
            return not self._closed
        if isinstance(message, Failure) and message.fatal:
            told[rank] = message
            end_line(wire)  # it waits for this, and others may wait for its end in a collective
            return True
        self._inbox.put((rank, message))
        return False

    def _settle(self, told: dict[int, Failure], silent: list[int]) -> None:
        """Decide who failed, let waiting threads know, and see that they come out."""
        rank = silent[0] if silent else next(iter(told))
        name = f"rank {rank} of {self.seat.size}"
        if silent:
            self._failure = RankError(name, self._end_of(rank), "look at its output, start again")
        else:
            why = told[rank]
            self._failure = RankError(f"{name}: {why.value}", why.rule, why.remedy)
            self._failure.add_note(why.details)
        self._settled.set()
        self._inbox.put(None)
        in_main = self._thread == threading.main_thread().ident
        if not self._outside.wait(FREED_SECONDS) and in_main:
            _thread.interrupt_main()
        if not self._outside.wait(STUCK_SECONDS):
            sys.stderr.write(f"error: {self._failure}\n")
            sys.stderr.flush()
            os._exit(2)

    def _end_of(self, rank: int) -> str:
        """How a rank ended that said nothing."""
        process = self._processes.get(rank)
        if process is None:
            return "closed its connection"
        process.join(WEIGHING_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return "closed its connection" if code is None else f"ended with exit status {code}"
