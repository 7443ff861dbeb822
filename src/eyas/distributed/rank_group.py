"""A group of processes: its collectives over gloo between CPUs, over NCCL between GPUs.

They run on the current stream and read nothing on the host, so that a cycle with them can be
captured in a CUDA graph. It knows neither layers nor how the processes were started.

What always holds: every rank gets the same bits, and a row's bits do not depend on the other rows.
Two ranks' sum is one addition, which commutes, so gloo's and NCCL's own reductions keep both. Of
more ranks they add in an order that follows an element's place in the buffer (a ring starts every
chunk at another rank). There the parts are gathered instead and added in rank order, in float32:
either on every rank (one step, many bytes) or each rank a share which is then gathered (two steps,
few bytes). Both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    Store,
)

from eyas.distributed.group import Group

ONE_STEP_BYTES = 1 << 20
"""Up to this size parts are added on every rank; above, each rank adds a share."""
TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank that lives but does not come; covers kernels compiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's place among the ranks."""

    rank: int
    size: int
    local_rank: int
    """Among the ranks of its machine: which GPU it takes."""
    store: Store
    """Where ranks find each other."""


class RankGroup(Group):
    """Ranks that are processes; creating it is a collective."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        """Connect with the other ranks; `device` is this rank's."""
        self.rank, self.size, self.device = seat.rank, seat.size, device
        self._backend = _backend(seat, device)
        self._aborted = False
        self.share(torch.zeros(1, device=device))  # connections are made at the first use

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `x`; bits as the module's docstring says."""
        x = x.contiguous()
        if self.size == 2:
            options = AllreduceOptions()
            options.asyncOp = False
            _finish(self._backend.allreduce([x], options))
            return x
        if x.numel() * x.element_size() <= ONE_STEP_BYTES or x.numel() % self.size:
            return ordered_sum(self._gather(x)).view(x.shape)
        shares = torch.empty_like(x)
        exchange = AllToAllOptions()
        exchange.asyncOp = False
        _finish(self._backend.alltoall_base(shares.view(-1), x.view(-1), [], [], exchange))
        return self._gather(ordered_sum(shares.view(self.size, -1))).view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x [..., n]` side by side: `[..., ranks * n]`."""
        parts = self._gather(x.contiguous()).view(self.size, *x.shape)
        return torch.cat(parts.unbind(0), dim=-1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank."""
        x = x.contiguous()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        _finish(self._backend.broadcast([x], options))
        return x

    def abort(self) -> None:
        """End collectives that wait for a lost rank; the group is of no use afterwards.

        gloo ends them by itself when a connection closes. NCCL frees waiting kernels at once, but
        returns only when no CUDA graph holds its collectives any more.
        """
        if self.device.type == "cuda" and not self._aborted:
            self._aborted = True
            self._backend.abort()

    def close(self) -> None:
        """End the group behind its last collective, and wait until its threads have ended.

        To be called before Python ends. A thread of gloo's drops its references to a collective's
        tensors some time after the collective has returned, and needs Python's lock to do so. A
        thread that asks for the lock when Python is ending is ended inside a destructor, and that
        aborts the process (PyTorch's issue 190489 and pull request 179291). A backend joins its
        threads, without the lock, when the last reference to it goes; this holds the only one.
        With NCCL, no graph may hold collectives any more, as for `abort`.
        """
        self.abort()
        self._backend = None

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' contiguous `x`, [ranks, numel]."""
        out = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        options = AllgatherOptions()
        options.asyncOp = False
        _finish(self._backend._allgather_base(out, x.view(-1), options))
        return out.view(self.size, -1)


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension of [ranks, M] in a fixed order, in float32, rounded once.

    Halves are added until one is left, so the order depends on the number of ranks alone.
    """
    wide = parts.float()
    while wide.shape[0] > 1:
        half = wide.shape[0] // 2
        summed = wide[:half] + wide[half : 2 * half]
        wide = torch.cat((summed, wide[2 * half :])) if wide.shape[0] % 2 else summed
    return wide[0].to(parts.dtype)


def _finish(work: Any) -> None:
    """Wait where the backend left something to wait for: gloo on the host, NCCL on its stream."""
    if work is not None:
        work.wait()


def _backend(seat: Seat, device: torch.device) -> Any:
    """A backend of its own, beside whatever default group the process may have."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(seat.store, seat.rank, seat.size, options)
    return dist.ProcessGroupGloo(seat.store, seat.rank, seat.size, TIMEOUT)
