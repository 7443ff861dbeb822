"""Tensor-parallel ranks at work: rank 0 sends every plan to all, and runs its own share.

Only rank 0 has a scheduler, a tokenizer and an engine. The others follow orders: load, open a
runner, run a plan. All ranks run the same plans in the same order with the same shapes, eagerly or
from a graph, so their collectives meet; what they must agree on is shared inside the cycle.
"""

from __future__ import annotations

import itertools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from eyas.batch import StepPlan
from eyas.config import EngineConfig, SpeculationConfig, require
from eyas.distributed.control import Failure, Wire
from eyas.distributed.fingerprints import Mismatch, RankPrint, mismatches, rank_print, record
from eyas.distributed.launch import gather, join, spawn, torchrun_seat
from eyas.distributed.rank_group import RankGroup, Seat
from eyas.engine.graphs import CycleGraphs, GraphKey
from eyas.engine.networks import Networks, Source
from eyas.engine.runner import Runner, Underway
from eyas.engine.watching import RankNotes, RankWatch
from eyas.errors import ConfigError, EyasError, RankError
from eyas.models.registry import resolve_device
from eyas.spans import GraphClock, NoSpans, Spans


@dataclass(frozen=True, slots=True)
class Load:
    """Join the group and load this rank's networks."""


@dataclass(frozen=True, slots=True)
class Open:
    """Make a runner, then warm it up."""

    key: int
    config: EngineConfig
    speculation: SpeculationConfig


@dataclass(frozen=True, slots=True)
class Run:
    """Run a plan with runner `key`; `staged`, `marked`: as a run whose stages are timed.

    `marked` is one under a `GraphClock`.
    """

    key: int
    plan: StepPlan
    staged: bool
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Run eagerly what the graph of `graph` holds."""

    key: int
    graph: GraphKey


@dataclass(frozen=True, slots=True)
class Watch:
    """Note what steps of runner `key` take."""

    key: int


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Answer with what was noted; traces go to `folder`."""

    folder: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Answer with the digest of what runner `key` has committed."""

    key: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free runner `key`."""

    key: int


class Unread:
    """Spans of a rank whose stages nobody reads; a cycle is run as if somebody did."""

    def mark(self, stage: str | None) -> None:
        """Ignore the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """What a rank other than 0 does from its start to its end; can be sent to a process."""

    source: Source
    device: str

    def __call__(self, wire: Wire) -> None:
        """Follow rank 0's orders until there are no more."""
        device = rank_device(self.device, wire.seat)
        wire.answer(rank_print(device, self.source.facts(device)))
        networks: Networks | None = None
        group: RankGroup | None = None
        runners: dict[int, Runner] = {}
        watch: RankWatch | None = None
        clock = GraphClock()
        while (order := wire.listen()) is not None:
            match order:
                case Load():
                    group = RankGroup(wire.seat, device)
                    networks = self.source.load(device, group)
                    wire.answer(None)
                case Open():
                    assert networks is not None, "an engine is opened after loading"
                    _open(wire, networks, order, runners)
                case Run():
                    runner = runners[order.key]
                    runner.spans = Unread() if order.staged else NoSpans()
                    runner.spans = clock if order.marked else runner.spans
                    with nullcontext() if watch is None else watch.step():
                        runner.launch(order.plan)
                    clock.drop()  # rank 0 alone reads times
                case Rehearse():
                    runners[order.key].graphs.rehearse(order.graph, NoSpans())
                case Watch():
                    assert group is not None, "a runner is watched after loading"
                    watch = RankWatch(group, device)
                    watch.start()
                case Unwatch():
                    assert watch is not None, "what ends has begun"
                    wire.answer(watch.stop(order.folder))
                    watch, clock = None, GraphClock()
                    for runner in runners.values():
                        runner.graphs.drop_twins()
                case Digest():
                    wire.answer(runners[order.key].parts.state.digest())
                case Drop():
                    runners.pop(order.key, None)
        for runner in runners.values():
            runner.graphs.clear()
        if group is not None:
            group.close()


