"""A rank that fails or dies ends the run with its reason, soon, and leaves no process behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from eyas.config import EngineConfig, SamplingParams
from eyas.distributed.group import Group
from eyas.engine.engine import Engine
from eyas.engine.networks import Networks
from eyas.engine.ranks import Ranks, interrupts_deferred
from eyas.errors import CheckpointError, ConfigError, RankError
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.distributed.worlds import LLAMA, TinySource, ranked_engine
from tests.helpers import Job, chain, outputs, run_all, toy_tokenizer
from tests.processes import environment

SOON = 10.0
"""Seconds; the contract is 30."""
LONG = Job(prompt=(1, 2, 3), params=SamplingParams(max_tokens=200, ignore_eos=True))
SHORT = Job(prompt=(1, 2, 3), params=SamplingParams(max_tokens=5))


@contextmanager
def two_ranks(source: TinySource = LLAMA) -> Iterator[tuple[Ranks, Engine, int]]:
    """Ranks, an engine over them, and rank 1's process id; no process may be left."""
    ranks = Ranks(source, 2, "cpu")
    pid = int(ranks.prints[1].where["process"])
    try:
        yield ranks, ranked_engine(ranks, chain(2)), pid
    finally:
        ranks.close()
        assert not alive(pid)


@pytest.fixture(autouse=True)
def ctrl_c_arrives() -> Iterator[None]:
    """Tests started in the background of a shell inherit that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[Ranks, Engine]]:
    """Ranks that nobody kills, and an engine over them."""
    with two_ranks() as (ranks, engine, _):
        yield ranks, engine


def drain(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while engine.scheduler.has_work:
        engine.step()


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def raised(engine: Engine) -> tuple[RankError, float]:
    """The error of running `LONG`, and how long it took."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_all(engine, [LONG])
    return caught.value, time.monotonic() - start


def test_a_killed_rank_ends_the_run() -> None:
    """Fault: rank 0 waits for ever in a collective (v#44063). Later calls say the same at once."""
    with two_ranks() as (_, engine, pid):
        run_all(engine, [SHORT])
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        error, seconds = raised(engine)
        assert seconds < SOON
        assert str(error).startswith("rank 1 of 2: was killed by SIGKILL")
        error, seconds = raised(engine)
        assert seconds < 1
        assert "SIGKILL" in str(error)


def test_a_rank_killed_while_idle_ends_the_next_run() -> None:
    """Fault: a dead rank is noticed only by a timeout."""
    with two_ranks() as (_, engine, pid):
        os.kill(pid, signal.SIGKILL)
        error, seconds = raised(engine)
        assert "SIGKILL" in str(error)
        assert seconds < SOON


def test_an_idle_engine_goes_on(calm: tuple[Ranks, Engine]) -> None:
    """Fault: ranks that wait for orders in a collective, which times out. Both ends may rest."""
    _, engine = calm
    first = outputs(run_all(engine, [SHORT]))
    time.sleep(3)
    assert outputs(run_all(engine, [SHORT])) == first


def fails_later(target: Decoder, drafter: Eagle3, rank: int) -> None:
    """Rank 1 fails in its fifth pass."""
    calls: list[int] = []
    logits: Callable[[torch.Tensor], torch.Tensor] = target.logits

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if rank == 1 and len(calls) == 5:
            raise MemoryError("the fifth pass was too much")
        return logits(hidden)

    setattr(target, "logits", failing)  # noqa: B010


def test_an_error_in_one_rank_is_rank_0s_to_report() -> None:
    """Fault: the cause is printed by another process, or is "connection closed by peer"."""
    with two_ranks(dataclasses.replace(LLAMA, spoil=fails_later)) as (_, engine, _pid):
        error, seconds = raised(engine)
    assert str(error).startswith("rank 1 of 2: MemoryError: the fifth pass was too much")
    assert "in failing" in "".join(getattr(error, "__notes__", []))
    assert seconds < SOON


class Unloadable(TinySource):
    """Rank 1's checkpoint is bad."""

    def load(self, device: torch.device, group: Group) -> Networks:
        """Fail on rank 1."""
        if group.rank == 1:
            raise CheckpointError("tensor 'x'", "is missing", "download it again")
        return super().load(device, group)


