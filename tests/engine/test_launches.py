"""What a cycle launches on a GPU: counted through Triton's interpreter, so that it can't creep up.

A network's passes stand for themselves; what is counted lies between them. Every operator of torch
that computes is a launch or more, every kernel of ours is one. Attention is a GPU's.
"""

from __future__ import annotations

import json
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

from eyas.attention.triton import TritonAttention
from eyas.config import SamplingParams, SpeculationConfig
from eyas.cost import cycle_ops, plain_step
from eyas.engine import drafters, runner
from eyas.engine.cycle import cycle
from eyas.engine.drafters import Network
from eyas.kernels import lang
from eyas.kv.pool import KVPool
from eyas.layers.linear import Embedding
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.operations import METADATA, SAMPLING
from eyas.setting import Setting
from tests.helpers import Job, make_engine, run_all, tiny_drafter, tiny_model, tiny_target
from tests.kernels.running import DEVICE
from tests.processes import environment

UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "detach"}
"""Operators that compute nothing, besides views."""
PASSES = ((Decoder, "forward"), (Decoder, "logits"), (Embedding, "forward"))
DRAFT_PASSES = tuple(
    (Eagle3, name) for name in ("forward", "fuse", "score", "_attended", "_mlp", "_finish")
)
SHAPES = {
    "plain": SpeculationConfig(algorithm="NONE"),
    "n-gram": SpeculationConfig.chain(3, "NGRAM"),
    "small model": SpeculationConfig.chain(3, "STANDALONE"),
    "small model's tree": SpeculationConfig(
        algorithm="STANDALONE", num_steps=3, eagle_topk=2, num_draft_tokens=6
    ),
    "chain of 3": SpeculationConfig.chain(3),
    "chain of 7": SpeculationConfig.chain(7),
    "tree 3-2-6": SpeculationConfig(num_steps=3, eagle_topk=2, num_draft_tokens=6),
    "tree 5-4-16": SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
}
RESULTS = {"_attention_kernel": 7, "attention_merge_kernel": 0}
"""Kernels that are counted and not run, which would take most of the time: what they write."""
DECREED = " by decree"
"""Behind a shape's name where acceptance is told, not real."""
SHAPES |= {"chain of 3" + DECREED: SHAPES["chain of 3"]}
LAUNCHES = {
    "plain": 4,
    "n-gram": 6,
    "small model": 21,
    "small model's tree": 26,
    "chain of 3": 12,
    "chain of 7": 20,
    "tree 3-2-6": 18,
    "tree 5-4-16": 24,
}
LAUNCHES |= {name: LAUNCHES[name.removesuffix(DECREED)] + name.endswith(DECREED) for name in SHAPES}
"""Of a cycle outside its networks' passes, greedy or sampled."""
THEIRS = {"small model", "small model's tree"}
"""Cycles that run operators of torch there."""


def network_of(shape: SpeculationConfig) -> Network | None:
    """A drafter for `tiny_target`."""
    if shape.algorithm == "EAGLE3":
        return tiny_drafter()
    return tiny_model() if shape.algorithm == "STANDALONE" else None


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
        """`run` as a pass of a network, of which nothing is counted: its layers need no kernels."""

        def hiding(*given: Any, **more: Any) -> Any:
            self._inside += 1
            lang.INTERPRETED = False
            try:
                return run(*given, **more)
            finally:
                self._inside -= 1
                lang.INTERPRETED = not self._inside

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
        name = self.fn.__name__
        launches.note(name)
        if name in RESULTS:
            return given[RESULTS[name]].zero_()
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
            told = 2.0 if name.endswith(DECREED) else 0.0
            target, network = tiny_target(num_layers=3), network_of(shape)
            engine = make_engine(target, network, shape, simulate_accept_length=told)
            params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature)
            run_all(engine, [Job(prompt=(5, 6, 7, 8), params=params)])
            found[f"{name} {kind}"] = dict(launches.seen)
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is what counts")
def test_cycles_launch_no_more_than_they_did() -> None:
    """Fault: an operator of torch, or a launch more, between two passes of a network."""
    command = [sys.executable, str(Path(__file__))]
    interpreted = environment(TRITON_INTERPRET="1")
    done = subprocess.run(command, env=interpreted, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    assert {name.rsplit(" ", 1)[0] for name in found} == set(LAUNCHES)
    for name, seen in found.items():
        kind = name.rsplit(" ", 1)[0]
        ours = all(launch.endswith("_kernel") for launch in seen)
        assert ours == (kind not in THEIRS), f"{name}: {seen}"
        assert sum(seen.values()) == LAUNCHES[kind], f"{name}: {seen}"


@pytest.mark.parametrize("name", [name for name in LAUNCHES if not name.endswith(DECREED)])
def test_plans_count_the_same(name: str) -> None:
    """Fault: predictions of cycles that launch other things than cycles do."""
    shape, target = SHAPES[name], tiny_target(num_layers=3).config
    ops = plain_step(target, Setting())
    if name != "plain":
        network = network_of(shape)
        parts = cycle_ops(target, None if network is None else network.config, shape, Setting())
        ops = [*parts.draft, *parts.verify, *parts.extend]
    launches = sum(op.launches * op.times for op in ops if op.component in (SAMPLING, METADATA))
    assert launches == LAUNCHES[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(count()))
