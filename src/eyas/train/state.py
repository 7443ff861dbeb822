"""A drafter in training: master weights, optimiser, counters, and the checkpoint of all of it.

Weights are float32; where passes run in a 16-bit type a second copy of the network holds them
rounded, and gradients return to the masters in float32. The vocabulary is part of the checkpoint
and comes back from it, never from the text. Knows neither corpora nor schedules.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.errors import CheckpointError
from eyas.model_config import DrafterConfig, RopeConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3

FORMAT = "eyas-training-1"
BETAS = (0.9, 0.95)
INIT_STD = 0.02


def new_drafter(
    config: DrafterConfig, target_ids: torch.Tensor, target: Decoder, seed: int
) -> Eagle3:
    """A float32 drafter on the target's device, reproducible from `seed`.

    Its head starts as the target's rows of the draft vocabulary, with the target's last norm
    folded in, so that the drafter's own norm and the state it feeds back start at unit scale.
    """
    device = target.embed.weight.device
    drafter = Eagle3(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                nn.init.normal_(parameter, 0.0, INIT_STD, generator=generator)
        drafter.target_ids.copy_(target_ids)
        if drafter.head is not None and config.hidden_size == target.config.hidden_size:
            rows = target.head.weight[target_ids.to(device)].float()
            drafter.head.weight.copy_(rows * target.norm.weight.float())
    return drafter.to(device)


@dataclass(slots=True, kw_only=True)
class TrainState:
    """All that a run changes; `master` and `worker` are one module when passes are float32."""

    master: Eagle3
    worker: Eagle3
    optimizer: torch.optim.AdamW
    step: int = 0
    epoch: int = 0
    place: int = 0
    """Passes of this epoch that are done."""
    elapsed: float = 0.0
    """Seconds of training before this process."""

    @classmethod
    def of(cls, master: Eagle3, dtype: torch.dtype, weight_decay: float) -> TrainState:
        """State before the first step; passes run in `dtype`."""
        worker = master
        if dtype != torch.float32:
            worker = copy.deepcopy(master)
            for parameter in worker.parameters():
                parameter.data = parameter.data.to(dtype)
        parameters = list(master.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        fused = parameters[0].device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=fused)
        return cls(master=master, worker=worker, optimizer=optimizer)

    def update(self, lr: float, clip: float) -> torch.Tensor:
        """One optimiser step from the worker's gradients; returns their norm, float32 []."""
        pairs = list(zip(self.master.parameters(), self.worker.parameters(), strict=True))
        for master, work in pairs:
            if work is not master and work.grad is not None:
                master.grad, work.grad = work.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        if self.worker is not self.master:
            pairs = zip(self.master.parameters(), self.worker.parameters(), strict=True)
            for master, work in pairs:
                work.copy_(master)

    def save(self, path: Path, elapsed: float, plan: dict[str, Any]) -> None:
        """Write a checkpoint aside and rename it; `plan` is what a resumed run must share."""
        record = {
            "format": FORMAT,
            "plan": plan,
            "drafter": dataclasses.asdict(self.master.config),
            "target_ids": self.master.target_ids.cpu(),
            "weights": {n: p.detach().cpu() for n, p in self.master.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "counters": {"step": self.step, "epoch": self.epoch, "place": self.place},
            "elapsed": elapsed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(record, partial)
        partial.replace(path)

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, plan: dict[str, Any]
    ) -> TrainState:
        """The state `save` wrote, vocabulary included.

        Raises `CheckpointError` for a file that is none, or one of a run with another `plan`.
        """
        try:
            record = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                str(path), "is no readable training checkpoint", "train afresh"
            ) from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise CheckpointError(
                str(path), f"a training checkpoint has format {FORMAT!r}", "train afresh"
            )
        for key, value in plan.items():
            if record["plan"].get(key) != value:
                raise CheckpointError(
                    f"{key}={value!r} on resume",
                    f"the checkpoint was made with {record['plan'].get(key)!r}",
                    f"give {key} as before, or train in another folder",
                )
        master = restore_drafter(record).to(device)
        state = cls.of(master, dtype, weight_decay=0.0)
        state.optimizer.load_state_dict(record["optimizer"])
        for name, value in record["counters"].items():
            setattr(state, name, value)
        state.elapsed = record["elapsed"]
        return state


def restore_drafter(record: dict[str, Any]) -> Eagle3:
    """The float32 drafter of a checkpoint's record, on the CPU."""
    settings = dict(record["drafter"])
    settings["rope"] = RopeConfig.from_dict(settings["rope"])
    settings["aux_layers"] = tuple(settings["aux_layers"])
    drafter = Eagle3(DrafterConfig.from_dict(settings))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(record["weights"][name])
        drafter.target_ids.copy_(record["target_ids"])
    return drafter
