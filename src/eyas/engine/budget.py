"""How much memory an engine takes, said from configs before anything is loaded.

Weights, pools and state are those of the engine's own runner, built without memory; the working
memory of its passes is rehearsed (`rehearsal.py`). Whether it fits is not known here
(`admission.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from eyas.batch import PassShape
from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.drafters import drafts_rounded
from eyas.engine.rehearsal import PURPOSES, Shares, hollow, rehearse, tensors_of
from eyas.engine.runner import Runner, auto_pages
from eyas.kernels.attention_plan import Workspace
from eyas.kv.pool import KVPool
from eyas.layers.linear import Linear, row_tile, scale_type
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3

LIBRARY_BYTES = 2**25
"""Workspace of cuBLAS for a stream, as torch gives it on Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What would be loaded, and how it would run."""

    target: ModelConfig
    drafter: DrafterConfig | ModelConfig | None
    config: EngineConfig
    """With its context length resolved; 0 pages: as many as every request may need."""
    speculation: SpeculationConfig
    device: torch.device
    dtype: torch.dtype
    engines: int = 1
    """Engines over the same weights, each with pools, state and graphs of its own."""

    def change(self, **values: Any) -> Case:
        """The same with other values in its `EngineConfig`."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **values))

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.tp

    @property
    def num_pages(self) -> int:
        """Pages asked for."""
        return self.config.num_pages or auto_pages(self.config, self.speculation)

    @property
    def least_pages(self) -> int:
        """Pages with which one request of full length can run."""
        return auto_pages(self.change(max_running_requests=1).config, self.speculation)

    @property
    def has_graphs(self) -> bool:
        """Whether cycles are captured."""
        return self.device.type == "cuda" and not self.config.disable_cuda_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Passes to be held: candidates for the largest prefill and the largest cycle."""

    prefills: tuple[PassShape, ...]
    cycles: tuple[PassShape, ...]

    @classmethod
    def largest(cls, case: Case) -> Load:
        """What the scheduler may plan: one long chunk, or as many short ones as requests run."""
        config, spec = case.config, case.speculation
        most, chunk = config.max_running_requests, config.chunked_prefill_size
        shape = PassShape(
            num_requests=most,
            num_new=spec.num_nodes,
            max_kv_len=config.context_length + spec.scratch,
            sampled=True,
            filtered=True,
        )
        prefills = [
            dataclasses.replace(
                shape, num_requests=n, num_new=chunk // n, max_kv_len=config.context_length
            )
            for n in sorted({1, min(most, chunk)})
        ]
        return cls(prefills=tuple(prefills), cycles=(shape,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes on one rank, by what they are for."""

    weights: int
    """Of the target, dequantised; tied ones once."""
    tables: int
    """Rotary tables and other buffers of the target."""
    drafter: int
    """Weights and tables of the drafter; a borrowed embedding is the target's."""
    drafter_8bit: int
    """The copy that drafts with 8-bit weights."""
    num_pages: int
    kv: int
    """The target's keys and values in one engine."""
    drafter_kv: int
    state: int
    """Slots' rows of one engine and its drafter."""
    workspace: int = 0
    """What kernels and the matrix library of one engine keep on a GPU."""
    prefill: Counter[str] = field(default_factory=Counter)
    """Working memory of the largest prefill by purpose."""
    cycle: Counter[str] = field(default_factory=Counter)
    has_graphs: bool = False
    """Whether cycles are captured: their working memory is then kept beside the prefill's."""
    engines: int = 1

    @property
    def pages(self) -> int:
        """Keys and values of one engine."""
        return self.kv + self.drafter_kv

    @property
    def resting(self) -> int:
        """What is held between passes; graphs are not counted."""
        networks = self.weights + self.tables + self.drafter + self.drafter_8bit
        return networks + self.engines * (self.pages + self.state + self.workspace)

    @property
    def peak(self) -> int:
        """Most bytes in tensors at once."""
        return self.resting + max(self.prefill.total(), self.cycle.total())

    @property
    def total(self) -> int:
        """What must be free before loading: the peak, with the memory that graphs keep."""
        if not self.has_graphs:
            return self.peak
        return self.resting + self.prefill.total() + self.engines * self.cycle.total()

    def touched(self, num_pages: int) -> int:
        """`peak` when one engine has written to `num_pages` pages, the dummy page included.

        On a CPU a pool takes memory where it is written.
        """
        written = self.pages * num_pages // self.num_pages
        return self.peak - self.engines * self.pages + written

    def with_pages(self, num_pages: int) -> Budget:
        """The same with another number of pages."""
        kv, drafter_kv = (size // self.num_pages for size in (self.kv, self.drafter_kv))
        return dataclasses.replace(
            self, num_pages=num_pages, kv=kv * num_pages, drafter_kv=drafter_kv * num_pages
        )

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """(name, bytes, remark) of every part; empty ones too. They add up to `total`."""
        each = f" in {self.engines} engines" * (self.engines > 1)
        yield "weights", self.weights, ""
        yield "tables", self.tables, "rotary embedding"
        yield "drafter", self.drafter, ""
        yield "drafter in 8 bits", self.drafter_8bit, "for draft passes"
        yield "keys and values", self.kv * self.engines, f"{self.num_pages} pages{each}"
        yield "drafter's keys and values", self.drafter_kv * self.engines, "as many pages"
        yield "state", self.state * self.engines, f"rows of requests{each}"
        yield "workspace", self.workspace * self.engines, "of attention and of graphs"
        for name, parts, times in self._passes():
            for purpose in PURPOSES:
                yield f"{name}: {purpose}", parts[purpose] * times, "at its largest"

    def _passes(self) -> list[tuple[str, Counter[str], int]]:
        """What is held in passes: with graphs both kinds, else the larger."""
        passes = [("prefill", self.prefill, 1), ("cycle", self.cycle, self.engines)]
        if self.has_graphs:
            return passes
        name, parts, _ = max(passes, key=lambda one: one[1].total())
        return [(name, parts, 1)]


def predict(case: Case, load: Load | None = None) -> Budget:
    """The budget of `case`; of the largest passes unless a `load` is given.

    Raises `ConfigError` where target, drafter and settings do not go together.
    """
    runner, load = hollow_runner(case), load or Load.largest(case)
    budget = at_rest(case, runner)
    prefill, cycle = rehearse(runner.parts, load.prefills, load.cycles, case.device)
    return dataclasses.replace(budget, prefill=prefill, cycle=cycle)


def hollow_runner(case: Case) -> Runner:
    """The runner of one rank of `case`, without memory and without the drafter's 8-bit copy."""
    tile, group = row_tile(case.device, case.dtype), Shares(case.num_ranks)
    fixed = row_tile(case.device, case.dtype, case.config.deterministic == "on")
    target = hollow(partial(Decoder, row_tile=fixed, group=group), case.target, case.dtype)
    wanted = case.drafter
    drafter: Eagle3 | Decoder | None = None
    if isinstance(wanted, DrafterConfig):
        drafter = hollow(partial(Eagle3, row_tile=tile), wanted, case.dtype)
    elif wanted is not None:
        drafter = hollow(partial(Decoder, row_tile=tile), wanted, case.dtype)
    plain = dataclasses.replace(case.config, draft_weights="full")
    return Runner(target, drafter, plain, case.speculation, case.num_pages, home=case.device)


def at_rest(case: Case, runner: Runner) -> Budget:
    """The budget without working memory, of a runner made by `hollow_runner`."""
    parts, sizes = runner.parts, Counter[str]()
    seen: set[int] = set()
    for owner, tensor in tensors_of(parts):
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        if owner is parts.target:
            name = "weights" if isinstance(tensor, nn.Parameter) else "tables"
        elif owner is parts.pool:
            name = "kv"
        elif isinstance(owner, KVPool):
            name = "drafter_kv"
        else:
            name = "drafter" if isinstance(owner, nn.Module) else "state"
        sizes[name] += storage.nbytes()
    network = getattr(parts.drafter, "network", None)
    rounded = 0
    if isinstance(network, Eagle3) and drafts_rounded(
        case.config, network.config, case.device, case.dtype
    ):
        rounded = _rounded_bytes(network, scale_type(case.device, case.dtype).itemsize)
    return Budget(
        weights=sizes["weights"],
        tables=sizes["tables"],
        drafter=sizes["drafter"],
        drafter_8bit=rounded,
        kv=sizes["kv"],
        drafter_kv=sizes["drafter_kv"],
        state=sizes["state"],
        workspace=_workspace(case, runner),
        num_pages=case.num_pages,
        has_graphs=case.has_graphs,
        engines=case.engines,
    )


def _workspace(case: Case, runner: Runner) -> int:
    """Of every attention backend, and of the matrix library for the stream of captures."""
    if case.device.type != "cuda":
        return 0
    owners = (owner for owner, _ in tensors_of(runner.parts))
    pools = {id(owner): owner for owner in owners if isinstance(owner, KVPool)}.values()
    spaces = (Workspace.of(p.shape, p.k.dtype, torch.device("meta")) for p in pools)
    return sum(space.num_bytes for space in spaces) + LIBRARY_BYTES * case.has_graphs


def _rounded_bytes(network: nn.Module, scale: int) -> int:
    """Of `Eagle3.rounded`: linear layers in 8 bits with `scale` bytes a row, all else copied.

    Making it would be a second's work on the meta device.
    """
    total = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    for module in network.modules():
        if isinstance(module, Linear):
            rows, columns = module.weight.shape
            total += rows * (columns + scale) - module.weight.nbytes
    return total
