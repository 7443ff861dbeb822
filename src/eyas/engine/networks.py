"""Where a rank's networks come from.

A `Source` says what would be loaded before anything is, so that ranks can compare notes, and loads
one rank's share. `CheckpointSource` is what every model given by name is; it can be sent to another
process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from eyas.checkpoint import read_config
from eyas.config import DrafterOptions
from eyas.distributed.group import Group
from eyas.engine.drafters import Network
from eyas.engine.rehearsal import Shares, hollow
from eyas.layers.linear import row_tile
from eyas.model_config import DrafterConfig, ModelConfig
from eyas.models.decoder import Decoder
from eyas.models.dummy import dummy_drafter, dummy_drafter_config, dummy_target
from eyas.models.families import model_config
from eyas.models.registry import load_target
from eyas.speculate.checkpoints import drafter_config, load_network
from eyas.speculate.drafter import Drafter

SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A rank's share of a target, and its drafter, which every rank has whole."""

    target: Decoder
    drafter: Network | Drafter | None


class Source(Protocol):
    """Makes the networks of a rank."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """What results depend on and ranks must share, by name."""

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` if the target can't be divided among `num_ranks`."""

    def load(self, device: torch.device, group: Group) -> Networks:
        """The networks of `group.rank`, on `device`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """Networks in checkpoint folders."""

    target: Path
    drafter: Path | None
    dtype: torch.dtype
    options: DrafterOptions | None = None
    deterministic: bool = False
    """Whether the target's rows depend on no other rows by construction; see `row_tile`."""

    def dummy(self, with_drafter: bool) -> DummySource:
        """Random weights in place of those there are."""
        return DummySource(
            target=self.target,
            with_drafter=with_drafter,
            dtype=self.dtype,
            deterministic=self.deterministic,
        )

    def facts(self, device: torch.device) -> dict[str, str]:
        """Types, row tile, configs, and a sample of the weights' bytes."""
        facts = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "row tile": str(tuple(row_tile(device, self.dtype, self.deterministic))),
            "target": digest(self.target),
        }
        if self.drafter is not None:
            facts["drafter"] = digest(self.drafter)
            facts["drafter options"] = str(self.options or DrafterOptions())
        return facts

    def check(self, num_ranks: int) -> None:
        """Build a rank's network without memory: its layers say what does not divide."""
        config, group = model_config(read_config(self.target)), Shares(num_ranks)
        hollow(partial(Decoder, group=group), config, self.dtype)

    def configs(self) -> tuple[ModelConfig, DrafterConfig | ModelConfig | None]:
        """Of target and drafter; raises `CheckpointError` as their readers do."""
        target = model_config(read_config(self.target))
        if self.drafter is None:
            return target, None
        return target, drafter_config(self.drafter, target, self.options)

    def load(self, device: torch.device, group: Group) -> Networks:
        """Read both checkpoints; raises `CheckpointError` as their loaders do."""
        target = load_target(self.target, self.dtype, device, group, self.deterministic)
        drafter = None
        if self.drafter is not None:
            drafter = load_network(self.drafter, target.config, self.dtype, device, self.options)
        return Networks(target=target, drafter=drafter)


@dataclass(frozen=True, slots=True, kw_only=True)
class DummySource:
    """Random weights in the shape of a checkpoint's config; the drafter in a usual shape."""

    target: Path
    with_drafter: bool
    dtype: torch.dtype
    deterministic: bool = False
    """See `CheckpointSource`."""

    def facts(self, device: torch.device) -> dict[str, str]:
        """Types, row tile and the config."""
        config = hashlib.sha256((self.target / "config.json").read_bytes()).hexdigest()[:16]
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "row tile": str(tuple(row_tile(device, self.dtype, self.deterministic))),
            "dummy weights of": config,
        }

    def check(self, num_ranks: int) -> None:
        """As `CheckpointSource.check`."""
        config, group = model_config(read_config(self.target)), Shares(num_ranks)
        hollow(partial(Decoder, group=group), config, self.dtype)

    def configs(self) -> tuple[ModelConfig, DrafterConfig | None]:
        """Of target and drafter."""
        target = model_config(read_config(self.target))
        return target, dummy_drafter_config(target) if self.with_drafter else None

    def load(self, device: torch.device, group: Group) -> Networks:
        """Draw the weights."""
        config = model_config(read_config(self.target))
        target = dummy_target(config, self.dtype, device, group, self.deterministic)
        drafter = None
        if self.with_drafter:
            drafter = dummy_drafter(dummy_drafter_config(target.config), self.dtype, device)
        return Networks(target=target, drafter=drafter)


FolderSource = CheckpointSource | DummySource
"""Sources that know configs before they load."""


def digest(folder: Path) -> str:
    """Short hash of a checkpoint's config, and of sizes and samples of its files of weights."""
    total = hashlib.sha256()
    for sample in _samples(folder):
        total.update(sample)
    return total.hexdigest()[:16]


def _samples(folder: Path) -> Iterator[bytes]:
    config = folder / "config.json"
    if config.is_file():
        yield config.read_bytes()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        yield f"{file.name} {size}".encode()
        with file.open("rb") as data:
            yield data.read(SAMPLE_BYTES)
            data.seek(max(0, size - SAMPLE_BYTES))
            yield data.read(SAMPLE_BYTES)
