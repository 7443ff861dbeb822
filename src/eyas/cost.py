"""What the passes of a cycle do: every operation's FLOPs, bytes, launches and messages.

Pure counting from configs: no tensor, no device, no time (`estimate.py` turns counts into times).
The counts are those of one rank, the slowest where ranks differ. Operations are those of the
networks in `models/` and `layers/`; tests hold their weights against networks on the meta device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.config import SpeculationConfig, require
from eyas.kernels.attention_plan import FUSED_SUMS, NARROW
from eyas.kernels.lang import block_of
from eyas.model_config import DrafterConfig, MLAConfig, ModelConfig, MoEConfig
from eyas.operations import (
    ACTIVATION,
    ATTENTION,
    CYCLE_BOOKS,
    LEVEL_BOOKS,
    METADATA,
    MOE,
    STEP_BOOKS,
    Joins,
    Op,
    Work,
    collective,
    linear,
    logits,
    merged,
    mlp,
    norm,
    small,
)
from eyas.setting import Setting

GLUE = 3
"""Launches that put latent attention's queries, keys and results in place, where any do."""
STEP_LAUNCHES = 2
"""A step's or cycle's own: slots are looked up, what was drawn is settled."""
DRAFT_LAUNCHES = 2
"""Of a drafter with a network: drafts begin, the last committed rows are picked out."""
TREE_LAUNCHES = 3
"""Nodes are chosen and put in order, keys brought together; a drafter's states in one more."""
MODEL_LAUNCHES = 7
"""Rows of a language model that drafts are put together; in a pass its tokens are bounded."""
NGRAM_LAUNCHES = 2
"""What followed a suffix is looked up, and copied."""
PROGRAMS = 264
"""Of attention, that fill a GPU of 132 multiprocessors."""
LISTED_ROWS = 16
"""Of more rows each expert's own are listed by a launch of their own (`eyas.kernels.router`)."""


def touched(moe: MoEConfig, tokens: int, shares: Sequence[float] | None = None) -> float:
    """Distinct experts of a layer that `tokens` tokens choose, on average.

    Every expert is chosen by a token with probability K / E, or with its own in `shares`, whatever
    other tokens choose.
    """
    if shares is None:
        return moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    return sum(1 - (1 - p) ** tokens for p in shares)


def zipf_shares(moe: MoEConfig, exponent: float) -> list[float]:
    """Probabilities with which a token chooses each expert: K in sum, by rank ** -exponent.

    None exceeds 1; what a popular expert can't take goes to the others.
    """
    weights = [(i + 1) ** -exponent for i in range(moe.num_experts)]
    low, high = 0.0, float(moe.num_experts) * moe.num_experts**exponent
    for _ in range(80):
        middle = (low + high) / 2
        if sum(min(1.0, middle * w) for w in weights) < moe.top_k:
            low = middle
        else:
            high = middle
    return [min(1.0, high * w) for w in weights]


def touched_in_pass(moe: MoEConfig, batch: int, nodes: int, overlap: float) -> float:
    """Distinct experts of a layer in a pass over `nodes` rows of each of `batch` requests.

    Nodes of a request share some: each after the first adds less by the share `overlap`. Requests
    choose independently.
    """
    each = moe.top_k + (touched(moe, nodes) - moe.top_k) * (1 - overlap)
    return moe.num_experts * (1 - (1 - each / moe.num_experts) ** batch)


def require_shares(config: ModelConfig, ranks: int) -> None:
    """Raise `ConfigError` where `ranks` can't take equal shares of the target's layers."""
    sizes = {"query heads": config.num_heads, "vocabulary": config.vocab_size}
    sizes["intermediate size"] = config.intermediate_size
    if config.moe is not None:
        sizes["experts' intermediate size"] = config.moe.intermediate_size
    for what, size in sizes.items():
        require(
            size % ranks == 0,
            f"tp={ranks} for the {what} of {size}",
            "every rank takes the same share",
            f"use tp={max(n for n in range(1, ranks) if size % n == 0)}" if ranks > 1 else "",
        )


