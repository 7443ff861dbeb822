"""Which drafters fit a target, and what a drafter's folder is: parts of `eyas info`.

The shipped drafter is found by the target's name, another one is given; either is read by its
headers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.checkpoint import read_config, tensor_stream
from eyas.config import DrafterOptions
from eyas.engine.rehearsal import hollow
from eyas.errors import EyasError
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.families.reading import dimension, understood
from eyas.report.describe import Facts, drafter_facts, target_facts
from eyas.speculate.checkpoints import (
    SHIPPED,
    Format,
    choose_drafter,
    detect_format,
    drafter_config,
    drafter_kind,
    same_vocabulary,
)
from eyas.speculate.checkpoints.formats import flatten
from eyas.tokenizer import Tokenizer

DRAFTER_KEYS = {"speculators_model_type", "eagle_config", "draft_vocab_size"}
DRAFTER_TENSORS = {"fc.weight", "d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
DEPTHS = (64, 65)
"""Of stand-ins for an unknown target: a drafter whose layers differ takes EAGLE's default."""


@dataclass(frozen=True, slots=True)
class Search:
    """A target whose drafters are looked for, and how it would draft."""

    model: str
    folder: Path
    target: ModelConfig
    algorithm: str | None
    options: DrafterOptions | None

    def look(self, wanted: str | None) -> tuple[Path | None, list[Facts]]:
        """The folder that an engine would draft from, and what the shipped and the given one are.

        `wanted` is a drafter's name, `auto` for the shipped one, None for none.
        """
        place, found = None, []
        names = {"shipped": "auto"} | ({"given": wanted} if wanted and wanted != "auto" else {})
        for source, name in names.items():
            try:
                where = choose_drafter(name, self.model, self.algorithm)
                if where is None:
                    continue
                facts = self._fit(where)
                place = where if name == wanted else place
            except EyasError as error:
                facts = {"folder": name, "fits": False, "reason": str(error)}
            found.append({"source": source, **facts})
        return place, found

    def _fit(self, where: Path) -> Facts:
        """What the drafter at `where` is; raises `EyasError` if it does not fit the target."""
        kind, form = drafter_kind(where), "a whole language model"
        if kind == "STANDALONE":
            same_vocabulary(Tokenizer.from_folder(self.folder), Tokenizer.from_folder(where))
        else:
            form = detect_format(read_config(where), dict(tensor_stream(where))).value
        config = drafter_config(where, self.target, self.options)
        sizes = _of_network(config) if isinstance(config, DrafterConfig) else target_facts(config)
        return {
            "folder": str(where),
            "fits": True,
            "algorithm": kind,
            "format": form,
            "parameters": _parameters(config),
            **sizes,
        }


def is_drafter(raw: Facts, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a folder with this config and these tensors is a drafter's, by its content."""
    return bool(raw.keys() & DRAFTER_KEYS or tensors.keys() & DRAFTER_TENSORS)


def fitting(target: ModelConfig) -> Facts:
    """What a drafter of this target may be."""
    states = f"states at boundaries 0..{target.num_layers}"
    return {
        "EAGLE3": {
            "formats": [form.value for form in Format],
            "needs": f"hidden size {target.hidden_size}, {target.vocab_size} tokens, {states}",
        },
        "STANDALONE": {"needs": "a language model that runs here, with this tokenizer"},
        "NGRAM": {"needs": "nothing"},
    }


def lone_drafter(folder: Path, raw: Facts, options: DrafterOptions | None) -> Facts:
    """`checkpoint` and `fits` of a folder that is a drafter's, without its target.

    Raises `EyasError` for one that no target could use here.
    """
    tensors = dict(tensor_stream(folder))
    with understood("config.json of a drafter"):
        form = detect_format(raw, tensors)
        settings = flatten(raw, form, tensors)
    stand_ins = [_stand_in(settings, depth) for depth in DEPTHS]
    configs = [drafter_config(folder, target, options) for target in stand_ins]
    one, other = (config for config in configs if isinstance(config, DrafterConfig))
    facts = {"format": form.value, "parameters": _parameters(one), **_of_network(one)}
    deep = max(one.aux_layers)
    if one.aux_layers != other.aux_layers:
        facts["reads"], deep = "states before layers 2, L/2 and L - 3", 7
    fits = {
        "hidden size": one.target_hidden_size,
        "vocabulary": one.vocab_size,
        "layers at least": deep,
        "made for": _made_for(folder, raw),
    }
    return {"checkpoint": facts, "fits": fits}


def _stand_in(settings: Facts, num_layers: int) -> ModelConfig:
    """A target that a drafter with these settings fits, if it fits any."""
    hidden = dimension(settings, "hidden_size")
    return ModelConfig(
        vocab_size=dimension(settings, "vocab_size"),
        hidden_size=dimension(settings, "target_hidden_size", hidden),
        intermediate_size=1,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position=1,
    )


def _of_network(config: DrafterConfig) -> Facts:
    reads = ", ".join(map(str, config.aux_layers))
    return drafter_facts(config) | {"reads": f"states at boundaries {reads}"}


def _made_for(folder: Path, raw: Facts) -> list[str]:
    """Targets that are named: by the config, or since the drafter is shipped for them."""
    names = list(SHIPPED.get(folder.name, ()))
    inner: Any = raw
    for key in ("speculators_config", "verifier", "name_or_path"):
        inner = inner.get(key) if isinstance(inner, dict) else None
    return [*names, inner] if isinstance(inner, str) else names


def _parameters(config: DrafterConfig | ModelConfig) -> int:
    if isinstance(config, DrafterConfig):
        return sum(p.numel() for p in hollow(Eagle3, config, torch.float32).parameters())
    return sum(p.numel() for p in hollow(Decoder, config, torch.float32).parameters())
