"""The runner of one rank: holds the models and pools, runs a plan, brings its tokens back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from eyas.attention import paged_attention
from eyas.batch import PassShape, StepPlan, StepResult
from eyas.config import EngineConfig, SpeculationConfig, require
from eyas.engine.cycle import Parts, cycle, prefill
from eyas.engine.drafters import Network, make_drafter
from eyas.engine.graphs import CycleGraphs, GraphKey, Reason
from eyas.engine.row_check import RowCheck, check_start
from eyas.engine.state import DeviceState, upload
from eyas.engine.watching import RankNotes
from eyas.kv.pool import KVPool
from eyas.model_config import AttentionShape
from eyas.models.decoder import Decoder
from eyas.spans import GraphClock, NoSpans, Spans
from eyas.speculate.drafter import Drafter
from eyas.speculate.simulate import rates_for


class Runner:
    """Runs step plans on one device."""

    def __init__(
        self,
        target: Decoder,
        drafter: Network | Drafter | None,
        config: EngineConfig,
        speculation: SpeculationConfig,
        num_pages: int,
        home: torch.device | None = None,
    ) -> None:
        """`config.context_length` is resolved; `drafter`: a network, a model or a `Drafter`.

        `home`: the device to build for, where the networks only stand in on another one.
        """
        weight = target.embed.weight
        self.device = weight.device
        require(
            config.deterministic != "on" or target.row_tile.call > 0 or self.device.type != "cuda",
            "deterministic on",
            "the target was built for products of any number of rows",
            "build it with row_tile(..., deterministic=True)",
        )
        self.spans: Spans = NoSpans()
        home = home or self.device
        make_pool = partial(_pool, num_pages=num_pages, config=config, weight=weight, home=home)
        pool = make_pool(target.config.attention_shape(target.group.size))
        width = config.context_length + speculation.scratch
        orders = config.deterministic != "off"
        state = DeviceState(
            num_slots=config.max_running_requests,
            pages_per_slot=-(-width // config.page_size),
            num_tokens=width,
            device=self.device,
        )
        self.parts = Parts(
            target=target,
            pool=pool,
            attention=paged_attention(
                pool, deterministic=orders, verify=speculation.attention_mode
            ),
            drafter=make_drafter(drafter, target, config, speculation, make_pool),
            state=state,
            decreed=_decreed(config, speculation, self.device),
        )
        self.graphs = CycleGraphs(self.parts, config, speculation)
        self.row_check = RowCheck(skipped="not warmed up")

    def warm_up(self, progress: bool = False) -> None:
        """Try whether rows are independent, and capture what can be, before the first request."""
        self.row_check = check_start(self.parts.target, self.graphs.config, self.graphs.speculation)
        self.graphs.capture_all(progress)

    def rehearse(self, graph: GraphKey, spans: Spans) -> None:
        """Run eagerly what a graph holds, on the dummy slot: no request changes."""
        self.graphs.rehearse(graph, spans)

    def watch(self) -> None:
        """Have the other ranks note what their steps take."""

    def unwatch(self, folder: str) -> list[RankNotes]:
        """What the other ranks noted; their traces are written to `folder`."""
        return []

    def digests(self) -> list[str]:
        """`DeviceState.digest` of every rank, in order; waits for the devices."""
        return [self.parts.state.digest()]

    def step(self) -> AbstractContextManager[None]:
        """Around a step and the commit of what it brought."""
        return nullcontext()

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Underway:
        """Start one step. On a GPU this does not wait: `Underway.collect` does."""
        self.spans.mark("host")
        self.parts.state.fill(plan)
        first = self._prefill(plan) if plan.prefill_shape else None
        cycled = self._cycle(plan, plan.cycle_shape) if plan.cycle_shape else None
        self.spans.mark("collect")
        return Underway(plan, first, cycled, self.spans, self.device)

    def _cycle(self, plan: StepPlan, shape: PassShape) -> torch.Tensor:
        """int64[>= B, depth + 2]: what `cycle` gives; the first B rows are the plan's."""
        staged = not isinstance(self.spans, NoSpans | GraphClock)
        key = Reason.STAGED if staged else self.graphs.decide(shape)
        self.graphs.counts[key] += 1
        if isinstance(key, Reason):
            return cycle(self.parts, upload(plan.slots, self.device), shape, self.spans)
        clock = self.spans if isinstance(self.spans, GraphClock) else None
        graph = self.graphs.twin(key, clock) if clock else self.graphs.get(key)
        padding = (self.parts.state.dummy_slot,) * (key.num_requests - len(plan.slots))
        if graph.held != [*plan.slots]:
            graph.slots.copy_(upload(plan.slots + padding, self.device), non_blocking=True)
            graph.held[:] = plan.slots
        graph.graph.replay()
        return graph.out

    def _prefill(self, plan: StepPlan) -> torch.Tensor:
        """int64[B]: the token behind each chunk."""
        shape = plan.prefill_shape
        assert shape is not None, "a plan with chunks has their shape"
        self.spans.mark("prefill")
        width = shape.num_new
        rows = [c.tokens + (0,) * (width - len(c.tokens)) for c in plan.chunks]
        ends = [-1 if c.next_token is None else c.next_token for c in plan.chunks]
        heads = [(c.slot, len(c.tokens), end) for c, end in zip(plan.chunks, ends, strict=True)]
        head, chunk = upload(heads, self.device), upload(rows, self.device)
        return prefill(self.parts, head[:, 0], chunk, head[:, 2], head[:, 1], shape)