def target_pass(
    config: ModelConfig, setting: Setting, nodes: int = 1, aux_layers: int = 0
) -> list[Op]:
    """A forward of the target over `nodes` rows of each request, logits and draws included.

    `aux_layers` states of every row are kept for the drafter.
    """
    rows, hidden = setting.batch * nodes, config.hidden_size
    ops = _embedding(rows, hidden, setting.ranks)
    for layer, count in _kinds(config):
        mixing = mixing_ops(config, layer, setting, nodes)
        layer_once = [*mixing, *mlp_ops(config, layer, setting, nodes)]
        ops += [dataclasses.replace(op, times=op.times * count) for op in layer_once]
    ops.append(norm("final norm", rows, hidden))
    if aux_layers:
        ops.append(small("capture of hidden states", rows, 2 * hidden, times=aux_layers))
    ops += logits(rows, hidden, config.vocab_size, setting.ranks, setting.precision.weight_bits)
    if setting.ranks > 1:
        ops.append(collective("share of draws", rows * 8))
    return merged(ops)


def _embedding(rows: int, hidden: int, ranks: int) -> list[Op]:
    """Rows of tokens, of which ranks have shares; those of the rotary table are as quick."""
    found = dataclasses.replace(small("embedding", rows, hidden), launches=2)
    summed = collective("all-reduce of embeddings", rows * hidden * ACTIVATION)
    return [found, summed] if ranks > 1 else [found]


def _kinds(config: ModelConfig) -> list[tuple[int, int]]:
    """(first layer, number) of each kind of layer."""
    counts: dict[tuple[int, bool], list[int]] = {}
    for layer in range(config.num_layers):
        window = config.windows[layer] if config.windows else 0
        counts.setdefault((window, config.is_sparse(layer)), []).append(layer)
    return [(layers[0], len(layers)) for layers in counts.values()]


def mixing_ops(
    config: ModelConfig, layer: int, setting: Setting, nodes: int, width: int = 0
) -> list[Op]:
    """A decoder layer's attention, which reads `width` numbers a row; 0: the hidden size."""
    rows, hidden = setting.batch * nodes, config.hidden_size
    window = config.windows[layer] if config.windows else 0
    shape = AttentionLayer(
        hidden=hidden,
        width=width or hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mla=config.mla,
        qk_norm=config.qk_norm,
        positions=min(setting.context, window) if window else setting.context,
        bits=setting.precision.weight_bits,
    )
    attention = attention_ops(shape, setting, nodes)
    exchanged = _exchanged("gather", "attention", setting, rows * hidden)
    return [norm("norm", rows, width or hidden), *attention, *exchanged]


def mlp_ops(config: ModelConfig, layer: int, setting: Setting, nodes: int) -> list[Op]:
    """A decoder layer's MLP or experts."""
    rows, hidden, bits = setting.batch * nodes, config.hidden_size, setting.precision.weight_bits
    if config.moe is not None and config.is_sparse(layer):
        dense = moe_ops(config.moe, hidden, setting, nodes)
    else:
        dense = mlp("MLP", hidden, config.intermediate_size, rows, setting.ranks, bits)
    ops = [norm("norm", rows, hidden), *dense]
    return [*ops, *_exchanged("scatter", "MLP", setting, rows * hidden)]


