"""What the machine and a checkpoint are, and whether the one runs the other: `eyas info`.

Everything is found out without reading weights: from configs, from the headers of files, and from
networks without memory. What is broken in a folder is part of the answer, as plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from eyas.checkpoint import read_config, resolve, tensor_stream
from eyas.config import DrafterOptions, EngineConfig, SpeculationConfig
from eyas.engine.admission import admit, available
from eyas.engine.budget import Budget, Case, predict
from eyas.engine.engine import plan_case
from eyas.engine.networks import CheckpointSource
from eyas.engine.ranks import Ranks, take_part
from eyas.engine.rehearsal import hollow
from eyas.errors import CheckpointError, EyasError
from eyas.fingerprint import fingerprint
from eyas.model_config import ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.families import READERS, model_config
from eyas.models.registry import fill_target, resolve_device, resolve_dtype
from eyas.quantised import quantization_config, scheme_of
from eyas.report.describe import Facts, active_parameters, target_facts
from eyas.report.drafters import Search, fitting, is_drafter, lone_drafter
from eyas.tokenizer import Tokenizer

EXAMPLE_TOKENS = 1024
"""Of the one request whose memory is said where pools take it as they are written."""
SMALL = 16
"""Tensors of so many numbers are read: some are sizes."""

T = TypeVar("T")


def machine(config: EngineConfig) -> Facts:
    """The fingerprint, and the device and type an engine would take."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    return fingerprint() | {"device": str(device), "dtype": type_name(dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A model, how it would run, and what speaks against it."""

    model: str
    drafter: str | None
    config: EngineConfig
    speculation: SpeculationConfig | None = None
    options: DrafterOptions | None = None
    refusals: list[str] = field(default_factory=list)

    def answer(self) -> Facts:
        """What the model is: `name`, `folder`, `kind`, `checkpoint`, `runs` and `refusals`.

        A target also has its `memory`, `ranks` (started and compared, if there are several),
        `drafters` (shipped and given) and `drafting` (what would fit); a drafter has `fits`, what
        its target must be. Raises `CheckpointError` if nothing has the name.
        """
        answer: Facts = {"name": self.model, "folder": None, "kind": "unknown", "checkpoint": {}}
        folder = self._found()
        if folder is not None:
            answer["folder"] = str(folder)
            answer |= self._of_folder(folder)
        return answer | {"runs": not self.refusals, "refusals": self.refusals}

    def _found(self) -> Path | None:
        """The folder; raises if there is nothing, None if what is there can't be opened."""
        try:
            return resolve(self.model, pickled=True)
        except CheckpointError as error:
            if not Path(self.model).expanduser().exists():
                raise
            self.refusals.append(str(error))
            return None

    def _of_folder(self, folder: Path) -> Facts:
        tensors = self._attempt(lambda: dict(sketches(folder))) or {}
        facts = files_of(folder) | stored_as(tensors)
        raw = self._attempt(lambda: read_config(folder))
        if raw is None:
            return {"checkpoint": facts}
        facts |= names_of(raw)
        if is_drafter(raw, tensors):
            found = self._attempt(lambda: lone_drafter(folder, raw, self.options)) or {}
            del facts["family"]
            return found | {"kind": "drafter", "checkpoint": facts | found.get("checkpoint", {})}
        target = self._attempt(lambda: model_config(raw))
        if target is None:
            return {"checkpoint": facts}
        facts |= target_facts(target) | {"quantisation": quantisation(raw)}
        return {"kind": "target", "checkpoint": facts} | self._of_target(folder, raw, target, facts)

    def _of_target(self, folder: Path, raw: Facts, target: ModelConfig, facts: Facts) -> Facts:
        """Adds to `facts`; drafters and memory of a target that could be built."""
        network = self._attempt(lambda: hollow(Decoder, target, torch.float32))
        if network is None:
            return {}
        total = sum(parameter.numel() for parameter in network.parameters())
        facts |= {"parameters": total, "active parameters": active_parameters(target, total)}
        if not self.refusals:
            self._attempt(lambda: fill_target(network, raw, sketches(folder)))
        self._attempt(lambda: Tokenizer.from_folder(folder))
        algorithm = self.speculation.algorithm if self.speculation else None
        search = Search(self.model, folder, target, algorithm, self.options)
        place, found = search.look(self.drafter)
        device = resolve_device(self.config.device)
        source = CheckpointSource(
            target=folder,
            drafter=place,
            dtype=resolve_dtype(self.config.dtype, device),
            options=self.options,
            deterministic=self.config.deterministic == "on",
        )
        wanted = self.config.tp > 1 and not self.refusals
        group = self._attempt(lambda: ranks(source, self.config)) if wanted else None
        case = self._attempt(lambda: plan_case(source, self.config, self.speculation, device))
        memory = None if case is None else self._memory(case)
        drafting = fitting(target)
        return {"memory": memory, "ranks": group, "drafters": found, "drafting": drafting}

    def _memory(self, case: Case) -> Facts | None:
        """The budget of one rank, with the pages that it would get.

        Dimensions that contradict each other show in the rehearsal.
        """
        try:
            budget = self._attempt(lambda: predict(case))
        except (RuntimeError, OverflowError) as e:
            reason = str(e).splitlines()[0]
            self.refusals.append(f"config.json: a pass over its network fails ({reason})")
            return None
        if budget is None:
            return None
        admitted = self._attempt(lambda: admit(case))
        pages = budget.num_pages if admitted is None else admitted.num_pages
        return memory_facts(case, budget.with_pages(pages))

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """What `action` gives; what it refuses is noted, once."""
        try:
            return action()
        except EyasError as error:
            if str(error) not in self.refusals:
                self.refusals.append(str(error))
            return None