def test_a_rank_that_cannot_load_says_so() -> None:
    """Fault: rank 0 waits for a rank that never comes to its first collective."""
    ranks = Ranks(Unloadable(target=LLAMA.target, drafter=LLAMA.drafter), 2, "cpu")
    with pytest.raises(RankError, match="rank 1 of 2: tensor 'x': is missing; download it again"):
        _ = ranks.networks
    assert not alive(int(ranks.prints[1].where["process"]))


def test_an_error_of_rank_0_ends_the_others() -> None:
    """Fault: rank 0 fails in a step, and the others wait for it in a collective, for ever."""
    with two_ranks() as (ranks, engine, pid):
        run_all(engine, [SHORT])
        setattr(engine.runner.parts.target, "logits", None)  # noqa: B010
        with pytest.raises(TypeError):
            run_all(engine, [SHORT])
        assert not alive(pid)
        with pytest.raises(RankError, match="have been closed"):
            ranked_engine(ranks)


def test_a_refused_engine_leaves_the_ranks_alone(calm: tuple[Ranks, Engine]) -> None:
    """Fault: a wrong setting of a second engine ends the first one's ranks."""
    ranks, engine = calm
    first = outputs(run_all(engine, [SHORT]))
    with pytest.raises(ConfigError, match="8-bit draft passes"):
        ranked_engine(ranks, chain(2), draft_weights="int8")
    assert outputs(run_all(engine, [SHORT])) == first
    assert outputs(run_all(ranked_engine(ranks, chain(1)), [SHORT])) == first


def test_ctrl_c_waits_for_the_step(calm: tuple[Ranks, Engine]) -> None:
    """Fault: ranks out of step after a Ctrl-C; a chat goes on after one."""
    _, engine = calm
    expected = outputs(run_all(engine, [SHORT]))
    request = engine.add(LONG.prompt, LONG.params)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    engine.abort(request)
    assert 0 < len(request.output) < 200
    assert outputs(run_all(engine, [SHORT])) == expected


def test_a_second_ctrl_c_does_not_wait() -> None:
    """Fault: a step that hangs cannot be left."""
    reached: list[str] = []

    def press_twice() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append("behind the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("behind the second")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert reached == ["behind the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


SCRIPT = """
import sys, time, torch
from tests.distributed.worlds import LLAMA, ranked_engine
from tests.distributed.test_hub import LONG
from eyas.distributed import hub
from eyas.engine.ranks import Ranks
if __name__ == "__main__":
    torch.set_num_threads(1)
    hub.FREED_SECONDS = hub.STUCK_SECONDS = 0.5
    ranks = Ranks(LLAMA, 2, "cpu")
    engine = ranked_engine(ranks)
    if sys.argv[1] == "stuck":
        engine.runner.parts.target.logits = lambda hidden: time.sleep(1000)
    print(ranks.prints[1].where["process"], flush=True)
    while True:
        engine.add(LONG.prompt, LONG.params)
        while engine.scheduler.has_work:
            engine.step()
"""


@contextmanager
def generating(folder: Path, how: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is rank 0 and generates without end, and rank 1's id; both must end."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(),
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.5)
    try:
        yield process, pid
    except BaseException:  # a test that fails leaves nothing that computes on
        for one in (process.pid, pid):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        raise
    until = time.monotonic() + SOON
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_rank_0(how: signal.Signals, tmp_path: Path) -> None:
    """Fault: processes that go on, and hold their GPUs, after rank 0 was killed or interrupted.

    Ctrl-C in a terminal reaches all ranks at once: the signal goes to the whole group.
    """
    with generating(tmp_path) as (process, _):
        if how is signal.SIGINT:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        process.communicate(timeout=SOON)


def test_a_rank_0_that_cannot_be_freed_is_ended(tmp_path: Path) -> None:
    """Fault: a driver call that does not return, after a rank was lost, is a hang for ever."""
    with generating(tmp_path, "stuck") as (process, pid):
        os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("error: rank 1 of 2: was killed by SIGKILL")


def test_an_engine_needs_ranks_for_its_tp() -> None:
    """Fault: tp is set where nobody would be started."""
    whole = LLAMA.whole()
    with pytest.raises(ConfigError, match="tp=2: the target's network is that of 1 ranks"):
        Engine(whole.target, toy_tokenizer(), config=EngineConfig(tp=2))
