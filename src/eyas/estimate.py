"""Counts and a machine's profile to times: of passes, of a cycle, of tokens.

A time is a sum over operations, each by the profile's curve for its kind of work and no faster than
its floor; nothing is fitted to whole passes. What surrounds the device's work stands in `Software`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from eyas.config import SpeculationConfig, Strict, option, require
from eyas.cost import Cycle, cycle_ops, plain_step, require_shares
from eyas.hardware import BEST, MANY_ROWS, SMALL_LAYER, Curve, HardwareProfile, Times
from eyas.kernels.absorb import MOST_ROWS as ABSORBED_ROWS
from eyas.kernels.experts_triton import SHARED_ROWS
from eyas.kernels.router import MOST_ROWS as CHOSEN_ROWS
from eyas.kernels.skinny_plan import MOST_ROWS, plan_of, takes
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.operations import (
    BEHIND_MLP,
    COMPONENTS,
    LEVEL_BOOKS,
    MOE,
    STEP_BOOKS,
    Joins,
    Op,
    Work,
)
from eyas.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Software(Strict):
    """How an engine runs its passes, as far as time depends on it."""

    name: str = "eyas"
    all_reduce: str = option(BEST, "kind of all-reduce; best takes the fastest for each size")
    fused_all_reduce: bool = option(False, "residual and norm in the all-reduce's kernel")
    overlapped: bool = option(False, "experts in two halves, the first one's sum under way")
    graphs: bool = option(True, "passes are replayed from CUDA graphs")
    prefill_attention: bool = option(
        False, "verify attends as prefill does: no request's keys are split"
    )
    blocking_copies: int = option(0, "times a cycle that the host waits for a small copy")
    waits_for_host: bool = option(True, "whether host_us of the profile is this engine's")
    joins: bool = option(True, "few rows' norms and gates are part of other launches, on a GPU")
    latent_us: Curve | None = None
    """Its latent attention where that is slower than the profile's, over bytes read."""
    cache_launches: int = option(0, "kernels a layer that rotate, and keep keys and values")
    decode_gap_us: float = option(0.0, "idle device time of a plain step")
    cycle_gap_us: float = option(0.0, "idle device time of a cycle")
    source: str = "cycles in one graph each, results read one cycle late"


MOST_JOINED = {Joins.HEADS: ABSORBED_ROWS, Joins.CHOICE: CHOSEN_ROWS, Joins.EXPERTS: SHARED_ROWS}
"""Rows up to which small kernels are part of another's launch, whatever the weights."""
EYAS = Software()
SGLANG = Software(
    name="sglang",
    waits_for_host=False,
    joins=False,
    cache_launches=2,
    decode_gap_us=60.0,
    cycle_gap_us=1190.0,
    source="SGLang 0.5.15 with a Llama-3.1-8B shape on one H200, 2026-11-29: decode 4.78 ms of "
    "which the GPU works 4.72; a cycle's eager work 0.39 ms and its gap 0.8; kernels of its trace",
)
VLLM = Software(
    name="vllm",
    waits_for_host=False,
    joins=False,
    cache_launches=3,
    decode_gap_us=60.0,
    cycle_gap_us=350.0,
    source="vLLM 0.24 with a Llama-3.1-8B shape on one H200, 2026-11-29: a cycle of 3 drafts is "
    "0.92 ms longer than decode, of which three drafter passes take 0.57; decode's gap as SGLang's",
)
ENGINES = {software.name: software for software in (EYAS, SGLANG, VLLM)}


@dataclass(frozen=True, slots=True)
class Line:
    """An operation of a pass with the time of all its times."""

    op: Op
    us: float
    floor_us: float


