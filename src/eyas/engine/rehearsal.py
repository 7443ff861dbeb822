"""Networks without memory, and passes rehearsed on them: how many bytes a pass holds at once.

The engine's own networks, pools and state are built on torch's meta device, and its own passes run
there under a mode that counts the storages alive. So a new kind of layer needs no formula here.
Stand-ins take the place of what runs on real devices only: attention kernels of a GPU, and experts.

Making networks and pools is cheap. The first rehearsal in a process takes a second, in which torch
imports what its meta device needs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.attention import Attend, PagedAttention
from eyas.attention.rope import Rope, rotate
from eyas.batch import ForwardBatch, PassShape
from eyas.distributed.group import Group
from eyas.engine.cycle import Parts, cycle, prefill
from eyas.errors import CheckpointError
from eyas.kernels.experts import ROW_TILE
from eyas.kernels.router import Chosen
from eyas.kv.pool import KVPool
from eyas.layers.moe import Experts
from eyas.layers.rotary import Rotary
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.registry import allocate
from eyas.spans import NoSpans

META = torch.device("meta")
PURPOSES = ATTENTION, LOGITS, ACTIVATIONS = "attention", "logits and sampling", "activations"

Config = TypeVar("Config", ModelConfig, DrafterConfig)
Module = TypeVar("Module", bound=nn.Module)


class _Hollow(TorchFunctionMode):
    """Parameters go to the meta device; what a constructor computes stays where it is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), **({"device": META} if func is torch.empty else {})}
        return func(*args, **kwargs)


def hollow(make: Callable[[Config], Module], config: Config, dtype: torch.dtype) -> Module:
    """The network that `make` builds of `config`, with parameters of `dtype`, without memory.

    Rotary tables are computed for one position and take their size afterwards. Raises
    `CheckpointError` for dimensions of which torch makes no tensors.
    """
    try:
        with _Hollow():
            module = make(dataclasses.replace(config, max_position=1))
        allocate(module, dtype, META)
    except (RuntimeError, OverflowError, TypeError) as e:
        raise CheckpointError(
            "config.json",
            f"no network has its dimensions ({str(e).splitlines()[0]})",
            "mend config.json",
        ) from e
    for part in module.modules():
        if isinstance(part, Rotary):
            rows, width = part.table.shape
            part.table = torch.empty(rows - 1 + config.max_position, width, device=META)
    module.__dict__["config"] = config
    return module.eval()


class Shares(Group):
    """A group that nobody talks in: a network built for it is one rank's share."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As many of `x` as there are ranks."""
        return x if self.size == 1 else torch.cat([x] * self.size, dim=-1)


