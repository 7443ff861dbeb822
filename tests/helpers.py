"""Tiny models, scripted drafters and a driver that checks the engine after every step.

The networks are random and a few kilobytes large; their widths are multiples of 32, for which the
row tile of `layers/linear.py` holds. A `ScriptedDrafter` knows the text that plain decoding writes
and drafts it rightly or wrongly on purpose. It reads values on the host, which engine code may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from eyas.batch import ForwardMode
from eyas.config import EngineConfig, SamplingParams, SpeculationConfig
from eyas.engine.drafters import Network
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Status
from eyas.kernels.accept import Settled, Slots
from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, MLAConfig, ModelConfig, MoEConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import allocate
from eyas.speculate.accept import accept
from eyas.speculate.drafter import Committed, DraftContext, Drafter
from eyas.speculate.tree import Draft, chain_draft, tree_draft
from eyas.tokenizer import Tokenizer

CPU = torch.device("cpu")
VOCAB = 64
NONE = SpeculationConfig(algorithm="NONE")
TREES = (
    SpeculationConfig(num_steps=2, eagle_topk=2, num_draft_tokens=5),
    SpeculationConfig(num_steps=3, eagle_topk=3, num_draft_tokens=12),
    SpeculationConfig(num_steps=5, eagle_topk=4, num_draft_tokens=16),
)
"""Three tree shapes: shallow, bushy, and deep with most candidates dropped."""
LATENT = MLAConfig(
    q_lora_rank=32, kv_lora_rank=32, nope_dim=32, rope_dim=16, value_dim=32, scale=48**-0.5
)
"""DeepSeek's attention for `tiny_target` and `tiny_drafter`."""


def chain(drafts: int, algorithm: str = "EAGLE3", **rest: Any) -> SpeculationConfig:
    """A chain of `drafts` tokens."""
    return SpeculationConfig.chain(drafts, algorithm, **rest)


def tiny_experts(num_layers: int = 4) -> MoEConfig:
    """DeepSeek-V3's routing over 8 experts, in every layer but the first."""
    return MoEConfig(
        num_experts=8,
        top_k=3,
        intermediate_size=32,
        shared_size=64,
        scoring="sigmoid",
        float32_router=True,
        num_groups=4,
        topk_groups=2,
        group_score="top2",
        correction_bias=True,
        scaling_factor=1.5,
        sparse_layers=(False, *[True] * (num_layers - 1)),
    )


def randomise(module: nn.Module, seed: int, std: float) -> None:
    """Fill the weights from a generator of its own: ones for norms, normal for the rest."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator) * std
        if parameter.dim() == 1:
            values = 1 + values
        parameter.data.copy_(values)


def tiny_target(
    dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device = CPU, **changes: Any
) -> Decoder:
    """A random Llama of 4 layers, 64 tokens, hidden size 64, 4 heads over 2 KV heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 256,
    }
    module = Decoder(ModelConfig(**{**values, **changes}), row_tile(device, dtype))
    allocate(module, dtype, device)
    randomise(module, seed, 0.15)
    return module.eval()


def tiny_drafter(
    dtype: torch.dtype = torch.float32, seed: int = 1, device: torch.device = CPU, **changes: Any
) -> Eagle3:
    """A random drafter for `tiny_target`, with 40 of its 64 tokens."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": 40,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 256,
        "aux_layers": (1, 2, 3),
        "fc_norm": True,
        "norm_output": True,
    }
    config = DrafterConfig(**{**values, **changes})
    module = Eagle3(config, row_tile(device, dtype))
    allocate(module, dtype, device)
    randomise(module, seed, 0.15)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(config.vocab_size, generator=generator)
    module.target_ids = order[: config.draft_vocab_size].sort().values.to(device)
    return module.eval()


def tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 7, device: torch.device = CPU, **changes: Any
) -> Decoder:
    """A random language model of 2 narrow layers with the vocabulary of `tiny_target`."""
    values = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}
    return tiny_target(dtype, seed, device, **{**values, "head_dim": 32, **changes})


@cache
def toy_backend(size: int = VOCAB) -> tokenizers.Tokenizer:
    """Token 0 is special; 1 and 2 are the two bytes of é; the others are a..e, pairs, triples.

    Texts are ambiguous on purpose: many stop strings begin or end inside a token.
    """
    letters = "abcde"
    pieces = ["<end>", "Ã", "©", "Ġ", *letters]
    pieces += [a + b for a in letters for b in letters]
    pieces += [a + b + c for a in letters for b in letters for c in letters]
    vocab = {piece: i for i, piece in enumerate(pieces[:size])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


@cache
def toy_tokenizer(eos: tuple[int, ...] = (), size: int = VOCAB) -> Tokenizer:
    """Our tokenizer over `toy_backend`, without a chat template."""
    return Tokenizer(toy_backend(size), None, {}, eos)


def make_engine(
    target: Decoder,
    drafter: Network | Drafter | None = None,
    speculation: SpeculationConfig = NONE,
    *,
    eos: tuple[int, ...] = (),
    **config: Any,
) -> Engine:
    """An engine over `target` with the toy tokenizer."""
    return Engine(
        target,
        toy_tokenizer(eos, min(target.config.vocab_size, 158)),
        drafter=drafter,
        speculation=speculation,
        config=EngineConfig(**{"device": target.embed.weight.device.type, **config}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to come: it joins at step `join` and is aborted before step `abort`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    join: int = 0
    abort: int | None = None
    stream: bool = False


def check(engine: Engine) -> None:
    """Integrity of pages and slots, and the invariants of every request."""
    scheduler = engine.scheduler
    scheduler.check_integrity()
    for request in scheduler.active:
        assert request.finish_reason is None, "a finished request holds a slot"
        assert len(request.output) < request.params.max_tokens
        held = len(request.pages) * engine.config.page_size
        if request.status is Status.RUNNING:
            assert held >= request.kv_len, "a running request has tokens without pages"
    kv_lens = engine.runner.parts.state.kv_lens.tolist()
    for request in scheduler.active:
        if request.status is Status.RUNNING:
            most = request.kv_len + request.num_coming
            assert request.kv_len <= kv_lens[request.slot] <= most, "KV is committed tokens - 1"
            assert engine.overlap or request.num_coming == 0, "a step is still under way"


def run_all(
    engine: Engine, jobs: Sequence[Job], after_step: Callable[[], None] | None = None
) -> list[Request]:
    """Run `jobs` to their ends, checking the engine after every step; returns their requests."""
    requests: list[Request | None] = [None] * len(jobs)
    step = 0
    while engine.scheduler.has_work or any(r is None for r in requests):
        for i, job in enumerate(jobs):
            request = requests[i]
            if request is None and job.join <= step:
                requests[i] = engine.add(job.prompt, job.params, stream=job.stream)
            elif request is not None and job.abort == step:
                engine.abort(request)
                check(engine)
        engine.step()
        check(engine)
        if after_step is not None:
            after_step()
        step += 1
        assert step < 20_000, "the engine makes no progress"
    assert engine.scheduler.allocator.num_free == engine.config.num_pages - 1, "pages leaked"
    finished = [r for r in requests if r is not None]
    assert all(r.status is Status.FINISHED for r in finished)
    return finished


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    """What each request wrote."""
    return [r.output for r in requests]


def alone(target: Decoder, jobs: Sequence[Job], **config: Any) -> list[list[int]]:
    """The texts of `jobs` by plain decoding, each alone in a fresh engine: the reference."""
    texts = []
    for job in jobs:
        engine = make_engine(target, max_running_requests=1, **config)
        texts += outputs(run_all(engine, [Job(prompt=job.prompt, params=job.params)]))
    return texts


def random_prompts(
    lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB
) -> list[tuple[int, ...]]:
    """One random prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab, (n,), generator=generator).tolist()) for n in lengths]