@dataclass(frozen=True)
class Estimate:
    """A pass, operation by operation, on the device."""

    lines: tuple[Line, ...]

    @cached_property
    def us(self) -> float:
        """Device time."""
        return sum(line.us for line in self.lines)

    @cached_property
    def floor_us(self) -> float:
        """The least time for the pass's traffic and arithmetic; collectives count nothing."""
        return sum(line.floor_us for line in self.lines)

    @cached_property
    def launches(self) -> int:
        """Kernels."""
        return sum(line.op.launches * line.op.times for line in self.lines)

    @cached_property
    def gigabytes(self) -> float:
        """Memory traffic of a rank."""
        return sum(line.op.bytes * line.op.times for line in self.lines) / 1e9

    def by_component(self) -> dict[str, float]:
        """Component -> device time, us; only those that take some."""
        totals = dict.fromkeys(COMPONENTS, 0.0)
        for line in self.lines:
            totals[line.op.component] += line.us
        return {name: us for name, us in totals.items() if us > 0}

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.lines + other.lines)


def estimate(
    ops: Sequence[Op], profile: HardwareProfile, software: Software = EYAS, ranks: int = 1
) -> Estimate:
    """What `ops` take; raises `ConfigError` for a kind of all-reduce without a table."""
    lines = []
    for op in ops:
        one = op_us(op, profile, software, ranks)
        if joined(op, profile, software):
            op, one = dataclasses.replace(op, launches=0), _joined_us(op, profile)
        if software.overlapped and op.name == BEHIND_MLP:
            one = _overlapped_us(op, ops, profile, software, ranks)
        floor = 0.0
        if one and op.work not in (Work.REDUCE, Work.GATHER, Work.FIXED):
            floor = profile.floor_us(op.bytes, op.flops)
        lines.append(Line(op, max(one, floor) * op.times, floor * op.times))
    return Estimate(tuple(lines))


def joined(op: Op, profile: HardwareProfile, software: Software) -> bool:
    """Whether `op` is part of another launch; on a CPU none is."""
    if op.joins is None or not software.joins or not profile.eager_us:
        return False
    if op.joins in MOST_JOINED:
        return op.rows <= MOST_JOINED[op.joins]
    if op.layer is None:
        return False
    outputs, inputs, bits = op.layer
    if bits == 8:
        return op.rows <= MOST_ROWS
    planned = bits == 16 and plan_of(outputs, inputs, gated=True) is not None
    return planned and takes(op.rows, outputs, gated=True)


def _joined_us(op: Op, profile: HardwareProfile) -> float:
    """What an operation adds to the launch that it is part of: its weights, if it has some."""
    (few, short), (many, long) = profile.experts_us.points[0], profile.experts_us.points[-1]
    return op.weights * (long - short) / (many - few) if many > few else 0.0


def op_us(op: Op, profile: HardwareProfile, software: Software = EYAS, ranks: int = 1) -> float:
    """One time of an operation, on the device."""
    match op.work:
        case Work.LINEAR:
            cuts = profile.small_us if profile.eager_us else 0.0  # a CPU takes rows as they are
            return _linear_us(op, profile) + (op.launches - 1) * cuts
        case Work.EXPERTS:
            us = profile.experts_us(op.weights) * profile.pairs_factor(op.pairs)
            return max(us, _arithmetic_us(op, profile, profile.experts_us(0)))
        case Work.HEADS | Work.NARROW | Work.LATENT:
            us = _attention_us(op, profile, software)
            walk = op.width * profile.serial_ns / 1e3 if software.prefill_attention else 0.0
            return max(us, walk) + software.cache_launches * profile.small_us
        case Work.SMALL:
            return profile.small_us + op.moved / profile.copy_gb_s / 1e3
        case Work.SAMPLE:
            return profile.sampling_us(op.width) + op.moved / profile.read_gb_s / 1e3
        case Work.REDUCE:
            saved = profile.small_us if software.fused_all_reduce else 0.0
            return _reduce_us(op.message, profile, software, ranks) - saved
        case Work.GATHER:
            return _reduce_us(op.message / 2, profile, software, ranks)
        case Work.FIXED:
            books = {STEP_BOOKS: profile.decode_us, LEVEL_BOOKS: profile.step_us}
            return books.get(op.name, profile.cycle_us)


