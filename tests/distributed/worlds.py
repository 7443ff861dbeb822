"""Tiny networks divided among ranks, and engines over them; what started ranks import.

Every rank makes the whole random network and takes its share of it by the places that its layers
declare, as it would from a checkpoint. A source can be sent to a process, with what it does wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.config import EngineConfig, SpeculationConfig
from eyas.distributed.control import Wire
from eyas.distributed.group import Group
from eyas.distributed.hub import Hub
from eyas.distributed.launch import spawn
from eyas.distributed.rank_group import RankGroup, Seat
from eyas.engine.engine import Engine
from eyas.engine.networks import Networks
from eyas.engine.ranks import Ranks, rank_device
from eyas.layers.linear import row_tile
from eyas.model_config import MLAConfig, MoEConfig
from eyas.models.decoder import Decoder
from eyas.models.eagle3 import Eagle3
from eyas.models.registry import allocate, fill
from tests.helpers import CPU, NONE, VOCAB, tiny_drafter, tiny_model, tiny_target, toy_tokenizer

Body = Callable[[Group], Any]


def divided(whole: Decoder, device: torch.device, group: Group) -> Decoder:
    """This rank's share of the network `whole`."""
    dtype = whole.embed.weight.dtype
    share = Decoder(whole.config, row_tile(device, dtype), group)
    allocate(share, dtype, device)
    fill(share.places(), ((name, place.give()) for name, place in whole.places().items()))
    return share.eval()


def gloo_threads() -> dict[str, str]:
    """Threads of this process that gloo runs: their names, by their ids."""
    names = {task.name: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
    return {task: name.strip() for task, name in names.items() if "gloo" in name}


def do_nothing(target: nn.Module, drafter: nn.Module, rank: int) -> None:
    """Leave a rank's networks as they are."""


@dataclass(frozen=True, kw_only=True)
class TinySource:
    """`tiny_target` and `tiny_drafter`; `spoil` may change what a rank has loaded."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    small: bool = False
    """Whether `tiny_model` drafts instead."""
    spoil: Callable[[Decoder, Eagle3, int], None] = do_nothing
    dtype: torch.dtype = torch.float32

    def facts(self, device: torch.device) -> dict[str, str]:
        """All ranks make the same."""
        return {"networks": repr((self.target, self.drafter))}

    def check(self, num_ranks: int) -> None:
        """Left to the layers."""

    def whole(self, device: torch.device = CPU) -> Networks:
        """The networks of a group of one."""
        make = tiny_model if self.small else tiny_drafter
        return Networks(
            target=tiny_target(self.dtype, device=device, **self.target),
            drafter=make(self.dtype, device=device, **self.drafter),
        )

    def load(self, device: torch.device, group: Group) -> Networks:
        """A rank's share of the target, and the drafter."""
        whole = self.whole(device)
        target = divided(whole.target, device, group)
        if isinstance(whole.drafter, Eagle3):
            self.spoil(target, whole.drafter, group.rank)
        return Networks(target=target, drafter=whole.drafter)


LLAMA = TinySource(target={"intermediate_size": 128}, drafter={})
"""Widths that two ranks divide into multiples of 32, for which the row tile holds."""

_EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 3, "intermediate_size": 64}
QWEN3_MOE = TinySource(
    target={
        "qk_norm": True,
        "intermediate_size": 128,
        "moe": MoEConfig(**_EXPERTS, sparse_layers=(True, True, False, True)),
    },
    drafter={},
)
DEEPSEEK = TinySource(
    target={
        "intermediate_size": 128,
        "mla": MLAConfig(
            q_lora_rank=32, kv_lora_rank=32, nope_dim=16, rope_dim=16, value_dim=16, scale=32**-0.5
        ),
        "moe": MoEConfig(
            **_EXPERTS,
            shared_size=64,
            scoring="sigmoid",
            num_groups=4,
            topk_groups=2,
            group_score="top2",
            correction_bias=True,
            scaling_factor=2.5,
            sparse_layers=(False, True, True, True),
        ),
    },
    drafter={},
)
BORROWING = TinySource(target=LLAMA.target, drafter={"own_head": False, "draft_vocab_size": VOCAB})
UNFUSED = TinySource(
    target=LLAMA.target, drafter={"fused": False, "fc_norm": False, "aux_layers": (4,)}
)
SMALL = TinySource(target=LLAMA.target, drafter={}, small=True)
FAMILIES = {"llama": LLAMA, "qwen3 moe": QWEN3_MOE, "deepseek": DEEPSEEK}


def ranked_engine(ranks: Ranks, speculation: SpeculationConfig = NONE, **config: Any) -> Engine:
    """An engine on all ranks with the toy tokenizer."""
    networks = ranks.networks
    return Engine(
        networks.target,
        toy_tokenizer((), VOCAB),
        drafter=networks.drafter,
        speculation=speculation,
        config=EngineConfig(device=ranks.device.type, tp=len(ranks.prints), **config),
        ranks=ranks,
    )


@dataclass(frozen=True)
class Answer:
    """A rank that runs `body` once in a group and answers with what it returns."""

    body: Body
    device: str

    def __call__(self, wire: Wire) -> None:
        """Run it, then wait for the end."""
        wire.answer(self.run(wire.seat)[0])
        while wire.listen() is not None:
            pass

    def run(self, seat: Seat) -> tuple[Any, RankGroup]:
        """What `body` returns on this rank, and its group."""
        group = RankGroup(seat, rank_device(self.device, seat))
        return self.body(group), group


def on_ranks(size: int, body: Body, device: str = "cpu") -> list[Any]:
    """What `body` returns on every one of `size` ranks; it must not lie on a GPU."""
    answer = Answer(body, device)
    hub: Hub = spawn(size, answer)
    try:
        with hub.together():
            own, group = answer.run(hub.seat)
            hub.release, hub.at_end = group.abort, group.close
            return [own, *hub.hear()]
    finally:
        hub.close()
