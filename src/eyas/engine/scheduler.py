"""Continuous batching: who runs next, on which pages.

Requests join and leave between steps. A step prefills prompt chunks up to a budget of tokens, then
runs one cycle over every request whose prompt is done. Before a cycle the scheduler has reserved
pages for its longest outcome, so it never needs a result to plan: `plan` may be called again before
the step before is committed. What a step brings to a request that has left meanwhile is dropped.
When pages run out the youngest request gives its pages back and later starts again from its tokens.
Integers only: no tensors.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from eyas.batch import PageGrant, PassShape, PrefillChunk, SlotInit, StepPlan, StepResult
from eyas.config import EngineConfig, SpeculationConfig
from eyas.engine.request import FinishReason, Request, Status
from eyas.kv.pool import PageAllocator


class Scheduler:
    """Owns requests, slots and pages."""

    def __init__(
        self, config: EngineConfig, speculation: SpeculationConfig, allocator: PageAllocator
    ) -> None:
        self.config, self.speculation, self.allocator = config, speculation, allocator
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        """Requests that hold a slot, oldest first."""
        self._free_slots = list(range(config.max_running_requests - 1, -1, -1))
        self._tickets = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request at once and take its pages back."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self._release(request)
        request.status = Status.FINISHED
        request.finish_reason = FinishReason.ABORT

    def pages_for(self, length: int) -> int:
        """Pages that hold KV indices below `length` plus what a cycle may write behind."""
        return -(-(length + self.speculation.scratch) // self.config.page_size)

    def plan(self) -> StepPlan:
        """Choose the next step; reserves every page it may write."""
        grants: list[PageGrant] = []
        decoding = self._reserve_running(grants)
        inits = self._admit(grants)
        chunks = self._chunks()
        chunked = {c.ticket for c in chunks}
        prefilling = [r for r in self.active if r.ticket in chunked]
        for request in decoding:
            request.num_coming += self.speculation.depth + 1
        return StepPlan(
            inits=tuple(inits),
            grants=tuple(grants),
            chunks=tuple(chunks),
            prefill_shape=self._prefill_shape(chunks, prefilling),
            tickets=tuple(r.ticket for r in decoding),
            slots=tuple(r.slot for r in decoding),
            cycle_shape=self._cycle_shape(decoding),
        )

    def commit(self, result: StepResult) -> list[Request]:
        """Take in a step's tokens; returns the requests that got some, finished ones released."""
        known = {r.ticket: r for r in self.active}
        touched = []
        for ticket, token in result.first_tokens:
            if request := known.get(ticket):
                request.num_coming -= 1
                self._append(request, (token,))
                touched.append(request)
        for ticket, tokens in result.cycle_tokens:
            request = known.get(ticket)
            if request is not None and request.status is not Status.FINISHED:
                request.num_coming -= self.speculation.depth + 1
                request.accept_lengths.append(len(tokens))
                self._append(request, tokens)
                touched.append(request)
        return touched

    def check_integrity(self) -> None:
        """Assert that pages and slots are each owned once."""
        self.allocator.check_integrity(r.pages for r in self.active)
        slots = sorted([r.slot for r in self.active] + self._free_slots)
        assert slots == list(range(self.config.max_running_requests)), f"slots {slots} are off"
        assert all(not r.pages and r.slot < 0 for r in self.waiting), "a waiting request owns pages"

    def _append(self, request: Request, tokens: Iterable[int]) -> None:
        for token in tokens:
            request.append(token)
            if request.finish_reason is not None:
                request.status = Status.FINISHED
                self._release(request)
                return

    def _release(self, request: Request) -> None:
        self.allocator.free(request.pages)
        request.pages = []
        self._free_slots.append(request.slot)
        request.slot = request.ticket = -1
        request.num_prefilled = request.num_coming = 0
        self.active.remove(request)

    def _reserve_running(self, grants: list[PageGrant]) -> list[Request]:
        """Running requests with pages for their longest outcome; the youngest yield if need be."""
        for request in [r for r in self.active if r.status is Status.RUNNING]:
            if request.status is not Status.RUNNING:
                continue
            missing = self.pages_for(request.most_kv_len) - len(request.pages)
            while missing > self.allocator.num_free and self.active[-1] is not request:
                self._preempt(self.active[-1])
            if missing > self.allocator.num_free:
                self._preempt(request)
            elif missing > 0:
                self._grant(request, missing, grants)
        held = {r.slot for r in self.active}
        grants[:] = [g for g in grants if g.slot in held]
        return [r for r in self.active if r.status is Status.RUNNING]

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _grant(self, request: Request, count: int, grants: list[PageGrant]) -> None:
        pages = self.allocator.allocate(count)
        grants.append(PageGrant(slot=request.slot, first=len(request.pages), pages=tuple(pages)))
        request.pages.extend(pages)

    def _admit(self, grants: list[PageGrant]) -> list[SlotInit]:
        inits = []
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            needed = self.pages_for(request.length)
            if needed > self.allocator.num_free:
                break
            self.waiting.popleft()
            request.slot, request.ticket = self._free_slots.pop(), next(self._tickets)
            request.status = Status.PREFILL
            self.active.append(request)
            self._grant(request, needed, grants)
            params = request.params
            inits.append(
                SlotInit(
                    slot=request.slot,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=request.seed,
                )
            )
        return inits

    def _chunks(self) -> list[PrefillChunk]:
        """Chunks of prompts, oldest request first.

        The pass pads them to the longest, and has at most `chunked_prefill_size` rows with that.
        """
        chunks: list[PrefillChunk] = []
        longest = 0
        for request in [r for r in self.active if r.status is Status.PREFILL]:
            room = self.config.chunked_prefill_size // (len(chunks) + 1)
            if room < max(longest, 1):
                break
            start = request.num_prefilled
            end = min(request.length, start + room)
            longest = max(longest, end - start)
            request.num_prefilled = end
            behind = request.tokens(end, end + 1)
            if not behind:
                request.status, request.num_coming = Status.RUNNING, 1
            chunks.append(
                PrefillChunk(
                    ticket=request.ticket,
                    slot=request.slot,
                    start=start,
                    tokens=request.tokens(start, end),
                    next_token=behind[0] if behind else None,
                )
            )
        return chunks

    def _prefill_shape(
        self, chunks: list[PrefillChunk], requests: list[Request]
    ) -> PassShape | None:
        if not chunks:
            return None
        ending = [r for r, c in zip(requests, chunks, strict=True) if c.next_token is None]
        return PassShape(
            num_requests=len(chunks),
            num_new=max(len(c.tokens) for c in chunks),
            max_kv_len=max(c.start + len(c.tokens) for c in chunks),
            sampled=any(r.params.temperature > 0 for r in ending),
            filtered=any(r.params.filtered for r in ending),
        )

    def _cycle_shape(self, requests: list[Request]) -> PassShape | None:
        if not requests:
            return None
        return PassShape(
            num_requests=len(requests),
            num_new=self.speculation.num_nodes,
            max_kv_len=max(r.most_kv_len for r in requests) + self.speculation.scratch,
            sampled=any(r.params.temperature > 0 for r in requests),
            filtered=any(r.params.filtered for r in requests),
        )