def _open(wire: Wire, networks: Networks, order: Open, runners: dict[int, Runner]) -> None:
    try:
        config, pages = order.config, order.config.num_pages
        runner = Runner(networks.target, networks.drafter, config, order.speculation, pages)
    except EyasError as error:
        wire.answer(Failure.of(error, fatal=False))
        return
    runners[order.key] = runner
    wire.answer(None)
    runner.warm_up()
    wire.answer(None)


def rank_device(name: str, seat: Seat) -> torch.device:
    """The device of a rank: the CPU, or the GPU of its number on its machine."""
    device = resolve_device(name)
    require(
        device.index is None or seat.size == 1,
        f"device {name!r} with tp={seat.size}",
        "every rank takes the GPU of its own number",
        "give cuda; CUDA_VISIBLE_DEVICES chooses GPUs",
    )
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if seat.local_rank >= count:
        raise ConfigError(
            f"tp={seat.size}",
            f"rank {seat.rank} has no GPU: this machine has {count}",
            f"use tp<={count}, or start ranks with torchrun on several machines",
        )
    torch.cuda.set_device(seat.local_rank)
    return torch.device("cuda", seat.local_rank)


def take_part(source: Source, size: int, device: str) -> Seat | None:
    """Under torchrun: on rank 0 its seat; elsewhere follow rank 0, then end the process.

    None where torchrun did not start this process. Raises `ConfigError` as `torchrun_seat` does.
    """
    seat = torchrun_seat(size)
    if seat is not None and seat.rank > 0:
        join(seat, Follower(source=source, device=device))
    return seat


class Ranks:
    """The ranks of one target and its drafter, as rank 0 holds them."""

    def __init__(self, source: Source, size: int, device: str, seat: Seat | None = None) -> None:
        """Start the ranks and compare them; raises `ConfigError` where results would differ.

        `seat` is this process's under torchrun: then the others are there (`take_part`).
        Differences that change speed are said on stderr and kept in `mismatches`.
        """
        source.check(size)
        if seat is None:
            _check_gpus(size, device)
            self._hub = spawn(size, Follower(source=source, device=device))
        else:
            self._hub = gather(seat)
        self.source = source
        self._keys = itertools.count()
        self._dropped: deque[int] = deque()
        self._networks: Networks | None = None
        self._graphs: dict[int, CycleGraphs] = {}
        weakref.finalize(self, self._hub.close)
        with self.together():
            self.device = rank_device(device, self._hub.seat)
            own = rank_print(self.device, source.facts(self.device))
            self.prints: list[RankPrint] = [own, *self.hear()]
            self.mismatches: list[Mismatch] = mismatches(self.prints)
            _say(self.mismatches)

    @property
    def networks(self) -> Networks:
        """Rank 0's share; loaded on all ranks at the first use."""
        if self._networks is None:
            with self.together():
                self.tell(Load())
                group = RankGroup(self._hub.seat, self.device)
                self._hub.release = group.abort
                self._hub.at_end = partial(_end, self._graphs, group)
                self._networks = self.source.load(self.device, group)
                self.hear()
        return self._networks

    def open(self, config: EngineConfig, speculation: SpeculationConfig) -> RankedRunner:
        """A runner on every rank; `config` is resolved. Raises what `Runner` raises."""
        key = next(self._keys)
        runner = RankedRunner(self, key, config, speculation)
        self._graphs[key] = runner.graphs
        return runner

    def together(self) -> AbstractContextManager[None]:
        """Around work that all ranks do; see `Hub.together`."""
        return self._hub.together()

    def tell(self, order: Any) -> None:
        """Give every other rank an order."""
        while self._dropped:
            self._hub.tell(Drop(self._dropped.popleft()))
        self._hub.tell(order)

    def hear(self) -> list[Any]:
        """One answer of every other rank."""
        return self._hub.hear()

    def drop(self, key: int) -> None:
        """Free a runner's graphs here, and the runner on the other ranks before their next order.

        May be called at any time. The graphs are not left to the end of the runner that is dropped:
        the last reference to the ranks may be one that it holds itself.
        """
        graphs = self._graphs.pop(key, None)
        if graphs is not None:
            graphs.clear()
        self._dropped.append(key)

    def record(self) -> dict[str, Any]:
        """Every rank's fingerprint and the differences, as plain values."""
        return record(self.prints)

    def close(self) -> None:
        """End the other ranks; engines over these networks cannot run afterwards."""
        self._hub.close()


