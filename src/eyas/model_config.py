"""Frozen dimensions and switches of targets and drafters, and what attention they ask for.

Says what a network is, not where it came from (`models/families.py` reads checkpoints' configs) nor
how it runs. A value that changes arithmetic stands here or is refused before it gets here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas.config import Strict, option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig(Strict):
    """Rotary embedding: base and, for `linear`, `llama3` and `yarn`, its frequency scaling.

    The scales of `yarn` (arXiv 2309.00071) are those of transformers: `mscale` and `mscale_all_dim`
    are DeepSeek's.
    """

    theta: float = option(10000.0, "base of the rotary frequencies")
    kind: str = option("default", "default, linear, llama3 or yarn")
    factor: float = option(1.0, "stretch of the context")
    low_freq_factor: float = option(1.0, "llama3: frequencies below are stretched fully")
    high_freq_factor: float = option(4.0, "llama3: frequencies above are left alone")
    original_max_position: int = option(8192, "llama3, yarn: context before the stretch")
    beta_fast: float = option(32.0, "yarn: pairs that turn more often are left alone")
    beta_slow: float = option(1.0, "yarn: pairs that turn less often are stretched fully")
    truncate: bool = option(True, "yarn: whether these bounds are rounded to whole pairs")
    mscale: float = option(0.0, "yarn: weight of log(factor) in the tables' factor; 0: none given")
    mscale_all_dim: float = option(0.0, "yarn: the same for all dimensions; 0: none given")
    attention_factor: float = option(0.0, "yarn: factor of the tables; 0: by factor and mscales")

    def __post_init__(self) -> None:
        require(
            self.kind in ("default", "linear", "llama3", "yarn"),
            f"rope scaling {self.kind!r}",
            "only default, linear, llama3 and yarn are implemented",
            "use a checkpoint with one of these",
        )

    @property
    def table_factor(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._stretch(self.mscale) / self._stretch(self.mscale_all_dim)
        return self._stretch(1.0)

    @property
    def score_factor(self) -> float:
        """Factor by which DeepSeek's attention multiplies its scores on top."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return self._stretch(self.mscale_all_dim) ** 2

    def _stretch(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape(Strict):
    """What a network asks of an attention backend and of its KV pool.

    With `latent` the pool keeps keys alone, and a position's value is the first `value_dim` numbers
    of its key: multi-head latent attention in absorbed form, one KV head for all query heads.
    """

    num_layers: int
    num_kv_heads: int
    """On this rank."""
    key_dim: int
    value_dim: int
    scale: float
    """Factor of the scores before the softmax."""
    latent: bool = False
    windows: tuple[int, ...] = ()
    """Per layer: a row sees this many latest positions, its own included; 0: all. Empty: all.

    A window is no smaller than a draft tree: among the nodes of one pass ancestry alone decides.
    """

    @classmethod
    def heads(cls, num_layers: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
        """Ordinary (grouped-query) attention over heads of one size."""
        return cls(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
        )

    def window(self, layer: int) -> int:
        """Positions a row of `layer` sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def distinct_windows(self) -> tuple[int, ...]:
        """The windows that layers have, each once."""
        return tuple(sorted(set(self.windows))) or (0,)

    @property
    def values_per_position(self) -> int:
        """Numbers the pool keeps for one position of one layer."""
        return self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig(Strict):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int
    """Width of the compressed query; 0: queries are projected directly."""
    kv_lora_rank: int
    nope_dim: int
    """Dimensions of a query or key head without rotary embedding."""
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    """Of the two norms inside; not the network's own."""
    interleaved: bool = True
    """Whether rotary pairs lie side by side in the checkpoint."""
    scale: float
    """Factor of the scores: (nope_dim + rope_dim) ** -0.5, times `RopeConfig.score_factor`."""

    def attention_shape(self, num_layers: int) -> AttentionShape:
        """Every rank keeps the whole latent: it serves all heads."""
        return AttentionShape(
            num_layers=num_layers,
            num_kv_heads=1,
            key_dim=self.kv_lora_rank + self.rope_dim,
            value_dim=self.kv_lora_rank,
            scale=self.scale,
            latent=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(Strict):
    """Routed experts instead of the MLP in some layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one routed expert."""
    shared_size: int = 0
    """Intermediate size of the shared experts together; 0: none."""
    scoring: str = "softmax"
    """`softmax` or `sigmoid` over the experts' router logits, float32."""
    float32_router: bool = False
    """Whether the logits too are computed in float32, from float32 weights."""
    normalize: bool = True
    """Whether the chosen weights are divided by their sum."""
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    """A group's score: `max` (DeepSeek-V2) or `top2`, the sum of its two best (V3)."""
    correction_bias: bool = False
    """Whether a bias is added to the scores that choose experts, but not to their weights."""
    scaling_factor: float = 1.0
    sparse_layers: tuple[bool, ...] = ()
    """Per layer: whether it has experts."""

    def __post_init__(self) -> None:
        require(
            self.num_experts % self.num_groups == 0 and self.topk_groups <= self.num_groups,
            f"{self.num_experts} experts, the best {self.topk_groups} of {self.num_groups} groups",
            "groups are of one size, and no more are chosen than there are",
            "check n_routed_experts, n_group and topk_group in config.json",
        )
        eligible = self.num_experts // self.num_groups * self.topk_groups
        require(
            self.top_k <= eligible,
            f"{self.top_k} experts a token of {eligible} that may be chosen",
            "a token's experts are different ones",
            "check num_experts_per_tok in config.json",
        )
        require(
            self.group_score == "max" or self.num_experts >= 2 * self.num_groups,
            f"{self.num_experts} experts in {self.num_groups} groups scored by their best two",
            "a group has two experts at least",
            "check n_routed_experts and n_group in config.json",
        )
        require(
            self.scoring in ("softmax", "sigmoid") and self.group_score in ("max", "top2"),
            f"experts scored by {self.scoring} and groups by {self.group_score}",
            "only softmax and sigmoid, max and top2 are implemented",
            "use a checkpoint with these",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Strict):
    """Dimensions of a decoder of pre-norm blocks: attention of one kind, MLP or experts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for none; empty: none anywhere."""
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    prefix: str = ""
    """Before every tensor name of the checkpoint."""
    passed_over: tuple[str, ...] = ()
    """How names of tensors begin that the checkpoint holds beside this network's."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads over {self.num_kv_heads} KV heads",
            "query heads must be a multiple of KV heads",
            "check num_attention_heads and num_key_value_heads in config.json",
        )

    def default_aux_layers(self) -> tuple[int, ...]:
        """Boundaries captured for EAGLE-3: inputs of layers 2, L/2 and L-3 (EAGLE reference).

        Raises `ConfigError` for targets so shallow that these are not three ascending layers.
        """
        layers = (2, self.num_layers // 2, self.num_layers - 3)
        require(
            layers[0] < layers[1] < layers[2],
            f"a target of {self.num_layers} layers",
            f"its states would be captured before layers {layers}, which must ascend",
            "name the layers to capture",
        )
        return layers

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.mla.rope_dim if self.mla is not None else self.head_dim

    def attention_shape(self, num_ranks: int = 1) -> AttentionShape:
        """What one of `num_ranks` tensor-parallel ranks keeps and computes."""
        if self.mla is not None:
            return self.mla.attention_shape(self.num_layers)
        return AttentionShape(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads // num_ranks,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            windows=self.windows,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.moe is not None and self.moe.sparse_layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig(Strict):
    """Dimensions and switches of an EAGLE-3 drafter.

    `aux_layers` are boundaries: i means the input of target layer i (i = L: after the last).
    `norm_output` feeds the normed hidden state back (the vLLM meaning, "EAGLE-3.1").
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    aux_layers: tuple[int, ...]
    num_layers: int = 1
    """The first reads the embedding beside a hidden state; others are ordinary decoder layers."""
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    fused: bool = True
    """Whether a matrix fuses target states; if not, what the target's last norm gives is read."""
    fc_bias: bool = False
    fc_norm: bool = False
    """A norm for each captured state before the fusing matrix."""
    norm_before_fc: bool = False
    """One norm over all captured states side by side instead."""
    norm_before_residual: bool = False
    """The first layer's residual stream starts at the normed hidden state."""
    norm_output: bool = False
    last_norm: bool = True
    """Whether there is a norm before the head."""
    own_embedding: bool = False
    own_head: bool = True
    """Otherwise the target's, over the whole vocabulary."""
    logit_scale: float = 1.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for none; empty: none anywhere."""
    mla: MLAConfig | None = None
    """Attention of the draft layer, instead of `num_kv_heads` heads of `head_dim`."""

    def __post_init__(self) -> None:
        require(
            not (self.fc_norm and self.norm_before_fc),
            "fc_norm with norm_before_fc",
            "captured states are normed one by one or together",
            "use a drafter with one of them",
        )
        borrows = not (self.own_embedding and self.own_head and self.fused)
        require(
            not borrows or self.hidden_size == self.target_hidden_size,
            f"drafter of hidden size {self.hidden_size} for {self.target_hidden_size}",
            "only one of the target's hidden size can borrow its embedding, head or last norm",
            "use a drafter with tensors of its own",
        )
        require(
            self.own_head or self.draft_vocab_size == self.vocab_size,
            f"drafter without a head and {self.draft_vocab_size} of {self.vocab_size} tokens",
            "the target's head scores its whole vocabulary",
            "use a drafter with a head of its own",
        )
        require(
            self.mla is None or self.num_layers == 1,
            f"drafter of {self.num_layers} layers with latent attention",
            "only one such layer is implemented",
            "use a drafter of one layer",
        )

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.mla.rope_dim if self.mla is not None else self.head_dim

    def attention_shape(self) -> AttentionShape:
        """What the draft layers keep and compute; every rank holds all of it."""
        return self.layers().attention_shape()

    def layers(self) -> ModelConfig:
        """The layers as those of a decoder; the first reads more than such a layer does."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position=self.max_position,
            rms_norm_eps=self.rms_norm_eps,
            rope=self.rope,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            windows=self.windows,
            mla=self.mla,
        )
