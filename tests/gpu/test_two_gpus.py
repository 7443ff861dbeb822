"""Two GPUs over NCCL: collectives, also captured; equal texts; a killed rank.

float32 texts of two ranks must equal those of one, token for token.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from eyas.config import SamplingParams
from eyas.distributed.group import Group
from eyas.engine.graphs import GraphKey
from eyas.engine.networks import Networks
from eyas.engine.ranks import Ranks
from eyas.errors import RankError
from tests.distributed.test_equality import DRAFTED, JOBS
from tests.distributed.worlds import FAMILIES, on_ranks, ranked_engine
from tests.helpers import Job, make_engine, outputs, run_all
from tests.processes import ROOT, environment

if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)

DEVICE = torch.device("cuda")
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def no_multicast() -> Iterator[None]:
    """NVLink multicast is not everywhere, and where it is half there NCCL fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        yield


def collectives(group: Group) -> list[torch.Tensor]:
    """Sums, parts side by side, and rank 0's values, on the host."""
    given = []
    for dtype in TYPES:
        x = torch.arange(12, device="cuda").view(3, 4).to(dtype) + 100 * group.rank
        given += [group.all_reduce(x.clone()), group.all_gather(x), group.share(x.clone())]
    given.append(group.share(torch.full((5,), 1 << 40, device="cuda") + group.rank))
    return [x.cpu() for x in given]


def captured(group: Group) -> list[torch.Tensor]:
    """The same in a CUDA graph that is replayed with other values."""
    x = torch.zeros(3, 4, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.inference_mode():
        group.all_reduce(x.clone())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = [group.all_reduce(x.clone()), group.all_gather(x), group.share(x.clone())]
    results = []
    for value in (1.0, 7.0):
        x.fill_(value + group.rank)
        graph.replay()
        results += [y.cpu() for y in out]
    return results


def test_collectives() -> None:
    """Fault: NCCL's parts in another order than gloo's, or other bits on another rank."""
    here, there = on_ranks(2, collectives, "cuda")
    assert all(map(torch.equal, here, there))
    for i, dtype in enumerate(TYPES):
        x = torch.arange(12).view(3, 4).to(dtype)
        total, side_by_side, first = here[3 * i : 3 * i + 3]
        assert torch.equal(total, x + (x + 100))
        assert torch.equal(side_by_side, torch.cat((x, x + 100), dim=-1))
        assert torch.equal(first, x)
    assert torch.equal(here[-1], torch.full((5,), 1 << 40))


def test_collectives_can_be_captured() -> None:
    """Fault: a host read or a stream of its own inside a collective, which ends a capture."""
    here, there = on_ranks(2, captured, "cuda")
    assert all(map(torch.equal, here, there))
    for i, value in enumerate((1.0, 7.0)):
        total, side_by_side, first = here[3 * i : 3 * i + 3]
        assert torch.equal(total, torch.full((3, 4), 2 * value + 1))
        assert side_by_side[0].tolist() == [value] * 4 + [value + 1] * 4
        assert torch.equal(first, torch.full((3, 4), value))


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Networks, Ranks]]:
    """A family's networks on one GPU, and divided between two."""
    source = FAMILIES[request.param]
    ranks = Ranks(source, 2, "cuda")
    yield source.whole(DEVICE), ranks
    ranks.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafted", DRAFTED)
def test_two_gpus_write_what_one_writes(
    world: tuple[Networks, Ranks], drafted: str, graphs: bool
) -> None:
    """Fault: shards, collectives or captured collectives that are right over gloo alone."""
    whole, ranks = world
    speculation, off = DRAFTED[drafted], not graphs
    for jobs in (JOBS[:1], JOBS):
        engine = make_engine(whole.target, whole.drafter, speculation, disable_cuda_graph=True)
        alone = run_all(engine, jobs)
        engine = ranked_engine(ranks, speculation, disable_cuda_graph=off)
        shared = run_all(engine, jobs)
        assert outputs(shared) == outputs(alone)
        if graphs and not engine.runner.parts.needs_bound:
            assert any(isinstance(key, GraphKey) for key in engine.runner.graphs.counts)


def test_a_killed_rank_ends_the_run() -> None:
    """Fault: rank 0 waits for ever for a kernel that waits for a dead GPU's data."""
    ranks = Ranks(FAMILIES["llama"], 2, "cuda")
    engine = ranked_engine(ranks, DRAFTED["chain"])
    run_all(engine, JOBS[:1])
    pid = int(ranks.prints[1].where["process"])
    long = Job(prompt=(1, 2, 3), params=SamplingParams(max_tokens=200, ignore_eos=True))
    threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2: was killed by SIGKILL"):
        run_all(engine, [long] * 200)
    assert time.monotonic() - start < 30


DROPPED = """
from eyas.engine.ranks import Ranks
from tests.distributed.test_equality import DRAFTED, JOBS
from tests.distributed.worlds import FAMILIES, ranked_engine
from tests.helpers import run_all

def captured():
    engine = ranked_engine(Ranks(FAMILIES["llama"], 2, "cuda"), DRAFTED["chain"])
    run_all(engine, JOBS[:1])
    assert engine.runner.graphs._graphs
    return engine

captured()
print("dropped")
engine = captured()
"""


def test_ranks_end_with_their_engine() -> None:
    """Fault: NCCL waits for ever for a graph of the engine that goes with its ranks."""
    command, seen = [sys.executable, "-c", DROPPED], environment(NCCL_NVLS_ENABLE="0")
    done = subprocess.run(
        command, cwd=ROOT, env=seen, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "dropped" in done.stdout
