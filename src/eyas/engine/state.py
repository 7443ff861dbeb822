"""`DeviceState`: every request's tensors, one row a slot, on the device.

Rows change in two ways only: `fill` writes what the scheduler planned before a step, and the
passes of the step write what they commit. Nothing here is read on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from eyas.batch import StepPlan
from eyas.kernels.accept import Slots
from eyas.kernels.rows import take_rows
from eyas.sampling import SamplingRows


def upload(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Host numbers as a tensor on `device`; on a GPU through pinned memory, without waiting."""
    made = torch.tensor(values, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


class DeviceState:
    """Slot rows; the last row is the dummy slot of padded batches."""

    def __init__(
        self, *, num_slots: int, pages_per_slot: int, num_tokens: int, device: torch.device
    ) -> None:
        """`num_tokens` bounds a sequence with everything a cycle may write behind it."""
        rows = num_slots + 1
        self.device = device
        self.dummy_slot = num_slots
        self.kv_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.roots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.history = torch.zeros(rows, num_tokens, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, pages_per_slot, dtype=torch.int64, device=device)
        self.sampling = SamplingRows(
            temperature=torch.zeros(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.int64, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.zeros(rows, device=device),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def fill(self, plan: StepPlan) -> None:
        """Write a plan's slot setups and page grants."""
        if plan.inits:
            self._set_up(plan)
        if plan.grants:
            rows = [g.slot for g in plan.grants for _ in g.pages]
            columns = [g.first + i for g in plan.grants for i in range(len(g.pages))]
            pages = [page for g in plan.grants for page in g.pages]
            where = upload([rows, columns, pages], self.device)
            self.page_table[where[0], where[1]] = where[2]

    def _set_up(self, plan: StepPlan) -> None:
        integers = upload([(i.slot, i.top_k, i.seed) for i in plan.inits], self.device)
        reals = upload([(i.temperature, i.top_p, i.min_p) for i in plan.inits], self.device)
        slots = integers[:, 0]
        self.page_table[slots] = 0
        self.kv_lens[slots] = 0
        self.sampling.top_k[slots] = integers[:, 1]
        self.sampling.seed[slots] = integers[:, 2]
        self.sampling.temperature[slots] = reals[:, 0]
        self.sampling.top_p[slots] = reals[:, 1]
        self.sampling.min_p[slots] = reals[:, 2]

    def digest(self) -> str:
        """Short hash of what every slot has committed; waits for the device.

        Tokens behind a slot's root mean nothing and count for nothing.
        """
        places = torch.arange(self.history.shape[1], device=self.device)
        known = self.history * (places <= self.kv_lens[:, None])
        rows = torch.cat((self.kv_lens[:, None], self.roots[:, None], known), dim=1)
        values = rows[: self.dummy_slot].cpu().numpy()
        return hashlib.sha256(values.tobytes()).hexdigest()[:16]

    def rest_dummy(self) -> None:
        """Bring the dummy slot back to an empty sequence: padded cycles move it forward."""
        self.kv_lens[self.dummy_slot :].zero_()

    def fetch(
        self, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingRows]:
        """Roots, KV lengths, page table and sampling parameters of `slots` int64[B]; copies."""
        own, given = (self.roots, self.kv_lens, self.page_table), self.sampling
        filters = (given.top_k, given.top_p, given.min_p)
        roots, kv_lens, table, temperature, seed, top_k, top_p, min_p = take_rows(
            slots, *own, given.temperature, given.seed, *filters
        )
        rows = SamplingRows(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        return roots, kv_lens, table, rows

    def to_settle(self, slots: torch.Tensor, kv_lens: torch.Tensor) -> Slots:
        """What a cycle's acceptance reads and writes of `slots` int64[B]."""
        return Slots(slots, kv_lens, self.kv_lens, self.roots, self.history)

    def write_history(self, slots: torch.Tensor, start: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store tokens int64[B, M] at sequence indices `start + 0..M-1` of `slots`."""
        index = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        index = index.clamp(max=self.history.shape[1] - 1)
        self.history[slots[:, None], index] = tokens
