"""Whether an engine fits into the memory there is, and what would fit if it does not.

The only answer to a want of memory is a smaller setting, chosen here for the number of pages where
that is automatic, else by the user. Sizes come from `budget.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import nn

from eyas.config import EngineConfig
from eyas.engine.budget import Budget, Case, at_rest, hollow_runner, predict
from eyas.engine.memory import free_memory
from eyas.engine.rehearsal import tensors_of
from eyas.engine.runner import Runner
from eyas.errors import CapacityError, ConfigError

GIB = 2**30
HEADROOM = 0.95
"""Share of the free memory that is planned with where no limit is given."""
LEAST = {"context_length": 256, "max_running_requests": 1, "chunked_prefill_size": 32}
MOST_RANKS = 64
"""What is halved or doubled in search of a remedy, and how far."""


def admit(case: Case) -> EngineConfig:
    """`case.config` with its number of pages; raises `CapacityError` if the engine can't fit.

    Automatic pages are as many as every request may need or, if these do not fit, as many as do: at
    least those of one request of full length. Where everything fits with much to spare, passes are
    not rehearsed.
    """
    room = available(case)
    resolved = dataclasses.replace(case.config, num_pages=case.num_pages)
    if room is None:
        return resolved
    runner = hollow_runner(case)
    if at_rest(case, runner).total + case.engines * rough_working(case, runner) <= room:
        return resolved
    budget = predict(case)
    if budget.total <= room:
        return resolved
    fitting = pages_that_fit(budget, room)
    if case.config.num_pages == 0 and fitting >= case.least_pages:
        return dataclasses.replace(case.config, num_pages=fitting)
    least = budget if case.config.num_pages else budget.with_pages(case.least_pages)
    raise CapacityError(
        f"{in_gib(least.total)} of memory ({_largest(least)})",
        f"{case.device.type} has {in_gib(room)} to give",
        _remedy(case, fitting),
    )


def available(case: Case) -> int | None:
    """Bytes that one rank may take; None where the system does not say."""
    limit, free = round(case.config.memory_limit * GIB), free_memory(case.device)
    on_gpu = case.device.type == "cuda"
    if limit:
        return min(limit, free) if on_gpu and free is not None else limit
    if free is None:
        return None
    return int(free * HEADROOM) // (1 if on_gpu else case.num_ranks)


def pages_that_fit(budget: Budget, room: int) -> int:
    """The most pages with which `budget` stays within `room` bytes; may be negative."""
    each = budget.pages // budget.num_pages * budget.engines
    return (room - budget.with_pages(0).total) // max(each, 1)


def rough_working(case: Case, runner: Runner) -> int:
    """A number of bytes that no pass of `case` exceeds; far too many.

    What a row of activations holds are inputs and outputs of matrices. Attention is taken for the
    reference backend's, and drawing makes some copies of the logits.
    """
    config, spec, target = case.config, case.speculation, case.target
    rows = max(config.chunked_prefill_size, config.max_running_requests * spec.scratch) + 64
    length = config.context_length + spec.scratch + 512
    top_k, vocabulary = target.moe.top_k if target.moe else 1, target.vocab_size // case.num_ranks
    widest = max(
        sum(tensor.shape[-2:]) * (top_k if tensor.dim() == 3 else 1)
        for owner, tensor in tensors_of(runner.parts)
        if isinstance(tensor, nn.Parameter)
        and tensor.dim() > 1
        and tensor.shape[0] not in (target.vocab_size, vocabulary)
    )
    heads = target.num_heads // case.num_ranks * (3 if spec.eagle_topk > 1 else 1)
    each = target.attention_shape(case.num_ranks).values_per_position
    attention = 4 * length * (rows * (heads + 24) + 2 * config.max_running_requests * each)
    logits = config.max_running_requests * spec.num_nodes * target.vocab_size * 128
    return rows * widest * 96 + attention + logits


def in_gib(size: int) -> str:
    """`size` bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _largest(budget: Budget) -> str:
    """The three largest parts in words."""
    rows = sorted(budget.rows(), key=lambda row: -row[1])[:3]
    return ", ".join(f"{name} {in_gib(size)}" for name, size, _ in rows)


def _remedy(case: Case, fitting: int) -> str:
    """What would fit, each by itself."""
    found = list(_remedies(case, fitting))
    return "use " + (" or ".join(found) or "a smaller model, or a device with more memory")


def _remedies(case: Case, fitting: int) -> Iterator[str]:
    if case.config.num_pages and fitting >= case.least_pages:
        yield f"num_pages={fitting}"
    for name, least in LEAST.items():
        value = getattr(case.config, name) // 2
        while value >= least:
            if _fits(case.change(**{name: value})):
                yield f"{name}={value}"
                break
            value //= 2
    size = 2 * case.num_ranks
    while size <= MOST_RANKS:
        if _fits(case.change(tp=size)):
            yield f"tp={size}"
            return
        size *= 2


def _fits(case: Case) -> bool:
    """Whether `case` can run, with the fewest pages where their number is automatic.

    Passes are rehearsed only where all that rests would fit.
    """
    room = available(case)
    try:
        for look in (_at_rest, predict):
            budget = look(case)
            if not case.config.num_pages:
                budget = budget.with_pages(min(budget.num_pages, case.least_pages))
            if room is not None and budget.total > room:
                return False
    except ConfigError:
        return False
    return True


def _at_rest(case: Case) -> Budget:
    return at_rest(case, hollow_runner(case))
