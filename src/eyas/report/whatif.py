"""What would change if: predictions of a scenario and of single changes to it, sorted by gain.

Scenarios and their times are `eyas.estimate`'s; here are the changes worth asking about, and what
each costs to do. A record is plain values; `plan_table.py` shows it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eyas.config import SpeculationConfig
from eyas.cost import target_pass
from eyas.errors import ConfigError
from eyas.estimate import Estimate, Prediction, Scenario, predict
from eyas.hardware import load_profile
from eyas.operations import Work
from eyas.report.records import stamped

INTERCONNECTS = {
    "NVLink": "h200",
    "PCIe with peer access, NCCL tuned": "rtx-pro-6000-tuned",
    "PCIe with peer access, NCCL by default": "rtx-pro-6000-untuned",
    "PCIe without peer access": "rtx-pro-6000-no-peer",
}
"""Words -> the preset whose collectives they stand for."""
REPEATS = 0.43
"""Overlap of real text: 31 % fewer distinct experts at 4 tokens, of 8 of 128 (measured)."""
CHAINS = (1, 2, 3, 4, 5, 7)
TREES = ((3, 2, 6), (5, 4, 16), (6, 8, 60))
"""Steps, children tried, nodes verified."""
LATE_US, STALL_US = 50.0, 1000.0
MOST_MEMORY = 0.95
"""Share of a device's memory that weights and pages may take."""


@dataclass(frozen=True, slots=True)
class Option:
    """One change and what it costs to do."""

    name: str
    group: str
    costs: str
    change: Callable[[Scenario], Scenario]


def plan(scenario: Scenario) -> dict[str, Any]:
    """Rows of the scenario and of every change that fits it, its terms, and what was assumed."""
    base = predict(scenario)
    rows = [_row("as asked", "", "", scenario, base, base)]
    seen = [scenario]
    for option in options(scenario):
        changed = option.change(scenario)
        if changed in seen or resident_gb(changed) > MOST_MEMORY * changed.profile.memory_gb:
            continue
        seen.append(changed)
        try:
            found = predict(changed)
        except ConfigError:  # ranks that can't share the target are no option
            continue
        rows.append(_row(option.name, option.group, option.costs, changed, found, base))
    rows.sort(key=lambda row: -row["gain"])
    room = scenario.profile.memory_gb
    values = {
        "verdict": verdict(base),
        **shares(base),
        "rows": rows,
        "breakdown": breakdown(base),
        "terms": terms(base),
        "resident_gb": resident_gb(scenario),
        "fits": resident_gb(scenario) <= MOST_MEMORY * room,
        "profile": {key: scenario.profile.to_json()[key] for key in ("name", "machine", "date")},
        "engine": {"name": scenario.software.name, "source": scenario.software.source},
        "accept_length": base.accept_length,
        "acceptance": acceptance(scenario),
        "assumptions": assumptions(scenario),
    }
    return stamped("plan", values)


def options(base: Scenario) -> Iterator[Option]:
    """Every change worth a row; those that change nothing fall out later."""
    if base.setting.ranks > 1:
        yield from _communication(base)
    yield from _speculation(base)
    yield from _ranks(base)
    yield from _engine(base)
    yield from _precision(base)


def _communication(base: Scenario) -> Iterator[Option]:
    for words, preset in INTERCONNECTS.items():
        tables = load_profile(preset).collectives
        profile = dataclasses.replace(base.profile, collectives=tables)
        best = base.change(profile=profile, all_reduce="best")
        yield _fixed(f"{words}", "interconnect", "another machine", best)
    group = "all-reduce"
    for kind in base.profile.kinds(base.setting.ranks):
        yield _change(f"all-reduce {kind}", group, "a setting", all_reduce=kind)
    yield _change(
        "the fastest all-reduce for each size", group, "timing at start", all_reduce="best"
    )
    fused = "a kernel; keep its end barrier"
    yield _change("all-reduce fused with residual and norm", group, fused, fused_all_reduce=True)
    halves = "experts in two halves, two streams"
    yield _change("all-reduce beside the experts", group, halves, overlapped=True)
    late = dataclasses.replace(base.profile, skew_us=LATE_US)
    name = f"a rank {LATE_US:.0f} us late at every all-reduce"
    yield _fixed(name, group, "a fault: find the rank", base.change(profile=late))


def _speculation(base: Scenario) -> Iterator[Option]:
    spec = base.speculation
    if spec.algorithm == "NONE":
        return
    for drafts in CHAINS:
        chain = SpeculationConfig.chain(drafts, spec.algorithm)
        plural = "s" if drafts > 1 else ""
        name = f"a chain of {drafts} draft{plural}, {drafts + 1} rows a verify"
        yield _change(name, "drafts", "a flag", speculation=chain)
    if base.drafter is not None:
        for steps, topk, nodes in TREES:
            tree = SpeculationConfig(
                algorithm=spec.algorithm, num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes
            )
            name = f"a tree of {steps} steps, top {topk}, {nodes} nodes"
            yield _change(name, "drafts", "a flag; acceptance assumed", speculation=tree)
    none = SpeculationConfig(algorithm="NONE")
    yield _change("no speculation", "drafts", "a flag", speculation=none)
    free = "states written where the drafter reads them"
    yield _change("hidden states kept without copies", "drafts", free, capture=False)