def _linear_us(op: Op, profile: HardwareProfile) -> float:
    """Of few rows by bytes; what more rows cost is told for large and for small layers.

    The time of a layer whose gate is in its launch holds the gate.
    """
    base, one = profile.linear_us(0), profile.linear_us(op.weights)
    if op.weights > SMALL_LAYER:
        us = base + (one - base) * profile.rows_factor(min(op.rows, MANY_ROWS))
        return max(us, _arithmetic_us(op, profile, base))
    factor = profile.small_rows_factor
    most = factor.members[-1][1].points[-1][0]
    us = one * factor(op.weights, min(op.rows, most))
    return max(us, _arithmetic_us(op, profile, base)) if op.rows > most else us


def _attention_us(op: Op, profile: HardwareProfile, software: Software) -> float:
    """By bytes of keys, for so many walks and rows; rows past the most known by arithmetic."""
    keys = _keys_bytes(op, profile)
    times, tflops = _attention(op.work, profile)
    if op.work is Work.LATENT and software.latent_us:
        us, least = software.latent_us(keys), software.latent_us(0)
    else:
        us, least = times(op.walks, op.side, keys), times(op.walks, 0, 0)
    return max(us, least + op.flops / tflops / 1e6)


def _attention(work: Work, profile: HardwareProfile) -> tuple[Times, float]:
    """Times, and TFLOPS of many rows."""
    if work is Work.LATENT:
        return profile.latent_us, profile.latent_tflops
    if work is Work.NARROW:
        return profile.narrow_us, profile.narrow_tflops
    return profile.attention_us, profile.attention_tflops


def _keys_bytes(op: Op, profile: HardwareProfile) -> float:
    """Keys and values read; those read again are cheaper where a cache holds them all."""
    cached = op.kv <= profile.cache_mb * 1e6
    return op.kv + op.again * (profile.read_gb_s / profile.cache_gb_s if cached else 1.0)


def _arithmetic_us(op: Op, profile: HardwareProfile, base: float) -> float:
    """Bound by arithmetic, from so many rows on that it may be one."""
    if op.rows <= MANY_ROWS:
        return 0.0
    return base + op.flops / profile.matmul_tflops(op.rows) / 1e6


def _reduce_us(message: float, profile: HardwareProfile, software: Software, ranks: int) -> float:
    return profile.all_reduce_us(ranks, message, software.all_reduce) + profile.skew_us