class RankedRunner(Runner):
    """Rank 0's runner, which makes all other ranks run the same."""

    def __init__(
        self, ranks: Ranks, key: int, config: EngineConfig, speculation: SpeculationConfig
    ) -> None:
        """Make a runner of number `key` on every rank; see `Ranks.open`."""
        self._ranks, self._key = ranks, key
        networks = ranks.networks
        error: EyasError | None = None
        with ranks.together():
            ranks.tell(Open(key, config, speculation))
            try:
                super().__init__(
                    networks.target, networks.drafter, config, speculation, config.num_pages
                )
            except EyasError as refusal:
                error = refusal
            answers = ranks.hear()
        weakref.finalize(self, ranks.drop, key)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, Failure):
                raise RankError(f"rank {rank}: {answer.value}", answer.rule, answer.remedy)

    def warm_up(self, progress: bool = False) -> None:
        """Capture graphs, on all ranks at once."""
        with self._ranks.together():
            super().warm_up(progress)
            self._ranks.hear()

    def digests(self) -> list[str]:
        """See `Runner.digests`."""
        with self._ranks.together():
            self._ranks.tell(Digest(self._key))
            return super().digests() + self._ranks.hear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: a lost rank is an error, Ctrl-C waits until all ranks have done it."""
        with interrupts_deferred(), self._ranks.together():
            yield

    def launch(self, plan: StepPlan) -> Underway:
        """Start one step on all ranks."""
        marked = isinstance(self.spans, GraphClock)
        staged = not isinstance(self.spans, NoSpans | GraphClock)
        self._ranks.tell(Run(self._key, plan, staged, marked))
        return super().launch(plan)

    def rehearse(self, graph: GraphKey, spans: Spans) -> None:
        """See `Runner.rehearse`; on all ranks."""
        with self._ranks.together():
            self._ranks.tell(Rehearse(self._key, graph))
            super().rehearse(graph, spans)

    def watch(self) -> None:
        """See `Runner.watch`; on all ranks."""
        with self._ranks.together():
            self._ranks.tell(Watch(self._key))

    def unwatch(self, folder: str) -> list[RankNotes]:
        """See `Runner.unwatch`; of the other ranks in order."""
        with self._ranks.together():
            self._ranks.tell(Unwatch(folder))
            return list(self._ranks.hear())


def _end(graphs: Mapping[int, CycleGraphs], group: RankGroup) -> None:
    """Free graphs, which hold the group's collectives, then end the group."""
    for held in graphs.values():
        held.clear()
    group.close()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A Ctrl-C inside is raised behind the block; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _check_gpus(size: int, device: str) -> None:
    """Raise `ConfigError` before processes start that this machine has no GPU for."""
    if resolve_device(device).type == "cuda":
        count = torch.cuda.device_count()
        require(
            size <= count,
            f"tp={size}",
            f"every rank takes a GPU, and this machine has {count}",
            f"use tp<={count}, or start ranks with torchrun on several machines",
        )


def _say(found: Sequence[Mismatch]) -> None:
    """Warn of differences between ranks; raise `ConfigError` for one that changes results."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for mismatch in found:
        if not mismatch.changes_results:
            console.print(f"warning: {mismatch}", style="yellow", markup=False)
    for mismatch in found:
        require(
            not mismatch.changes_results,
            str(mismatch),
            "ranks must not differ in what results depend on",
            "start all ranks with the same code, libraries, model and flags",
        )