def memory_facts(case: Case, budget: Budget) -> Facts:
    """A budget as plain values, in bytes."""
    config, shape = case.config, case.target.attention_shape(case.num_ranks)
    kv_type = torch.float32 if case.device.type == "cpu" else case.dtype
    parts = [{"name": n, "bytes": size, "remark": r} for n, size, r in budget.rows() if size]
    tokens = min(EXAMPLE_TOKENS, config.context_length)
    written = case.change(max_running_requests=1, context_length=tokens, num_pages=0).num_pages
    return {
        "device": case.device.type,
        "dtype": type_name(case.dtype),
        "tp": case.num_ranks,
        "available": available(case),
        "total": budget.total,
        "parts": parts,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "algorithm": case.speculation.algorithm,
        "num_pages": budget.num_pages,
        "pages_for_every_request": case.change(num_pages=0).num_pages,
        "page_size": config.page_size,
        "touched": {"tokens": tokens, "bytes": budget.touched(min(written, budget.num_pages))},
        "bytes_per_position": shape.num_layers * shape.values_per_position * kv_type.itemsize,
    }


def ranks(source: CheckpointSource, config: EngineConfig) -> Facts:
    """How the ranks of `config.tp` see themselves; they are started, compared and ended.

    Raises `ConfigError` as `Ranks` does.
    """
    seat = take_part(source, config.tp, config.device)
    started = Ranks(source, config.tp, config.device, seat)
    started.close()
    facts: Facts = {f"rank {i}": one.where for i, one in enumerate(started.prints)}
    facts |= started.prints[0].results | started.prints[0].speed
    return facts | {"differences": [str(mismatch) for mismatch in started.mismatches]}


def sketches(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint as shapes and types alone; small ones as they are."""
    for name, tensor in tensor_stream(folder):
        yield name, tensor if tensor.numel() <= SMALL else tensor.to("meta")


def files_of(folder: Path) -> Facts:
    """What files of weights there are."""
    kinds = {"safetensors": "*.safetensors", "pickled": "*.bin", "GGUF": "*.gguf"}
    found = {kind: sorted(folder.glob(pattern)) for kind, pattern in kinds.items()}
    words = [f"{len(files)} {kind}" for kind, files in found.items() if files]
    total = sum(file.stat().st_size for files in found.values() for file in files)
    return {"files": ", ".join(words) or "none of weights", "bytes on disk": total}


def stored_as(tensors: dict[str, torch.Tensor]) -> Facts:
    """Tensors and bytes of each type."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[type_name(tensor.dtype)] += tensor.nbytes
    return {"tensors": len(tensors), "stored types": dict(sizes.most_common())}


def names_of(raw: Facts) -> Facts:
    """Architecture, and the family that reads it."""
    given = raw.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    reader = next((READERS[name] for name in names if name in READERS), None)
    family = "none that runs here" if reader is None else reader.__module__.rpartition(".")[2]
    known = ", ".join(names) or str(raw.get("model_type", "unknown"))
    return {"architecture": known, "family": family}


def quantisation(raw: Facts) -> str:
    """How weights are quantised, in words."""
    found = quantization_config(raw)
    return "none" if found is None else scheme_of(found).summary


def num_parameters(config: ModelConfig) -> int:
    """Parameters of a target; tied ones count once."""
    return sum(p.numel() for p in hollow(Decoder, config, torch.float32).parameters())


def type_name(dtype: torch.dtype) -> str:
    """A type without torch's name before it."""
    return str(dtype).removeprefix("torch.")