class ScriptedDrafter:
    """Drafts the known continuation of each request, wherever `right(index)` says so.

    `texts` are whole sequences, prompt and output. A draft that shall be wrong is the right token
    plus one. With a tree, every level holds one child that continues the text, among decoys.
    """

    aux_layers: tuple[int, ...] = ()
    aux_size = 0
    needs_bound = True

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        speculation: SpeculationConfig,
        right: Callable[[int], bool] = lambda _: True,
        vocab: int = VOCAB,
    ) -> None:
        self.texts = [tuple(text) for text in texts]
        self.speculation, self.right, self.vocab = speculation, right, vocab
        width = speculation.eagle_topk * speculation.num_steps
        assert width == speculation.num_draft_tokens - 1, "one full level of children a step"

    def propose(self, context: DraftContext) -> Draft:
        """The chain, or the tree of true children and decoys."""
        drafts = [self._drafts(context, row) for row in range(len(context.slots))]
        tokens = torch.tensor(drafts, device=context.roots.device)
        topk, steps = self.speculation.eagle_topk, self.speculation.num_steps
        if topk == 1:
            return chain_draft(context.roots, context.kv_lens, tokens)
        parents = [0] * topk
        for step in range(1, steps):
            parents += [1 + (step - 1) * topk + self._place(step - 1)] * topk
        nodes = torch.tensor([parents] * len(drafts), device=context.roots.device)
        return tree_draft(context.roots, context.kv_lens, tokens, nodes, steps)

    def update(self, context: DraftContext, committed: Committed, mode: ForwardMode) -> None:
        """Nothing to keep."""

    def _place(self, step: int) -> int:
        """Which sibling carries the text at a level."""
        return (step + 1) % self.speculation.eagle_topk

    def _drafts(self, context: DraftContext, row: int) -> list[int]:
        end = int(context.kv_lens[row]) + 1
        known = tuple(context.history[context.slots[row], :end].tolist())
        assert known[-1] == int(context.roots[row]), "the root is the last known token"
        text = next((t for t in self.texts if t[:end] == known), known)
        topk, drafts = self.speculation.eagle_topk, []
        for step in range(self.speculation.num_steps):
            index = end + step
            token = text[index] if index < len(text) else 0
            level = [(token + 1 + i) % self.vocab for i in range(topk)]
            if self.right(index):
                level[self._place(step)] = token
            drafts += level
        return drafts


def fresh_slots(
    count: int,
    kv_lens: Sequence[int] | None = None,
    index: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Slots:
    """Rows of `count` requests in empty slots, two more than requests; histories of 100 tokens."""
    empty = torch.zeros(count + 2, dtype=torch.int64, device=device)
    return Slots(
        slots=torch.tensor(index or range(count), device=device),
        kv_lens=torch.tensor(kv_lens or [0] * count, device=device),
        all_kv_lens=empty.clone(),
        all_roots=empty.clone(),
        history=empty[:, None].repeat(1, 100),
    )


def accepted_of(draft: Draft, drawn: torch.Tensor) -> Settled:
    """What is accepted of a draft, whatever becomes of the slots."""
    return accept(draft, drawn, fresh_slots(drawn.shape[0]))
