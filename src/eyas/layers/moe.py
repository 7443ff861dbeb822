"""Routed experts in place of an MLP: a router, stacked expert weights, shared experts.

How experts are chosen and computed stands in `kernels/router.py` and `kernels/experts.py`. The
router is on every rank; with tensor parallelism each rank holds a share of every expert's
intermediate dimension, and one all-reduce adds routed and shared parts together. Routing follows
DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and
transformers' models of the same families.
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.distributed.group import SOLO, Group
from eyas.kernels.experts import experts
from eyas.kernels.experts_triton import Shared
from eyas.kernels.lang import runs_kernels
from eyas.kernels.norm import Norm
from eyas.kernels.router import Chosen, router, router_reference
from eyas.kernels.skinny import Counters
from eyas.kernels.terms import Delta, summed
from eyas.layers.basic import GatedMLP
from eyas.layers.linear import Place, Places, Products, pad_rows, row_tile, share_of, whole
from eyas.model_config import MoEConfig


class Router(nn.Module):
    """Chooses each row's experts.

    Where the config asks for it, logits are float32 in a 16-bit network, and so are parameters,
    until `settle` finds that 16 bits hold them.
    """

    def __init__(self, config: MoEConfig, hidden: int, prefix: str) -> None:
        super().__init__()
        self.config, self.prefix = config, prefix
        self.keep_float32 = frozenset({"weight", "bias"} if config.float32_router else {"bias"})
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden))
        biased = config.correction_bias
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if biased else None
        self.counters = Counters()

    def forward(self, x: torch.Tensor) -> Chosen:
        """The experts for rows x [T, H]."""
        if runs_kernels(x):
            return router(x, self.weight, self.config, self.bias, self.counters)
        kind = torch.float32 if self.config.float32_router else x.dtype
        rows = pad_rows(x, row_tile(x.device, kind))
        ids, weights, _ = router_reference(rows, self.weight, self.config, self.bias)
        return Chosen(ids[: x.shape[0]], weights[: x.shape[0]])

    def settle(self) -> None:
        """Keep filled weights on a GPU in bfloat16 if they are such, as published routers are."""
        if self.weight.is_cuda and self.config.float32_router:
            short = self.weight.detach().bfloat16()
            if torch.equal(short.float(), self.weight):
                self.weight = nn.Parameter(short, requires_grad=False)

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        places = {f"{self.prefix}.weight": whole(self.weight)}
        if self.bias is not None:
            places[f"{self.prefix}.e_score_correction_bias"] = whole(self.bias)
        return places


class Experts(Products):
    """The routed experts' weights, stacked; of each expert this rank's share."""

    def __init__(self, config: MoEConfig, hidden: int, prefix: str, group: Group = SOLO) -> None:
        super().__init__()
        self.prefix, self.group = prefix, group
        own = share_of(config.intermediate_size, group, "the experts' intermediate size")
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * own, hidden))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden, own))

    def forward(self, x: torch.Tensor, chosen: Chosen, shared: Shared | None = None) -> Delta:
        """`[T, H] -> [T, H]`, or terms: this rank's part of the experts' sum, and of `shared`."""
        stacked = (self.gate_up, self.down)
        ids, weights, lists = chosen
        rows = self.call_rows
        return experts(x, ids, weights, *stacked, shared=shared, lists=lists, fixed_rows=rows)

    def places(self) -> Places:
        """Checkpoint tensor name -> the place of this rank's share."""
        _, hidden, own = self.down.shape
        size, start = own * self.group.size, own * self.group.rank
        places: Places = {}
        pairs = zip(self.gate_up.detach(), self.down.detach(), strict=True)
        for number, (gate_up, down) in enumerate(pairs):
            name = f"{self.prefix}.{number}"
            gate, up = gate_up.chunk(2)
            places[f"{name}.gate_proj.weight"] = Place(gate, (size, hidden), 0, start)
            places[f"{name}.up_proj.weight"] = Place(up, (size, hidden), 0, start)
            places[f"{name}.down_proj.weight"] = Place(down, (hidden, size), 1, start)
        return places


class RoutedMLP(nn.Module):
    """Routed experts, and shared ones where the config has them."""

    def __init__(self, config: MoEConfig, hidden: int, prefix: str, group: Group = SOLO) -> None:
        super().__init__()
        self.group = group
        self.router = Router(config, hidden, f"{prefix}.gate")
        self.experts = Experts(config, hidden, f"{prefix}.experts", group)
        name, size = f"{prefix}.shared_experts", config.shared_size
        self.shared = GatedMLP(hidden, size, name, group=group) if size else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H] -> [T, H]`."""
        return summed(self.delta(x))

    def delta(self, x: torch.Tensor) -> Delta:
        """`forward`; of a single rank perhaps as terms, for who norms next to sum up."""
        shared = None
        if self.shared is not None:
            shared = Shared(self.shared.gate_up.weight, self.shared.down.weight)
        delta = self.experts(x, self.router(x), shared)
        return delta if self.group.size == 1 else self.group.all_reduce(summed(delta))

    def normed(self, x: torch.Tensor, norm: Norm) -> tuple[Delta, torch.Tensor]:
        """(`delta` of the normed rows, the rows before their norm), [T, H] each."""
        normed, x = norm(x)
        return self.delta(normed), x

    def places(self) -> Places:
        """Checkpoint tensor name -> its place in this layer."""
        places = self.router.places() | self.experts.places()
        return places if self.shared is None else places | self.shared.places()
