"""Ranks as processes: started by the engine or by torchrun, and what is refused before."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import LLM, EngineConfig, SamplingParams
from eyas.distributed.control import Door, Wire
from eyas.distributed.launch import spawn
from eyas.distributed.rank_group import RankGroup
from eyas.errors import ConfigError, RankError
from tests.chat_model import write_chat_model, write_drafter
from tests.processes import environment

PROMPTS = ["hello there", "abc"]
PARAMS = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, temperature=0.8, seed=3)]
BASE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "context_length": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable[..., Any]) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("chat"), save_llama))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_drafter(tmp_path_factory.mktemp("drafter")))


@pytest.fixture(scope="module")
def expected(model: str, drafter: str) -> list[list[int]]:
    """What one rank writes."""
    llm = LLM(model, drafter=drafter, config=EngineConfig(**BASE))
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]


def test_an_llm_starts_its_ranks(model: str, drafter: str, expected: list[list[int]]) -> None:
    """Fault: a facade that forgets ranks: in a sibling, in its stream, or when it is closed."""
    llm = LLM(model, drafter=drafter, config=EngineConfig(tp=2, **BASE))
    assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == expected
    sibling = llm.sibling(llm.engine.speculation)
    assert [answer.token_ids for answer in sibling.generate(PROMPTS, PARAMS)] == expected
    assert len(multiprocessing.active_children()) == 1
    llm.close()
    llm.close()
    assert not multiprocessing.active_children()
    with pytest.raises(RankError, match="have been closed"):
        sibling.generate(PROMPTS, PARAMS)


def test_ranks_end_with_their_llm(model: str) -> None:
    """Fault: an LLM that is dropped leaves processes that hold GPUs."""
    llm = LLM(model, drafter=None, config=EngineConfig(tp=2, **BASE))
    assert len(multiprocessing.active_children()) == 1
    del llm
    assert not multiprocessing.active_children()


class Held:
    """In the place of a captured graph: what must be gone when the group ends."""


@pytest.mark.parametrize("how", ["closed", "dropped", "found by the collector"])
def test_graphs_end_before_their_group(
    model: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: NCCL waits for ever for a graph that holds its collectives."""
    left: list[bool] = []
    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    monkeypatch.setattr(RankGroup, "close", lambda group: left.append(len(alive) > 0))
    llm = LLM(model, drafter=None, config=EngineConfig(tp=2, **BASE))
    graphs: dict[Any, Any] = llm.engine.runner.graphs._graphs
    graphs["a graph"] = Held()
    alive.add(graphs["a graph"])
    del graphs
    if how == "closed":
        llm.close()
    elif how == "found by the collector":
        vars(llm)["itself"] = llm
    del llm
    gc.collect()
    assert left == [False]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp": 3}, "tp=3 for .* of 4: every rank takes the same share; use tp=2"),
        ({"tp": 4}, "tp=4 for the KV heads of 2: every rank takes the same share; use tp=2"),
        ({"tp": 0}, "tp=0: must be at least 1"),
        ({"tp": -2}, "tp=-2: must be at least 1"),
    ],
)
def test_bad_tp_is_refused_before_a_process_starts(
    model: str, config: dict[str, int], message: str
) -> None:
    """Fault: ranks start, load, and only then fail, each in its own words."""
    with pytest.raises(ConfigError, match=message):
        LLM(model, drafter=None, config=EngineConfig(**{**BASE, **config}))
    assert not multiprocessing.active_children()


class Stillborn:
    """Cannot be unpickled in another process."""

    def __call__(self, wire: Wire) -> None:
        """Never called."""

    def __reduce__(self) -> Any:
        return (os._exit, (7,))


def test_a_rank_that_never_appears_is_named() -> None:
    """Fault: rank 0 waits for ever for a process that has ended."""
    with pytest.raises(RankError, match=r"rank 1 of 2: did not start \(exit status 7\)"):
        spawn(2, Stillborn())
    assert not multiprocessing.active_children()


def test_strangers_are_not_let_in() -> None:
    """Fault: whoever reaches the port is taken for a rank, and what it sends is unpickled."""
    door = Door(everywhere=False)
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(bytes(36))
        assert door.admit(5) is None
        assert stranger.recv(1) == b""
    assert door.admit(0.01) is None
    door.close()


def run_torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`count` processes by torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(count), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(OMP_NUM_THREADS="1"),
    )


def test_torchrun_starts_the_ranks(
    model: str, drafter: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """Fault: every process answers, or none; a rank without its own GPU number or settings.

    Also: gloo's threads outlive a rank's group, and then abort some ranks when Python ends.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, json, os, sys\n"
        "if os.environ['RANK'] == '1': os.environ['NCCL_ALGO'] = 'Tree'\n"
        "from eyas import LLM, EngineConfig, SamplingParams\n"
        "from tests.distributed.test_launch import PARAMS, PROMPTS\n"
        "from tests.distributed.worlds import gloo_threads\n"
        "left = lambda: sys.stderr.write(f'left: {list(gloo_threads().values())}\\n')\n"
        "atexit.register(left)\n"
        "config = EngineConfig(**json.loads(sys.argv[3]))\n"
        "llm = LLM(sys.argv[1], drafter=sys.argv[2], config=config)\n"
        "answers = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]\n"
        "print(json.dumps({'answers': answers, **llm.ranks.record()}))\n"
    )
    done = run_torchrun(2, str(script), model, drafter, json.dumps({**BASE, "tp": 2}))
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    record = json.loads(line)
    assert record["answers"] == expected
    assert record["mismatches"] == ["rank 1: NCCL_ALGO is Tree, on rank 0 it is unset"]
    assert "warning: rank 1: NCCL_ALGO is Tree" in done.stderr
    assert done.stderr.count("left: []\n") == 2


def test_torchrun_with_another_tp_is_refused(model: str) -> None:
    """Fault: processes that belong to no group; each would answer by itself."""
    done = run_torchrun(1, "-m", "eyas", "generate", "hello", "--tp", "2", "--model", model)
    assert done.returncode != 0
    assert "error: tp=2 under torchrun with 1 processes: every process is a rank" in done.stderr


def test_one_thread_here() -> None:
    """The tests above compare one thread with one thread."""
    assert torch.get_num_threads() == 1
