"""Plan, run, commit, emit: the engine loop and the `LLM` facade over it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from eyas.checkpoint import read_config, resolve
from eyas.config import (
    DrafterOptions,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
    require,
    require_request,
)
from eyas.distributed.group import SOLO
from eyas.engine.admission import admit
from eyas.engine.budget import Budget, Case, predict
from eyas.engine.drafters import Network
from eyas.engine.networks import CheckpointSource, FolderSource
from eyas.engine.ranks import Ranks, take_part
from eyas.engine.request import FinishReason, Request, Status, check_params
from eyas.engine.runner import Runner, Underway, auto_pages
from eyas.engine.scheduler import Scheduler
from eyas.errors import RequestError
from eyas.kv.pool import PageAllocator
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.families import model_config
from eyas.models.registry import resolve_device, resolve_dtype
from eyas.speculate.checkpoints import choose_drafter, drafter_kind, same_vocabulary
from eyas.speculate.drafter import Drafter
from eyas.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int]
    """Written tokens; a stop token, if one ended the request, is the last."""
    text: str
    """Text of the tokens without special tokens, stop token and stop string."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    accept_lengths: list[int]
    """Tokens committed by each cycle, bonus included."""


class Engine:
    """Requests in, tokens out; one step at a time."""

    def __init__(
        self,
        target: Decoder,
        tokenizer: Tokenizer,
        *,
        drafter: Network | Drafter | None = None,
        speculation: SpeculationConfig | None = None,
        config: EngineConfig | None = None,
        progress: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Build pools, state and graphs; `drafter`: a network, a model or a `Drafter`.

        With `ranks` both networks are theirs, and all ranks run what this engine runs.
        """
        self.speculation = speculation or SpeculationConfig(algorithm="NONE")
        self.config = resolve_engine(config or EngineConfig(), self.speculation, target.config)
        require(
            self.config.tp == target.group.size,
            f"tp={self.config.tp}",
            f"the target's network is that of {target.group.size} ranks",
            f"give tp={target.group.size}",
        )
        self.tokenizer = tokenizer
        num_pages = self.config.num_pages
        self.runner = (
            ranks.open(self.config, self.speculation)
            if ranks
            else Runner(target, drafter, self.config, self.speculation, num_pages)
        )
        self.scheduler = Scheduler(self.config, self.speculation, PageAllocator(num_pages))
        self.runner.warm_up(progress)
        if warning := self.runner.row_check.warning(self.config.deterministic):
            Console(stderr=True, soft_wrap=True).print(f"warning: {warning}", style="yellow")
        on_gpu = self.runner.device.type == "cuda"
        self.overlap = on_gpu if self.config.overlap == "auto" else self.config.overlap == "on"
        self._underway: Underway | None = None
        self._next_id = 0

    def add(self, prompt: Sequence[int], params: SamplingParams, stream: bool = False) -> Request:
        """Queue a prompt; raises `RequestError`, touching nothing, if it can't be served."""
        ids = self.check(prompt, params)
        eos = () if params.ignore_eos else self.tokenizer.eos_ids
        wants_text = stream or bool(params.stop)
        request = Request(
            id=self._next_id,
            prompt=ids,
            params=params,
            seed=self.config.seed if params.seed is None else params.seed,
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            max_length=self.config.context_length,
            detokenizer=self.tokenizer.detokenizer() if wants_text else None,
        )
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Run one step; returns the requests that got tokens.

        With overlap the step is started, and the tokens are those of the step before, which the
        device worked on meanwhile.
        """
        with self.runner.step():
            plan = self.scheduler.plan()
            before, self._underway = self._underway, None
            if not plan.is_empty:
                self._underway = self.runner.launch(plan)
            if not self.overlap or plan.is_empty:
                before, self._underway = self._underway or before, None
            return self.scheduler.commit(before.collect()) if before else []

    def abort(self, request: Request) -> None:
        """End a request; its pages are free at once, the others go on."""
        self.scheduler.abort(request)

    def output(self, request: Request) -> RequestOutput:
        """What a finished request wrote."""
        assert request.finish_reason is not None, f"request {request.id} has not ended"
        text = request.text
        if request.detokenizer is None:
            stopped = request.finish_reason is FinishReason.STOP
            text = self.tokenizer.decode(request.output[:-1] if stopped else request.output)
        return RequestOutput(
            prompt_token_ids=request.prompt,
            token_ids=list(request.output),
            text=text,
            finish_reason=request.finish_reason.value,
            accept_lengths=list(request.accept_lengths),
        )

    def check(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """The prompt's token ids; raises `RequestError` if it can't be served."""
        check_params(params)
        try:
            ids = tuple(operator.index(token) for token in prompt)
        except TypeError:
            raise RequestError(
                "prompt with a token that is no integer", "token ids are integers", "tokenise it"
            ) from None
        vocab, limit = self.runner.parts.target.config.vocab_size, self.config.context_length
        require_request(
            len(ids) > 0, "empty prompt", "a prompt needs at least one token", "give some text"
        )
        bad = next((t for t in ids if not 0 <= t < vocab), None)
        require_request(
            bad is None,
            f"token id {bad}",
            f"must lie in 0 .. {vocab - 1}",
            "tokenise with the target's tokenizer",
        )
        require_request(
            len(ids) < limit,
            f"prompt of {len(ids)} tokens",
            f"prompt and answer share a context of {limit} tokens",
            "shorten the prompt or raise context_length",
        )
        longest = min(len(ids) + params.max_tokens, limit)
        pages, have = self.scheduler.pages_for(longest), self.config.num_pages - 1
        require_request(
            pages <= have,
            f"request of up to {longest} tokens",
            f"it may need {pages} pages of {self.config.page_size}, the pool has {have}",
            "lower max_tokens or raise num_pages",
        )
        return ids


class LLM:
    """Load a target and its drafter, then generate.

    `drafter` is the checkpoint of an EAGLE-3 network or of a small language model with the target's
    tokenizer, or `auto` for the one shipped for this target (none: plain decoding, unless
    `speculation` names an algorithm without weights). With `config.tp` > 1 other
    processes hold the other ranks; a script then needs `if __name__ == "__main__":`. Under torchrun
    the constructor returns on rank 0 alone: elsewhere it serves, and then ends the process.
    """

    def __init__(
        self,
        model: str,
        *,
        drafter: str | None = "auto",
        speculation: SpeculationConfig | None = None,
        config: EngineConfig | None = None,
        drafter_options: DrafterOptions | None = None,
        progress: bool = False,
        engines: int = 1,
    ) -> None:
        """Raises `CapacityError` before anything is loaded that does not fit.

        `engines` is how many will share the weights, this one and its siblings: each has its pools.
        `facts` are then what results depend on: types, short hashes of both checkpoints.
        """
        config = config or EngineConfig()
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        folder, dummy = resolve(model), config.load_format == "dummy"
        speaker = resolve(config.tokenizer) if config.tokenizer else folder
        self.tokenizer = _tokenizer(speaker, dummy)
        algorithm = None if speculation is None else speculation.algorithm
        place = choose_drafter(drafter, model, algorithm)
        if place is not None and not dummy and drafter_kind(place) == "STANDALONE":
            same_vocabulary(self.tokenizer, Tokenizer.from_folder(place))
        fixed = config.deterministic == "on"
        weights = CheckpointSource(
            target=folder, drafter=place, dtype=dtype, options=drafter_options, deterministic=fixed
        )
        wants = algorithm in (None, "EAGLE3") and bool(drafter)
        source: FolderSource = weights.dummy(wants) if dummy else weights
        self.facts = source.facts(device)
        seat = take_part(source, config.tp, config.device) if config.tp > 1 else None
        self.case = plan_case(source, config, speculation, device, engines)
        speculation, config = self.case.speculation, admit(self.case)
        self.ranks = Ranks(source, config.tp, config.device, seat) if config.tp > 1 else None
        networks = self.ranks.networks if self.ranks else source.load(device, SOLO)
        self.target, self.drafter = networks.target, networks.drafter
        self.target_config: ModelConfig = self.target.config
        self.engine = Engine(
            self.target,
            self.tokenizer,
            drafter=self.drafter,
            speculation=speculation,
            config=config,
            progress=progress,
            ranks=self.ranks,
        )

    def sibling(self, speculation: SpeculationConfig, config: EngineConfig | None = None) -> LLM:
        """Another engine over the same weights, with its own pools."""
        other = object.__new__(LLM)
        other.tokenizer, other.target = self.tokenizer, self.target
        other.target_config, other.drafter = self.target_config, self.drafter
        other.ranks, other.case, other.facts = self.ranks, self.case, self.facts
        other.engine = Engine(
            self.target,
            self.tokenizer,
            drafter=self.drafter,
            speculation=speculation,
            config=config or self.engine.config,
            ranks=self.ranks,
        )
        return other

    def budget(self) -> Budget:
        """The memory that was planned with, of one rank."""
        return predict(self.case.change(num_pages=self.engine.config.num_pages))

    def close(self) -> None:
        """End the processes of other ranks; nothing can be generated afterwards if there were any.

        Where it is not called they end with this object or with the process.
        """
        if self.ranks:
            self.ranks.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (text or token ids), in order; they share batches.

        Every prompt is checked before the first runs; `RequestError` names the one at fault.
        """
        tokens = [self._tokens(prompt) for prompt in prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(tokens)
        require_request(
            len(params) == len(tokens),
            f"{len(params)} sampling parameters for {len(tokens)} prompts",
            "each prompt takes one",
            "give one for all or one each",
        )
        for ids, one in zip(tokens, params, strict=True):
            self.engine.check(ids, one)
        requests = [self.engine.add(t, p) for t, p in zip(tokens, params, strict=True)]
        try:
            with Progress(disable=not progress, transient=True) as bar:
                task = bar.add_task("generating", total=len(requests))
                while self.engine.scheduler.has_work:
                    touched = self.engine.step()
                    bar.advance(task, sum(r.status is Status.FINISHED for r in touched))
        finally:
            for request in requests:
                self.engine.abort(request)
        return [self.engine.output(r) for r in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield an answer's text in pieces; closing the iterator aborts the request."""
        params = params or SamplingParams()
        request = self.engine.add(self._tokens(prompt), params, stream=True)
        shown = 0
        try:
            while True:
                safe = request.safe_text_length()
                if safe > shown:
                    yield request.text[shown:safe]
                    shown = safe
                elif request.status is Status.FINISHED:
                    return
                else:
                    self.engine.step()
        finally:
            self.engine.abort(request)

    def _tokens(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _tokenizer(folder: Path, dummy: bool) -> Tokenizer:
    """The checkpoint's, or ids as text for a made-up model that has none."""
    if dummy and not (folder / "tokenizer.json").is_file():
        return Tokenizer.of_ids(model_config(read_config(folder)).vocab_size)
    return Tokenizer.from_folder(folder)


def plan_case(
    source: FolderSource,
    config: EngineConfig,
    speculation: SpeculationConfig | None,
    device: torch.device,
    engines: int = 1,
) -> Case:
    """What is to be loaded; its number of pages is as the user gave it.

    Without `speculation` a drafter there is drafts as it was trained to.
    """
    target, drafter = source.configs()
    if speculation is None:
        kinds = {DrafterConfig: "EAGLE3", ModelConfig: "STANDALONE"}
        speculation = SpeculationConfig(algorithm=kinds.get(type(drafter), "NONE"))
    resolved = resolve_engine(config, speculation, target)
    return Case(
        target=target,
        drafter=drafter,
        config=dataclasses.replace(resolved, num_pages=config.num_pages),
        speculation=speculation,
        device=device,
        dtype=source.dtype,
        engines=engines,
    )


def resolve_engine(
    config: EngineConfig, speculation: SpeculationConfig, model: ModelConfig
) -> EngineConfig:
    """Fill in the automatic values of `config` for a model."""
    longest = model.max_position
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        require(
            not isinstance(field.default, int) or isinstance(value, int),
            f"{field.name}={value!r}",
            "must be an integer",
            f"give a value such as {field.default}",
        )
    require(
        0 <= config.seed < 2**63,
        f"seed={config.seed}",
        "must lie in 0 .. 2**63 - 1",
        "give another seed",
    )
    require(
        config.context_length <= longest,
        f"context_length={config.context_length}",
        f"the model's positions end at {longest}",
        f"give at most {longest}",
    )
    config = dataclasses.replace(config, context_length=config.context_length or longest)
    if config.num_pages == 0:
        config = dataclasses.replace(config, num_pages=auto_pages(config, speculation))
    return config
