"""Drafter checkpoints: which format, which switches, every tensor accounted for.

EAGLE-3 networks come in four formats, and a small language model can draft too; each is told by
content, never by its name. What cannot be run exactly is refused with the reason, because a drafter
that is loaded wrongly still runs: it only accepts less. Sources: the loaders of EAGLE, SpecForge,
SGLang, vLLM, speculators and ModelOpt.
"""

from eyas.speculate.checkpoints.formats import Format, Tensors, detect_format
from eyas.speculate.checkpoints.loading import (
    SHIPPED,
    choose_drafter,
    drafter_config,
    drafter_kind,
    find_drafter,
    load_drafter,
    load_network,
)
from eyas.speculate.checkpoints.vocabulary import same_vocabulary, target_ids

__all__ = [
    "SHIPPED",
    "Format",
    "Tensors",
    "choose_drafter",
    "detect_format",
    "drafter_config",
    "drafter_kind",
    "find_drafter",
    "load_drafter",
    "load_network",
    "same_vocabulary",
    "target_ids",
]
