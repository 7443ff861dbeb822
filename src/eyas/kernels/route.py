"""Router logits to experts: scores, groups, the best few and their weights.

DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). `route`
is one launch with a program a row; `choose` is what it does, for kernels that have logits at hand.
In kernels ties go to the lower expert, and whatever the logits are, a row's experts are different
ones that exist; a row with a score that is no number has weights that are none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, number_of, score_of, without
from eyas.model_config import MoEConfig

LANES = 32
"""On a CPU the rest of a tensor behind a multiple of this is rounded otherwise by `sigmoid`."""


def route_reference(
    logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `route`."""
    logits = logits.float()
    scores = _sigmoid(logits) if config.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if bias is None else scores + bias
    if config.num_groups > 1:
        ranked = _in_best_groups(ranked, config)
    ids = ranked.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * config.scaling_factor


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Sigmoid of rows [T, E] whose bits do not depend on the number of rows."""
    size = logits.shape[1]
    return F.pad(logits, (0, -size % LANES)).sigmoid()[:, :size]


def _in_best_groups(ranked: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Scores [T, E] with -inf outside each row's best groups of neighbouring experts."""
    groups = ranked.unflatten(1, (config.num_groups, -1))
    best = 2 if config.group_score == "top2" else 1
    worth = groups.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool)
    kept.scatter_(1, worth.topk(config.topk_groups, dim=-1).indices, True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


@triton.jit
def _among_best_groups(  # type: ignore[no-untyped-def]
    ranked,
    there,
    group,
    number,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
):
    """Which experts bool[R, G, M] are in their row's best groups, of those that are `there`."""
    worth = tl.max(tl.where(there, ranked, float("-inf")), 2)
    if TOP2:
        first = tl.max(without(key_of(ranked, number), ~there), 2)
        others = there & (number != number_of(first)[:, :, None])
        worth += tl.max(tl.where(others, ranked, float("-inf")), 2)
    groups = without(key_of(worth, group), group >= GROUPS)
    kept = groups != groups
    for _ in tl.static_range(TOP_GROUPS):
        best = group == number_of(tl.max(groups, 1))[:, None]
        kept = kept | best
        groups = without(groups, best)
    return there & kept[:, :, None]


@triton.jit
def choose(  # type: ignore[no-untyped-def]
    logits,
    bias_ptr,
    factor,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """(experts int32, weights float32) [R, K_BLOCK] of logits [R, GROUP_BLOCK, MEMBER_BLOCK].

    Logits past a group's members or the groups are -inf. No sum of floats follows the layout of the
    rows among threads, so a row has the same bits in tiles of any number of rows.
    """
    group, member = tl.arange(0, GROUP_BLOCK)[None, :], tl.arange(0, MEMBER_BLOCK)[None, None, :]
    number = group[:, :, None] * MEMBERS + member
    there = (group < GROUPS)[:, :, None] & (member < MEMBERS)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.max(logits, 2), 1)
        scores = tl.exp(logits - top[:, None, None])
        parts = (scores * 1099511627776.0).to(tl.int64)  # 2 ** 40: sums of integers have no order
        total = tl.sum(tl.sum(parts, 2), 1).to(tl.float32) * (1.0 / 1099511627776.0)
        scores = scores / total[:, None, None]
    strange = tl.max(tl.max(tl.where(there & (scores != scores), 1, 0), 2), 1)
    ranked = scores
    if BIASED:
        ranked += tl.load(bias_ptr + number, there, 0.0)
    ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    if GROUPS > 1:
        there = _among_best_groups(ranked, there, group, number, GROUPS, TOP_GROUPS, TOP2)
    keys = without(key_of(ranked, number), ~there)
    place = tl.arange(0, K_BLOCK)[None, :]
    chosen = tl.zeros([logits.shape[0], K_BLOCK], tl.int32)
    weights = tl.zeros([logits.shape[0], K_BLOCK], tl.float32)
    mass = tl.zeros([logits.shape[0]], tl.float32)
    for k in tl.static_range(TOP_K):
        key = tl.max(tl.max(keys, 2), 1)
        best = number_of(key)
        taken = number == best[:, None, None]
        own = score_of(key)
        if BIASED:
            own = tl.max(tl.max(tl.where(taken, scores, float("-inf")), 2), 1)
        mass += own
        chosen = tl.where(place == k, best[:, None], chosen)
        weights = tl.where(place == k, own[:, None], weights)
        keys = without(keys, taken)
    if NORMALIZE:
        weights = weights / (mass + 1e-20)[:, None]
    return chosen, tl.where(strange[:, None] > 0, float("nan"), weights * factor)


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    factor,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    TOP2: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): its experts, lying as groups by members."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, MEMBER_BLOCK)[None, :]
    there = (group < GROUPS) & (member < MEMBERS)
    where = row * (GROUPS * MEMBERS) + group * MEMBERS + member
    logits = tl.load(logits_ptr + where, there, float("-inf")).to(tl.float32)
    chosen, weights = choose(
        logits[None, :, :],
        bias_ptr,
        factor,
        GROUPS,
        MEMBERS,
        TOP_K,
        TOP_GROUPS,
        SIGMOID,
        BIASED,
        TOP2,
        NORMALIZE,
        GROUP_BLOCK,
        MEMBER_BLOCK,
        K_BLOCK,
    )
    place = tl.arange(0, K_BLOCK)[None, :]
    tl.store(ids_ptr + row * TOP_K + place, chosen.to(tl.int64), place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights, place < TOP_K)


def constants(config: MoEConfig, biased: bool) -> dict[str, int | bool]:
    """What `choose` is compiled for."""
    members = config.num_experts // config.num_groups
    return {
        "GROUPS": config.num_groups,
        "MEMBERS": members,
        "TOP_K": config.top_k,
        "TOP_GROUPS": config.topk_groups,
        "SIGMOID": config.scoring == "sigmoid",
        "BIASED": biased,
        "TOP2": config.group_score == "top2",
        "NORMALIZE": config.normalize,
        "GROUP_BLOCK": block_of(config.num_groups),
        "MEMBER_BLOCK": block_of(members),
        "K_BLOCK": block_of(config.top_k),
    }


def route_triton(
    logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `route`."""
    shape, logits = (logits.shape[0], config.top_k), logits.contiguous()
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _route_kernel[(logits.shape[0],)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        config.scaling_factor,
        num_warps=1,
        **constants(config, bias is not None),
        **turns(logits),
    )
    return ids, weights


def route(
    logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row, best first: ids int64[T, K] and weights float32[T, K].

    From router logits [T, E]; `bias` float32[E] counts for the choice alone.
    """
    run = route_triton if runs_kernels(logits) else route_reference
    return run(logits, config, bias)


def cost(rows: int, config: MoEConfig, itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes) for `rows` of logits."""
    experts = rows * config.num_experts
    return experts * (6 + config.top_k), experts * itemsize + rows * config.top_k * 12