def _ranks(base: Scenario) -> Iterator[Option]:
    ranks, group = base.setting.ranks, "ranks"
    for other in (ranks // 2, ranks * 2):
        if 1 <= other <= base.profile.num_devices:
            shared = min(base.setting.context_ranks, other)
            yield _change(f"tp={other}", group, "a flag", ranks=other, context_ranks=shared)
    if ranks > 1:
        own = "every rank holds all attention weights"
        yield _change("data-parallel attention", group, own, data_parallel_attention=True)
        many = "two gathers and a scatter a layer"
        yield _change("keys shared among all ranks", group, many, context_ranks=ranks)
    if base.drafter is not None and ranks > 1:
        other_way = not base.setting.sharded_drafter
        name = "drafter shared among ranks" if other_way else "drafter whole on every rank"
        yield _change(name, group, "a flag", sharded_drafter=other_way)


def _engine(base: Scenario) -> Iterator[Option]:
    group = "engine"
    split = base.software.prefill_attention
    name = f"verify on {'decode' if split else 'prefill'} attention"
    yield _change(name, group, "a flag: speculative-attention-mode", prefill_attention=not split)
    if base.speculation.num_nodes > 1:
        each = "what an engine that takes nodes for requests pays"
        yield _change("keys read for every node", group, each, kv_per_node=True)
    yield _change("graphs off", group, "a flag; for debugging", graphs=False)
    copies = "what a plan made on the host pays"
    yield _change("three blocking copies a cycle", group, copies, blocking_copies=3)
    gap = base.software.cycle_gap_us + STALL_US
    name = f"a host stall of {STALL_US / 1e3:.0f} ms a cycle"
    yield _change(name, group, "a fault: find it in a trace", cycle_gap_us=gap)
    calm = "metadata on the device, one graph a cycle, results read late"
    yield _change("no gap between passes", group, calm, cycle_gap_us=0.0)


def _precision(base: Scenario) -> Iterator[Option]:
    precision, group = base.setting.precision, "precision"

    def bits(name: str, costs: str, **values: float) -> Option:
        return _change(name, group, costs, precision=dataclasses.replace(precision, **values))

    quality = "quality to be measured"
    yield bits("weights in 8 bits", quality, weight_bits=8.0)
    if base.target.moe is not None:
        yield bits("experts in 8 bits", quality, expert_bits=8.0)
        yield bits("experts in 4 bits, groups of 32", quality, expert_bits=4.5)
    yield bits("keys and values in 8 bits", quality, kv_bits=8.0)
    if base.drafter is not None:
        costs = "nothing: verification keeps the text"
        yield bits("drafter in 8 bits", costs, draft_bits=8.0, extend_bits=8.0)
    if base.target.moe is not None and base.speculation.num_nodes > 1:
        for overlap, words in ((0.0, "apart"), (REPEATS, "as in real text"), (1.0, "the same")):
            name = f"nodes choose experts {words}"
            yield _change(name, "experts", "the text decides", expert_overlap=overlap)


def _change(name: str, group: str, costs: str, **values: object) -> Option:
    return Option(name, group, costs, lambda scenario: scenario.change(**values))


def _fixed(name: str, group: str, costs: str, changed: Scenario) -> Option:
    return Option(name, group, costs, lambda _: changed)


def _row(
    name: str, group: str, costs: str, scenario: Scenario, found: Prediction, base: Prediction
) -> dict[str, Any]:
    """`gain` is tokens per second over those of the scenario as asked."""
    return {
        "option": name,
        "group": group,
        "costs": costs,
        "decode_ms": found.decode_ms,
        "draft_ms": found.draft.us / 1e3,
        "verify_ms": found.verify.us / 1e3,
        "extend_ms": found.extend.us / 1e3,
        "idle_ms": found.idle_ms,
        "cycle_ms": found.cycle_ms,
        "accept_length": found.accept_length,
        "tok_per_s": found.tok_per_s,
        "plain_tok_per_s": found.plain_tok_per_s,
        "speedup": found.speedup,
        "break_even": found.break_even,
        "gain": found.tok_per_s / base.tok_per_s,
        "resident_gb": resident_gb(scenario),
    }


def resident_gb(scenario: Scenario) -> float:
    """Weights and pages on one rank: all experts, and the embedding table."""
    setting, target = scenario.setting, scenario.target
    moe, total = target.moe, 0.0
    for op in target_pass(target, dataclasses.replace(setting, batch=1)):
        all_experts = moe is not None and op.work is Work.EXPERTS
        scale = moe.num_experts / moe.top_k if moe is not None and all_experts else 1.0
        total += op.times * (op.weights * scale + op.kv * setting.attention_batch)
    table = target.vocab_size * target.hidden_size / setting.ranks
    if not target.tie_word_embeddings:
        total += table * setting.precision.weight_bits / 8
    return total / 1e9


def acceptance(scenario: Scenario) -> dict[str, list[float]]:
    """Of a chain's positions: shares of cycles, and rates where those before were accepted."""
    rates, depth = scenario.rates, scenario.speculation.depth
    given = [rates[min(i, len(rates) - 1)] for i in range(depth)] if rates else []
    shares = list(itertools.accumulate(given, operator.mul))
    return {"acceptance_by_position": shares, "conditional_acceptance": given}


def verdict(found: Prediction) -> str:
    """Whether speculation pays, and what a cycle is made of most."""
    parts = (found.draft + found.verify + found.extend).by_component()
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    share = sum(parts[name] for name in (first, second)) / 1e3 / found.cycle_ms
    pays = "pays" if found.speedup > 1 else "does not pay"
    return (
        f"Speculation {pays}: {found.accept_length:.2f} tokens a cycle, {found.break_even:.2f} to "
        f"break even. {first} and {second} are {share:.0%} of a cycle of {found.cycle_ms:.2f} ms."
    )


def shares(found: Prediction) -> dict[str, Any]:
    """A cycle's time by component and stage, under the keys that pages draw."""
    cycle = {name: stage for name, stage in stages(found).items() if name != "decode"}
    whole, floors = found.draft + found.verify + found.extend, dict[str, float]()
    for line in whole.lines:
        component = line.op.component
        floors[component] = floors.get(component, 0.0) + line.floor_us / 1e3
    return {
        "cycle_ms": found.cycle_ms,
        "decode_ms": found.decode_ms,
        "device_ms": whole.us / 1e3,
        "idle_ms": found.idle_ms,
        "components": _ms(whole),
        "stages": {
            name: {"device_ms": stage.us / 1e3, "components": _ms(stage)}
            for name, stage in cycle.items()
        },
        "floors": {name: ms for name, ms in floors.items() if ms > 0},
    }


def _ms(estimate: Estimate) -> dict[str, float]:
    return {name: us / 1e3 for name, us in estimate.by_component().items()}


def stages(found: Prediction) -> dict[str, Estimate]:
    """Stages by name, plain decoding first."""
    every = {"decode": found.decode, "draft": found.draft}
    every |= {"verify": found.verify, "extend": found.extend}
    return {name: stage for name, stage in every.items() if stage.lines}


def breakdown(found: Prediction) -> list[dict[str, Any]]:
    """A row a component: ms of each stage; then the sums, floors, launches and traffic."""
    parts = {name: stage.by_component() for name, stage in stages(found).items()}
    names = {component: None for part in parts.values() for component in part}
    rows: list[dict[str, Any]] = []
    for component in names:
        shares = {stage: part.get(component, 0.0) / 1e3 for stage, part in parts.items()}
        rows.append({"component": component, **shares})
    for name, field in (
        ("device, ms", lambda e: e.us / 1e3),
        ("floor, ms", lambda e: e.floor_us / 1e3),
        ("launches", lambda e: e.launches),
        ("traffic, GB", lambda e: e.gigabytes),
    ):
        sums = {stage: field(estimate) for stage, estimate in stages(found).items()}
        rows.append({"component": name, **sums})
    return rows


def terms(found: Prediction) -> list[dict[str, Any]]:
    """Every operation of every stage, as counted and as timed."""
    return [
        {
            "stage": stage,
            "name": line.op.name,
            "component": line.op.component,
            "times": line.op.times,
            "launches": line.op.launches * line.op.times,
            "rows": line.op.rows,
            "gb": line.op.bytes * line.op.times / 1e9,
            "gflop": line.op.flops * line.op.times / 1e9,
            "message_bytes": line.op.message,
            "us": line.us,
            "floor_us": line.floor_us,
        }
        for stage, estimate in stages(found).items()
        for line in estimate.lines
    ]


def assumptions(scenario: Scenario) -> list[str]:
    """What the numbers rest on, in sentences."""
    found = [
        "a time is a sum over operations, by curves of the profile; nothing is fitted to passes",
        "trees: the j-th child of a node is right, where better ones are wrong, with the chain's "
        "rate over j, and a node on the right path has half of its level's other places",
    ]
    if scenario.target.moe is not None:
        overlap = scenario.setting.expert_overlap
        found.append(
            "experts are chosen evenly; nodes of a request share "
            f"{overlap:.0%} of what each would add, requests none"
        )
    profile = scenario.profile
    taken = sorted(
        name for name, source in profile.sources.items() if "assumed" in source or "over" in source
    )
    if taken:
        found.append(f"profile {profile.name}: assumed or taken over are {', '.join(taken)}")
    return found
