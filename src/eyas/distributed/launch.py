"""Ranks as processes: started here on one machine, or by torchrun on one or several.

Rank 0 gets a `Hub`; every other rank gets a `Wire` and serves. A process that was started here is
told everything by arguments: its place, rank 0's address and key, and the settings of the libraries
beneath. Of torchrun's variables torch reads those that it defines; eyas reads none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from eyas.config import require
from eyas.distributed.control import Door, RankZeroGoneError, Wire
from eyas.distributed.hub import Hub
from eyas.distributed.rank_group import Seat
from eyas.distributed.settings import LibrarySettings
from eyas.errors import RankError

Serve = Callable[[Wire], None]
"""What a rank other than 0 does until rank 0 tells it to end."""

START_SECONDS = 300.0
"""How long ranks may take to appear, which includes importing torch."""
LOOK_SECONDS = 0.2
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a started process is told."""

    rank: int
    size: int
    store_port: int
    door_port: int
    key: bytes
    settings: LibrarySettings


def torchrun_seat(size: int) -> Seat | None:
    """This process's place if torchrun started it; to be asked once.

    Raises `ConfigError` if torchrun started another number of processes than `size`.
    """
    if not dist.is_torchelastic_launched():
        return None
    store, rank, started = next(rendezvous("env://", timeout=_seconds(START_SECONDS)))
    require(
        started == size,
        f"tp={size} under torchrun with {started} processes",
        "every process is a rank",
        f"use tp={started}, or start {size} processes",
    )
    local_rank = dist.get_node_local_rank(fallback_rank=rank)
    return Seat(rank=rank, size=size, local_rank=local_rank, store=PrefixStore("eyas", store))


def spawn(size: int, serve: Serve) -> Hub:
    """Start ranks 1 .. size - 1 on this machine, where they do `serve`; this process is rank 0.

    `serve` is pickled. Raises `RankError` for a rank that does not appear.
    """
    store = TCPStore(
        LOOPBACK, 0, size, True, timeout=_seconds(START_SECONDS), wait_for_workers=False
    )
    door = Door(everywhere=False)
    context = multiprocessing.get_context("spawn")
    processes: dict[int, BaseProcess] = {}
    wires: dict[int, Connection] = {}
    try:
        for rank in range(1, size):
            invitation = Invitation(
                rank=rank,
                size=size,
                store_port=store.port,
                door_port=door.port,
                key=door.key,
                settings=LibrarySettings.observe(),
            )
            started = context.Process(target=_started, args=(invitation, serve), daemon=True)
            started.start()
            processes[rank] = started
        _admit(door, size, wires, processes)
    except BaseException:
        for process in processes.values():
            process.kill()
            process.join()
        raise
    finally:
        door.close()
    return Hub(Seat(rank=0, size=size, local_rank=0, store=store), wires, processes)


def _started(invitation: Invitation, serve: Serve) -> None:
    """A started process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears Ctrl-C and ends the others
    invitation.settings.apply()
    store = TCPStore(
        LOOPBACK,
        invitation.store_port,
        invitation.size,
        False,
        timeout=_seconds(START_SECONDS),
        wait_for_workers=False,
    )
    rank = invitation.rank
    seat = Seat(rank=rank, size=invitation.size, local_rank=rank, store=store)
    wire = Wire(seat, LOOPBACK, invitation.door_port, invitation.key)
    status = 1
    with contextlib.suppress(RankZeroGoneError, SystemExit):
        _serve(wire, serve)
        status = 0
    os._exit(status)  # in order it might wait for a kernel that waits for a lost rank


def _serve(wire: Wire, serve: Serve) -> None:
    """Do `serve`; an error is rank 0's to report. Raises `RankZeroGoneError`."""
    try:
        serve(wire)
    except Exception as error:
        if isinstance(error, RankZeroGoneError):
            raise
        wire.fail(error)
        raise SystemExit(1) from None
    finally:
        wire.close()


def gather(seat: Seat) -> Hub:
    """Rank 0 under torchrun: say where the door is, and let the others in.

    Raises `RankError` for a rank that does not appear.
    """
    door = Door(everywhere=True)
    try:
        seat.store.set("door", f"{_host(seat.store)} {door.port} {door.key.hex()}")
        wires: dict[int, Connection] = {}
        _admit(door, seat.size, wires, {})
    finally:
        door.close()
    return Hub(seat, wires, {})


def join(seat: Seat, serve: Serve) -> NoReturn:
    """Another rank under torchrun: do `serve`, then end the process."""
    host, port, key = seat.store.get("door").decode().split()
    wire = Wire(seat, host, int(port), bytes.fromhex(key))
    try:
        _serve(wire, serve)
    except RankZeroGoneError:
        raise RankError(
            f"rank {seat.rank} of {seat.size}", "rank 0 has gone", "look at rank 0's output"
        ) from None
    raise SystemExit(0)


def _host(store: Store) -> str:
    """Where rank 0's machine is reached: the address under which ranks reached the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore), "torchrun's ranks meet in a TCPStore"
    return store.host


def _admit(
    door: Door, size: int, wires: dict[int, Connection], processes: dict[int, BaseProcess]
) -> None:
    """Fill `wires` with every other rank's; raises `RankError` for one that will not come."""
    until = monotonic() + START_SECONDS
    while len(wires) < size - 1:
        if found := door.admit(LOOK_SECONDS):
            wires[found[0]] = found[1]
        for rank in sorted(set(range(1, size)) - wires.keys()):
            code = processes[rank].exitcode if rank in processes else None
            if code is not None or monotonic() > until:
                ended = f"within {START_SECONDS:.0f} s" if code is None else f"(exit status {code})"
                raise RankError(
                    f"rank {rank} of {size}",
                    f"did not start {ended}",
                    "look at its output; a script that makes an LLM with tp > 1 needs the line "
                    'if __name__ == "__main__":',
                )


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