class Ledger(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live, by what they are for."""

    def __init__(self, held: list[torch.Tensor], vocabularies: set[int]) -> None:
        """`held` tensors do not count; a last dimension in `vocabularies` tells logits."""
        super().__init__()
        self.purpose: str | None = None
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._vocabularies = vocabularies
        self._known: dict[int, Any] = {}
        for tensor in held:
            self._known[tensor.untyped_storage()._cdata] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(value, torch.Tensor):
                self._enter(value)
        return made

    def _enter(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabularies
        purpose = self.purpose or (LOGITS if is_logits else ACTIVATIONS)
        self._known[key] = weakref.ref(storage, partial(self._leave, key, size, purpose))
        self.live[purpose] += size
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def _leave(self, key: int, size: int, purpose: str, _: Any) -> None:
        del self._known[key]
        self.live[purpose] -= size


def rehearse(
    parts: Parts, prefills: Sequence[PassShape], cycles: Sequence[PassShape], home: torch.device
) -> tuple[Counter[str], Counter[str]]:
    """Most bytes at once, by purpose, of the largest prefill and of the largest cycle.

    `parts` were made on the meta device for `home` and are used up: of blocks that are alike two
    are left: the second runs while what the first gave is held, and so would every further one.
    """
    held = [tensor for _, tensor in tensors_of(parts)]
    target, vocabularies = parts.target, {parts.target.config.vocab_size}
    for owner, tensor in tensors_of(parts.drafter):
        if isinstance(owner, Decoder):
            vocabularies.add(owner.config.vocab_size)
        elif tensor is getattr(owner, "target_ids", None):
            vocabularies.add(tensor.shape[0])
    vocabularies |= {size // target.group.size for size in vocabularies}
    ledger = Ledger(held, vocabularies)
    parts = _stand_in(parts, ledger, home)
    peaks: list[Counter[str]] = []
    with torch.inference_mode(), ledger:
        for shapes, run in ((prefills, _prefill), (cycles, _cycle)):
            largest: Counter[str] = Counter()
            for shape in shapes:
                ledger.peak = ledger.live.copy()
                run(parts, shape)
                largest = max(largest, ledger.peak, key=Counter.total)
            peaks.append(largest)
    return peaks[0], peaks[1]


def tensors_of(thing: Any, owner: Any = None) -> Iterator[tuple[Any, torch.Tensor]]:
    """Tensors that an object of this package holds, each with the module or pool it belongs to."""
    if isinstance(thing, torch.Tensor):
        yield owner, thing
    elif isinstance(thing, nn.Module):
        yield from ((thing, tensor) for tensor in (*thing.parameters(), *thing.buffers()))
    elif isinstance(thing, (list, tuple, dict)):
        for value in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_of(value, owner)
    elif type(thing).__module__.startswith("eyas.") and not callable(thing):
        if dataclasses.is_dataclass(thing):
            values = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
        else:
            values = list(getattr(thing, "__dict__", {}).values())
        for value in values:
            yield from tensors_of(value, thing if isinstance(thing, KVPool) else owner)


def _prefill(parts: Parts, shape: PassShape) -> None:
    one, many = (shape.num_requests,), (shape.num_requests, shape.num_new)
    slots, chunk, behind, counts = (_ids(size) for size in (one, many, one, one))
    prefill(parts, slots, chunk, behind, counts, shape)


def _cycle(parts: Parts, shape: PassShape) -> None:
    cycle(parts, _ids((shape.num_requests,)), shape, NoSpans())


def _ids(size: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device=META)


def _stand_in(parts: Parts, ledger: Ledger, home: torch.device) -> Parts:
    """`parts` with watched attention, two blocks of each kind, and experts that only allocate."""
    drafter: Any = parts.drafter
    for model in (parts.target, getattr(drafter, "model", None)):
        if isinstance(model, Decoder):
            model.blocks = nn.ModuleList(_few(model.blocks))
            for module in model.modules():
                if isinstance(module, Experts):
                    module.__dict__["forward"] = partial(_experts, module)
    watched = _Watched(parts.attention, parts.pool, ledger, home)
    if hasattr(drafter, "attention"):
        drafter.attention = _Watched(drafter.attention, drafter.pool, ledger, home)
    return dataclasses.replace(parts, attention=watched)


def _few(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The first two of each kind."""
    seen: Counter[Any] = Counter()
    for block in blocks:
        seen[_kind(block)] += 1
        if seen[_kind(block)] <= 2:
            yield block


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, parameter.shape) for name, parameter in block.named_parameters())


def _experts(module: Experts, x: torch.Tensor, chosen: Chosen, *rest: Any) -> torch.Tensor:
    """What `kernels.experts` allocates on a CPU for the pairs of rows and experts, in their tiles.

    On a GPU it is nearly the same without the tiles.
    """
    pairs, (num_experts, hidden, size) = chosen.ids.numel(), module.down.shape
    rows = pairs + (ROW_TILE - 1) * min(num_experts, pairs)
    widths = (hidden, 2 * size, hidden, size)
    alive = [x.new_empty(rows, width) for width in widths]
    alive.append(x.new_empty(pairs, hidden))
    del alive
    return torch.empty_like(x)


@dataclass(slots=True)
class _Watched:
    """Attention whose allocations are booked as such; for a GPU a stand-in of its kernels."""

    attention: PagedAttention
    pool: KVPool
    ledger: Ledger
    home: torch.device
    needs_bound: bool = False

    def begin(self, batch: ForwardBatch) -> Attend:
        """Prepare a pass."""
        if self.home.type == "cuda":
            return self._kernels
        attend = self._booked(self.attention.begin, batch)
        return partial(self._booked, attend)

    def _booked(self, run: Callable[..., Any], *values: Any) -> Any:
        self.ledger.purpose = ATTENTION
        made = run(*values)
        self.ledger.purpose = None
        return made

    def _kernels(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Rotated queries and keys, and the result; pages are read where they lie."""
        q, k = rotate(q, rope), rotate(k, rope)
        return v.new_empty(q.shape[0], q.shape[1] * self.pool.shape.value_dim)