def _exchanged(apart: str, part: str, setting: Setting, numbers: int) -> list[Op]:
    """What ranks exchange behind a part of a layer: sums, or where rows are a rank's own, those."""
    if setting.ranks == 1:
        return []
    if setting.data_parallel_attention:
        return [collective(f"{apart} behind {part}", numbers * ACTIVATION, Work.GATHER)]
    return [collective(f"all-reduce behind {part}", numbers * ACTIVATION)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The attention of a layer; `width` numbers go into it, `hidden` come out."""

    hidden: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mla: MLAConfig | None
    qk_norm: bool
    positions: int
    bits: float


def attention_ops(shape: AttentionLayer, setting: Setting, nodes: int) -> list[Op]:
    """Projections, attention over the cache and over the new rows, and the way out."""
    rows = setting.attention_batch * nodes
    if shape.mla is not None:
        return _latent_attention(shape, shape.mla, setting, nodes, rows)
    ranks, dim = setting.attention_ranks, shape.head_dim
    heads, kv_heads = shape.num_heads // ranks, max(1, shape.num_kv_heads // ranks)
    ops = [linear("qkv", shape.width, (heads + 2 * kv_heads) * dim, rows, shape.bits)]
    if shape.qk_norm:
        ops.append(small("norms of queries and keys", rows, (heads + kv_heads) * dim))
    keys = 2 * kv_heads * dim
    work = Work.NARROW if dim <= NARROW else Work.HEADS
    walkers = (kv_heads, heads // kv_heads)
    ops += _attend(work, shape, setting, nodes, walkers, keys, heads * 4 * dim, heads * 2 * dim)
    ops.append(linear("o", heads * dim, shape.hidden, rows, shape.bits))
    return ops


def _latent_attention(
    shape: AttentionLayer, mla: MLAConfig, setting: Setting, nodes: int, rows: int
) -> list[Op]:
    """Absorbed form: one latent a position for all heads, on every rank."""
    heads, latent = shape.num_heads // setting.attention_ranks, mla.kv_lora_rank
    head, kept, bits = mla.nope_dim + mla.rope_dim, latent + mla.rope_dim, shape.bits
    ops = [linear("down", shape.width, (mla.q_lora_rank or heads * head) + kept, rows, bits)]
    if mla.q_lora_rank:
        q_up = linear("q up", mla.q_lora_rank, heads * head, rows, bits)
        ops += [norm("norm of queries", rows, mla.q_lora_rank), q_up]
    kept_norm = norm("norm of latents", rows, latent)
    ops.append(dataclasses.replace(kept_norm, joins=Joins.HEADS))
    ops.append(linear("absorbed keys", latent, heads * mla.nope_dim, rows, bits))
    glue = small("latent queries and keys", rows, heads * kept, times=GLUE)
    ops.append(dataclasses.replace(glue, joins=Joins.HEADS))
    flops = heads * 2 * (kept + latent)
    moved = heads * (kept + latent)
    ops += _attend(Work.LATENT, shape, setting, nodes, (1, heads), kept, flops, moved)
    ops.append(linear("absorbed values", latent, heads * mla.value_dim, rows, bits))
    ops.append(linear("o", heads * mla.value_dim, shape.hidden, rows, bits))
    return ops


def _attend(
    work: Work,
    shape: AttentionLayer,
    setting: Setting,
    nodes: int,
    walkers: tuple[int, int],
    kept: int,
    flops: float,
    moved: float,
) -> list[Op]:
    """Attention itself: `kept` numbers a position, flops and moved numbers of a rank's heads.

    `walkers` are a rank's KV heads and the query heads of each.
    Ranks that share the positions gather the queries of all heads, and scatter their results.
    """
    rows, share = setting.attention_batch * nodes, setting.context_ranks
    positions = shape.positions / share
    kept_bytes = kept * setting.precision.kv_bits / 8
    kv = setting.attention_batch * positions * kept_bytes
    attend = Op(
        name="attention",
        component=ATTENTION,
        work=work,
        launches=2 if work is Work.LATENT else _attention_launches(shape, setting, nodes),
        rows=rows,
        kv=kv,
        again=kv * (nodes - 1) if setting.kv_per_node else 0.0,
        moved=rows * share * (moved * ACTIVATION + kept_bytes),
        flops=rows * share * flops * (positions + (nodes + 1) / 2),
        walks=setting.attention_batch * walkers[0],
        side=walkers[1] * share * (1 if setting.kv_per_node else nodes),
        width=round(positions),
    )
    if share == 1:
        return [attend]
    message = rows * share * moved / 2 * ACTIVATION
    return [
        collective("gather of queries", message, Work.GATHER),
        attend,
        collective("gather of sums", rows * shape.num_heads * 4, Work.GATHER),
        collective("scatter of results", message, Work.GATHER),
    ]


def _attention_launches(shape: AttentionLayer, setting: Setting, nodes: int) -> int:
    """One, and another where programs share a tile's keys and none of them merges their sums."""
    kv_heads = max(1, shape.num_kv_heads // setting.attention_ranks)
    rows = nodes * shape.num_heads // shape.num_kv_heads
    tile = min(64, max(16, block_of(rows)))
    shared = 2 * kv_heads * setting.attention_batch * -(-rows // tile) <= PROGRAMS
    return 1 + (shared and (setting.tree or tile * shape.head_dim > FUSED_SUMS))


def moe_ops(moe: MoEConfig, hidden: int, setting: Setting, nodes: int) -> list[Op]:
    """Router, routed experts and shared experts; every rank has a share of each expert."""
    precision, ranks, rows = setting.precision, setting.ranks, setting.batch * nodes
    bits = 32.0 if moe.float32_router else precision.weight_bits
    experts = touched_in_pass(moe, setting.batch, nodes, setting.expert_overlap)
    one = 3 * hidden * moe.intermediate_size / ranks
    times = 1 + moe.float32_router
    choice = small("routing", rows, moe.num_experts, times=times, component=MOE)
    ops = [
        linear("router", hidden, moe.num_experts, rows, bits, MOE),
        dataclasses.replace(choice, joins=Joins.CHOICE),
        Op(
            name="experts",
            component=MOE,
            work=Work.EXPERTS,
            launches=2 + (rows > LISTED_ROWS) + (ranks > 1),
            rows=rows,
            weights=experts * one * precision.expert / 8,
            moved=rows * moe.top_k * (hidden + moe.intermediate_size / ranks) * 2 * ACTIVATION,
            flops=2 * rows * moe.top_k * one,
            pairs=rows * moe.top_k / experts,
        ),
    ]
    if moe.shared_size:
        name = "shared experts"
        shared = mlp(name, hidden, moe.shared_size, rows, ranks, precision.weight_bits, MOE)
        ops += [dataclasses.replace(op, joins=Joins.EXPERTS) for op in shared]
    return ops


def draft_pass(
    config: DrafterConfig | ModelConfig, setting: Setting, rows_each: int, level: int = 1
) -> list[Op]:
    """One pass of a drafter over `rows_each` rows of every request, candidates included.

    `level` passes before it left their rows behind the committed ones.
    """
    setting = dataclasses.replace(setting, context=setting.context + (level - 1) * rows_each)
    if isinstance(config, ModelConfig):
        return target_pass(config, _drafting(setting), rows_each)
    ops = _draft_layers(config, setting, rows_each)
    return merged(_in_planes([*ops, *_draft_logits(config, setting, rows_each)]))


def extend_pass(config: DrafterConfig | ModelConfig, setting: Setting, rows_each: int) -> list[Op]:
    """The drafter's pass over what a cycle may have committed; the last row draws candidates."""
    if isinstance(config, ModelConfig):
        return draft_pass(config, setting, rows_each)
    rows, count = setting.batch * rows_each, len(config.aux_layers)
    precision = setting.precision
    whole = dataclasses.replace(precision, draft_bits=precision.extend_bits)
    ops = []
    if config.fc_norm or config.norm_before_fc:
        ops.append(norm("norms of states", rows, count * config.target_hidden_size))
    if config.fused:
        width = count * config.target_hidden_size
        ops.append(
            linear("fusion of states", width, config.hidden_size, rows, precision.extend_bits)
        )
    every, last = dataclasses.replace(setting, precision=whole), config.num_layers == 1
    ops += _draft_layers(config, every, rows_each, setting if last else None)
    return merged(_in_planes([*ops, *_draft_logits(config, setting, 1)]))


def _in_planes(ops: Sequence[Op]) -> list[Op]:
    """The same where 8-bit layers cut their rows in planes, in a launch of their own.

    Behind a norm alone, as gates and ups are, the norm's launch does it (`eyas.kernels.planes`).
    """
    return [
        dataclasses.replace(op, launches=2)
        if op.work is Work.LINEAR and op.layer and op.layer[2] == 8 and not op.normed
        else op
        for op in ops
    ]


def _drafting(setting: Setting) -> Setting:
    """The setting in which a drafter's network runs, with its weights' bits."""
    own = setting if setting.sharded_drafter else setting.alone
    precision = dataclasses.replace(own.precision, weight_bits=own.precision.draft_bits)
    return dataclasses.replace(own, precision=precision)


def _draft_layers(
    config: DrafterConfig, setting: Setting, rows_each: int, last: Setting | None = None
) -> list[Op]:
    """Embedding, perhaps in shares, and layers; with `last` MLPs of last rows alone, set so."""
    rows, hidden, layers = setting.batch * rows_each, config.hidden_size, config.layers()
    ops = _embedding(rows, hidden, 1 if config.own_embedding else setting.ranks)
    kept = 1 if last else rows_each
    for layer in range(config.num_layers):
        width = hidden if layer else 2 * hidden
        ops += mixing_ops(layers, layer, _drafting(setting), rows_each, width)
        ops += mlp_ops(layers, layer, _drafting(last or setting), kept)
    return [*ops, norm("final norm", setting.batch * kept, hidden)]


def _draft_logits(config: DrafterConfig, setting: Setting, rows_each: int) -> list[Op]:
    """Of a drafter without a head of its own by the target's, which lies in shares."""
    own = _drafting(setting) if config.own_head else setting
    rows, bits = setting.batch * rows_each, own.precision.weight_bits
    return logits(rows, config.hidden_size, config.draft_vocab_size, own.ranks, bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The operations of a cycle by stage."""

    draft: tuple[Op, ...]
    verify: tuple[Op, ...]
    extend: tuple[Op, ...]


def _books(name: str, launches: int, times: int = 1) -> Op:
    """Work outside of networks and draws, whose time a profile has as one number."""
    return Op(name=name, component=METADATA, work=Work.FIXED, launches=launches, times=times)


def plain_step(config: ModelConfig, setting: Setting) -> list[Op]:
    """A step of plain decoding."""
    return [*target_pass(config, setting), _books(STEP_BOOKS, STEP_LAUNCHES)]


def cycle_ops(
    target: ModelConfig,
    drafter: DrafterConfig | ModelConfig | None,
    spec: SpeculationConfig,
    setting: Setting,
) -> Cycle:
    """A whole cycle; without a drafter's network, drafting costs bookkeeping alone."""
    states = 0
    if setting.capture and isinstance(drafter, DrafterConfig):
        states = len(drafter.aux_layers)
    tree = spec.eagle_topk > 1
    nodes = dataclasses.replace(setting, tree=tree)
    verify = target_pass(target, nodes, spec.num_nodes, states)
    if drafter is None:
        books = _books(CYCLE_BOOKS, STEP_LAUNCHES + NGRAM_LAUNCHES)
        return Cycle(draft=(), verify=(*verify, books), extend=())
    own_model = isinstance(drafter, ModelConfig)
    launches = STEP_LAUNCHES + DRAFT_LAUNCHES + (MODEL_LAUNCHES if own_model else 0)
    if tree:
        launches += TREE_LAUNCHES + (states > 0)
    verify.append(_books(CYCLE_BOOKS, launches))
    levels = range(1, spec.num_steps)
    draft = [op for n in levels for op in draft_pass(drafter, nodes, spec.eagle_topk, n)]
    if levels:
        draft.append(_books(LEVEL_BOOKS, own_model + tree, len(levels)))
    if setting.ranks > 1:
        draft.append(collective("share of the draft", setting.batch * spec.num_nodes * 8))
    extend = extend_pass(drafter, setting, spec.depth + 1)
    return Cycle(draft=tuple(merged(draft)), verify=tuple(verify), extend=tuple(extend))