class Underway:
    """A step that was started; its tokens are on their way to the host."""

    def __init__(
        self,
        plan: StepPlan,
        first: torch.Tensor | None,
        cycled: torch.Tensor | None,
        spans: Spans,
        device: torch.device,
    ) -> None:
        """`first` int64[chunks] and `cycled` int64[B, depth + 2] may be overwritten later."""
        self._plan, self._spans = plan, spans
        self._first, self._cycled = first, cycled
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._first, self._cycled = _to_host(first), _to_host(cycled)
            self._done = torch.cuda.Event()
            self._done.record()

    def collect(self) -> StepResult:
        """Wait for the step's tokens."""
        if self._done is not None:
            self._done.synchronize()
        drawn = [] if self._first is None else self._first.tolist()
        rows = [] if self._cycled is None else self._cycled.tolist()
        self._spans.mark(None)
        chunks = self._plan.chunks
        return StepResult(
            first_tokens=tuple(
                (chunk.ticket, token)
                for chunk, token in zip(chunks, drawn, strict=True)
                if chunk.next_token is None
            ),
            cycle_tokens=tuple(
                (ticket, tuple(row[1 : row[0] + 1]))
                for ticket, row in zip(self._plan.tickets, rows, strict=False)
            ),
        )


def _to_host(x: torch.Tensor | None) -> torch.Tensor | None:
    """A pinned copy of a CUDA tensor, complete once the stream has come this far."""
    if x is None:
        return None
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _decreed(
    config: EngineConfig, speculation: SpeculationConfig, device: torch.device
) -> torch.Tensor | None:
    """Acceptance rates float32[depth] by decree, if any were."""
    depth, length = speculation.depth, config.simulate_accept_length
    if not depth or not (length or config.simulate_acceptance):
        return None
    require(
        length == 0 or 1 <= length <= depth + 1,
        f"simulate_accept_length={length}",
        f"a cycle commits 1 .. {depth + 1} tokens",
        "give a length in this range",
    )
    rates = config.simulate_acceptance or rates_for(length, depth)
    require(
        len(rates) == depth,
        f"{len(rates)} rates of simulated acceptance",
        f"drafts are {depth} deep",
        "give a rate for each position",
    )
    return torch.tensor(rates, device=device)


def _pool(
    shape: AttentionShape,
    num_pages: int,
    config: EngineConfig,
    weight: torch.Tensor,
    home: torch.device,
) -> KVPool:
    """A pool beside `weight`; on a CPU in float32, so that attention need not convert."""
    return KVPool(
        shape,
        num_pages=num_pages,
        page_size=config.page_size,
        dtype=torch.float32 if home.type == "cpu" else weight.dtype,
        device=weight.device,
    )


def auto_pages(config: EngineConfig, speculation: SpeculationConfig) -> int:
    """Pages that let every slot reach the context length, and the dummy page."""
    each = -(-(config.context_length + speculation.scratch) // config.page_size)
    return config.max_running_requests * each + 1