def _overlapped_us(
    op: Op, ops: Sequence[Op], profile: HardwareProfile, software: Software, ranks: int
) -> float:
    """An all-reduce in two halves, the first beside the second half of the experts."""
    whole = op_us(op, profile, software, ranks)
    layers = max((o.times for o in ops if o.work is Work.EXPERTS), default=0)
    if not layers:
        return whole
    beside = sum(op_us(o, profile) * o.times for o in ops if o.component == MOE) / layers
    half = op_us(dataclasses.replace(op, message=op.message / 2), profile, software, ranks)
    return min(whole, 2 * half - min(half, beside / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A target and its drafter in a setting, on a machine, run by an engine."""

    target: ModelConfig
    drafter: DrafterConfig | ModelConfig | None
    speculation: SpeculationConfig
    setting: Setting
    profile: HardwareProfile
    software: Software = EYAS
    rates: tuple[float, ...]
    """Per draft position of a chain: how often it is accepted where those before it were."""

    def change(self, **values: object) -> Scenario:
        """The same with other values; those of `setting` and `software` may stand alone."""
        parts: dict[str, dict[str, object]] = {"setting": {}, "software": {}}
        for part in parts:
            names = {f.name for f in dataclasses.fields(getattr(self, part))}
            parts[part] = {k: values.pop(k) for k in [*values] if k in names}
        new = {k: dataclasses.replace(getattr(self, k), **v) for k, v in parts.items() if v}
        return dataclasses.replace(self, **{**new, **values})

    @property
    def accept_length(self) -> float:
        """Tokens that a cycle commits on average."""
        return accept_length(self.rates, self.speculation)


def accept_length(rates: Sequence[float], spec: SpeculationConfig) -> float:
    """Tokens of a cycle, bonus included, if a chain's drafts are accepted with `rates`.

    Depths without a rate have the last one. Two assumptions for trees: nodes are spread evenly over
    levels, and a node on the right path has, besides its first child, half of what its level could
    give it; its j-th child is right, where better ones are wrong, with the chain's rate over j.
    """
    if spec.algorithm == "NONE" or not rates:
        return 1.0
    level = min(spec.eagle_topk, max(1.0, (spec.num_nodes - 1) / spec.depth))
    children = 1 + (level - 1) / 2
    total, reached = 1.0, 1.0
    for depth in range(spec.depth):
        rate = rates[min(depth, len(rates) - 1)]
        missed = 1.0
        for j in range(1, spec.eagle_topk + 1):
            missed *= (1 - rate / j) ** min(1.0, max(0.0, children - j + 1))
        reached *= 1 - missed
        total += reached
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plain step and a cycle of a scenario."""

    decode: Estimate
    draft: Estimate
    verify: Estimate
    extend: Estimate
    decode_ms: float
    """Wall time of a plain step."""
    cycle_ms: float
    accept_length: float
    batch: int

    @property
    def idle_ms(self) -> float:
        """What of a cycle is not the device's work."""
        return self.cycle_ms - (self.draft.us + self.verify.us + self.extend.us) / 1e3

    @property
    def tok_per_s(self) -> float:
        """Of all requests together."""
        return self.batch * self.accept_length / self.cycle_ms * 1e3

    @property
    def plain_tok_per_s(self) -> float:
        """The same without speculation."""
        return self.batch / self.decode_ms * 1e3

    @property
    def speedup(self) -> float:
        """Speculation over plain decoding."""
        return self.tok_per_s / self.plain_tok_per_s

    @property
    def break_even(self) -> float:
        """Accept length from which on speculation pays."""
        return self.cycle_ms / self.decode_ms


def predict(scenario: Scenario) -> Prediction:
    """Times of a scenario; raises `ConfigError` where ranks can't share the target."""
    target, setting, profile = scenario.target, scenario.setting, scenario.profile
    require_shares(target, setting.ranks)
    software = scenario.software
    require(
        setting.ranks <= profile.num_devices,
        f"tp={setting.ranks} on profile {profile.name!r}",
        f"the machine has {profile.num_devices} devices",
        f"use tp<={profile.num_devices}, or another profile",
    )
    calm = dataclasses.replace(software, prefill_attention=False)
    decode = estimate(plain_step(target, setting), profile, calm, setting.ranks)
    decode_ms = _wall_ms(decode, profile, software, software.decode_gap_us)
    if scenario.speculation.algorithm == "NONE":
        none = Estimate(())
        return Prediction(
            decode=decode,
            draft=none,
            verify=decode,
            extend=none,
            decode_ms=decode_ms,
            cycle_ms=decode_ms,
            accept_length=1.0,
            batch=setting.batch,
        )
    ops: Cycle = cycle_ops(target, scenario.drafter, scenario.speculation, setting)
    draft = estimate(ops.draft, profile, calm, setting.ranks)
    verify = estimate(ops.verify, profile, software, setting.ranks)
    extend = estimate(ops.extend, profile, calm, setting.ranks)
    gap = software.cycle_gap_us + software.blocking_copies * profile.copy_us
    cycle_ms = _wall_ms(draft + verify + extend, profile, software, gap)
    return Prediction(
        decode=decode,
        draft=draft,
        verify=verify,
        extend=extend,
        decode_ms=decode_ms,
        cycle_ms=cycle_ms,
        accept_length=scenario.accept_length,
        batch=setting.batch,
    )


def _wall_ms(work: Estimate, profile: HardwareProfile, software: Software, gap_us: float) -> float:
    """Wall time of a step: the device's, or the host's where that is longer."""
    host = profile.host_us if software.waits_for_host else 0.0
    if not software.graphs:
        return (max(work.us, work.launches * profile.eager_us + host) + gap_us) / 1e3
    return (max(work.us, host) + profile.graph_us + gap_us) / 1e3
