"""What a cycle launches on a GPU: counted through Triton's interpreter, so that it can't creep up.

A network's passes stand for themselves; what is counted lies between them. Every operator of torch
that computes is a launch or more, every kernel of ours is one. Attention is a GPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import eyas
from eyas.attention.triton import TritonAttention
from eyas.config import SamplingParams, SpeculationConfig
from eyas.engine import drafters, runner
from eyas.engine.cycle import cycle
from eyas.engine.drafters import Network
from eyas.kv.pool import KVPool
from eyas.layers.linear import Embedding
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from tests.helpers import Job, make_engine, run_all, tiny_drafter, tiny_target
from tests.kernels.running import DEVICE

UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "detach"}
"""Operators that compute nothing, besides views."""
PASSES = ((Decoder, "forward"), (Decoder, "logits"), (Embedding, "forward"))
DRAFT_PASSES = ((Eagle3, "forward"), (Eagle3, "fuse"), (Eagle3, "score"))
SHAPES = {
    "plain": SpeculationConfig(algorithm="NONE"),
    "chain of 3": SpeculationConfig.chain(3),
    "chain of 7": SpeculationConfig.chain(7),
    "tree 3-2-6": SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=6),
    "tree 5-4-16": SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
}
DECREED = " by decree"
"""Behind a shape's name where acceptance is told, not real."""
SHAPES |= {"chain of 3" + DECREED: SHAPES["chain of 3"]}
LAUNCHES = {"plain": 4, "chain of 3": 12, "chain of 7": 20, "tree 3-2-6": 18, "tree 5-4-16": 24}
LAUNCHES |= {name: LAUNCHES[name.removesuffix(DECREED)] + name.endswith(DECREED) for name in SHAPES}
"""Of a cycle outside its networks' passes, greedy or sampled."""


class Launches(TorchDispatchMode):
    """Counts what is launched while it is `on` and no network runs."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self._inside, self.seen = False, 0, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in UNWRITTEN:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """One launch."""
        if self.on and not self._inside:
            self.seen[name] += 1

    def hidden(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` as a pass of a network, of which nothing is counted."""

        def hiding(*given: Any, **more: Any) -> Any:
            self._inside += 1
            try:
                return run(*given, **more)
            finally:
                self._inside -= 1

        return hiding

    def of_cycle(self, *given: Any, **more: Any) -> torch.Tensor:
        """A cycle, counted anew."""
        self.seen.clear()
        self.on = True
        try:
            with self:
                return cycle(*given, **more)
        finally:
            self.on = False


def watch() -> Launches:
    """Counts from now on, for good: of a process that does nothing else."""
    launches = Launches()
    for owner, name in (*PASSES, *DRAFT_PASSES):
        setattr(owner, name, launches.hidden(getattr(owner, name)))
    launch = launches.hidden(interpreter.GridExecutor.__call__)

    def launched(self: Any, *given: Any, **more: Any) -> Any:
        launches.note(self.fn.__name__)
        return launch(self, *given, **more)

    def attention(pool: KVPool, **rest: Any) -> TritonAttention:
        return TritonAttention(pool, programs=4, workspace_bytes=2**22, **rest)

    changes: tuple[tuple[object, str, object], ...] = (
        (interpreter.GridExecutor, "__call__", launched),
        (runner, "cycle", launches.of_cycle),
        (runner, "paged_attention", attention),
        (drafters, "paged_attention", attention),
    )
    for changed, name, value in changes:
        setattr(changed, name, value)
    return launches


def count() -> dict[str, dict[str, int]]:
    """Kind of cycle -> operator or kernel -> launches."""
    launches, found = watch(), {}
    for name, shape in SHAPES.items():
        for kind, temperature in (("greedy", 0.0), ("sampled", 0.9)):
            drafter: Network | None = None if name == "plain" else tiny_drafter()
            told = 2.0 if name.endswith(DECREED) else 0.0
            target = tiny_target(num_layers=3)
            engine = make_engine(target, drafter, shape, simulate_accept_length=told)
            params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature)
            run_all(engine, [Job(prompt=(5, 6, 7, 8), params=params)])
            found[f"{name} {kind}"] = dict(launches.seen)
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is what counts")
def test_cycles_launch_no_more_than_they_did() -> None:
    """Fault: an operator of torch, or a launch more, between two passes of a network."""
    path = os.pathsep.join((str(Path(eyas.__file__).parents[1]), str(Path(__file__).parents[2])))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    assert {name.rsplit(" ", 1)[0] for name in found} == set(LAUNCHES)
    for name, seen in found.items():
        assert all(kernel.endswith("_kernel") for kernel in seen), f"{name}: {seen}"
        assert sum(seen.values()) == LAUNCHES[name.rsplit(" ", 1)[0]], f"{name}: {seen}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(count()))
