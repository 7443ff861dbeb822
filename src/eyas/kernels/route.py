"""Router logits to experts: scores, groups, the best few and their weights, in one launch.

DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). In the
kernel a program has a row, so rows are independent; ties go to the lower expert, and whatever the
logits are, a row's experts are different ones that exist.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eyas.kernels.lang import block_of, runs_kernels, take_turn, tl, triton, turns
from eyas.kernels.order import key_of, number_of, without
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
    row, experts = tl.program_id(0).to(tl.int64), GROUPS * MEMBERS
    group, member = tl.arange(0, GROUP_BLOCK), tl.arange(0, MEMBER_BLOCK)
    number = group[:, None] * MEMBERS + member[None, :]
    there = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logits = tl.load(logits_ptr + row * experts + number, there, float("-inf")).to(tl.float32)
    top = tl.max(tl.max(logits, 1), 0)
    if SIGMOID:
        ranked = 1.0 / (1.0 + tl.exp(-logits))
        total = 1.0
    else:
        ranked = tl.exp(logits - top)
        total = tl.sum(tl.sum(ranked, 1), 0)
        ranked = ranked / total
    if BIASED:
        ranked += tl.load(bias_ptr + number, there, 0.0)
    ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    if GROUPS > 1:
        worth = tl.max(tl.where(there, ranked, float("-inf")), 1)
        if TOP2:
            first = tl.max(without(key_of(ranked, number), ~there), 1)
            others = there & (number != number_of(first)[:, None])
            worth += tl.max(tl.where(others, ranked, float("-inf")), 1)
        groups = without(key_of(worth, group), group >= GROUPS)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = number_of(tl.max(groups, 0))
            kept = kept | (group == best)
            groups = without(groups, group == best)
        there = there & kept[:, None]
    keys = without(key_of(ranked, number), ~there)
    place = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    for k in tl.static_range(TOP_K):
        best = number_of(tl.max(tl.max(keys, 1), 0))
        chosen = tl.where(place == k, best, chosen)
        keys = without(keys, number == best)
    used = place < TOP_K
    own = tl.load(logits_ptr + row * experts + chosen, used, float("-inf")).to(tl.float32)
    weights = 1.0 / (1.0 + tl.exp(-own)) if SIGMOID else tl.exp(own - top) / total
    if NORMALIZE:
        weights = weights / (tl.sum(tl.where(used, weights, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + row * TOP_K + place, chosen.to(tl.int64), used)
    tl.store(weights_ptr + row * TOP_K + place, weights * factor, used)


def route_triton(
    logits: torch.Tensor, config: MoEConfig, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `route`."""
    rows, members = logits.shape[0], config.num_experts // config.num_groups
    shape, logits = (rows, config.top_k), logits.contiguous()
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        config.scaling_factor,
        GROUPS=config.num_groups,
        MEMBERS=members,
        TOP_K=config.top_k,
        TOP_GROUPS=config.topk_groups,
        SIGMOID=config.scoring == "sigmoid",
        BIASED=bias is not None,
        TOP2=config.group_score == "top2",
        NORMALIZE=config.normalize,
        GROUP_BLOCK=block_of(config.num_groups),
        MEMBER_BLOCK=block_of(members),
        K_BLOCK=block_of(config.top_k),
        num_warps=1,
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
