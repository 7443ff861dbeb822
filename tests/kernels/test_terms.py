"""Terms are summed alike wherever it is done; through Triton's interpreter without a GPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from eyas.distributed.group import Group
from eyas.kernels import norm
from eyas.kernels import terms as module
from eyas.kernels.terms import Terms
from eyas.layers.moe import RoutedMLP
from eyas.models.registry import allocate
from tests.helpers import tiny_experts, tiny_target
from tests.kernels.running import DEVICE, close, compiles, interpret, on_gpu

SHAPES = [(1, 24), (6, 64)] if DEVICE == "cpu" else [(6, 2048), (8, 2048), (8, 7168), (2, 576)]
"""(terms of a row, numbers)."""
LAYERS = 3


def make(top_k: int, size: int, dtype: torch.dtype, more: bool, rows: int = 5) -> Terms:
    """Random terms of one sign, so that none cancel; what is added lies in wider rows."""
    generator = torch.Generator().manual_seed(size + top_k)
    pairs = torch.rand(rows * top_k, size, generator=generator) * 3
    weights = torch.rand(rows, top_k, generator=generator)
    wide = torch.rand(rows, size + 16, generator=generator).to(DEVICE, dtype)
    added = wide[:, 8 : size + 8] if more else None
    return Terms(pairs.to(DEVICE, dtype), weights.to(DEVICE), added)


def row_of(terms: Terms, row: int) -> Terms:
    """One row's terms."""
    pairs, weights, more = terms
    each, one = weights.shape[1], slice(row, row + 1)
    part = pairs[row * each : (row + 1) * each]
    return Terms(part, weights[one], None if more is None else more[one])


def run_grid() -> None:
    """Every shape, type and both kinds of terms, in a launch of their own and in a norm's."""
    for top_k, size in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for more in (False, True):
                check(make(top_k, size, dtype, more))
    with torch.inference_mode():
        check_layer()
        check_network()


def check(terms: Terms) -> None:
    """Sums are the reference's; a norm takes them with the bits of a launch of their own."""
    found = module.sum_triton(terms)
    close(found, module.sum_reference(terms))
    x, w = torch.rand_like(found), torch.rand_like(found[0])
    normed, total = norm.add_rms_norm_triton(x, terms, w, 1e-5)
    wanted = norm.add_rms_norm_triton(x, found, w, 1e-5)
    assert torch.equal(total, wanted[1]), "the stream has other bits than with a launch between"
    assert torch.equal(normed, wanted[0]), "the norm has other bits than with a launch between"
    close(total, norm.add_rms_norm_reference(x, terms, w, 1e-5)[1])
    for row in (0, 4):
        alone = norm.add_rms_norm_triton(x[row : row + 1], row_of(terms, row), w, 1e-5)
        assert torch.equal(alone[1][0], total[row]), "a row depends on other rows"
        assert torch.equal(alone[0][0], normed[row]), "a row depends on other rows"


class Pair(Group):
    """One of two ranks, which sees what is summed over both."""

    size = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "terms in a collective"
        return x


def check_layer() -> None:
    """A rank alone hands on terms, in all but one launch; ranks that share experts sum first."""
    x = torch.randn(3, 64, device=DEVICE)
    for group, kind in ((Group(), Terms), (Pair(), torch.Tensor)):
        layer = RoutedMLP(tiny_experts(1), 64, "mlp", group)
        allocate(layer, torch.float32, torch.device(DEVICE))
        for parameter in layer.parameters():
            parameter.normal_(std=0.1)
        assert isinstance(layer.delta(x), kind)
        close(layer(x), module.summed(layer.delta(x)))


def check_network() -> None:
    """Final states and captured ones are those of the references, and no launch only sums."""
    target = tiny_target(device=torch.device(DEVICE), num_layers=LAYERS, moe=tiny_experts(LAYERS))
    tokens = torch.arange(5, device=DEVICE)
    wanted, layers = tuple(range(LAYERS + 1)), []

    def attend(layer: int, q: torch.Tensor, *rest: object) -> torch.Tensor:
        del layer, rest
        return q.flatten(1)

    for grads in (False, True):  # a pass that may be asked for gradients takes the references
        aux = torch.zeros(5, len(wanted) * target.config.hidden_size, device=DEVICE)
        alone = patch.object(module, "sum_triton", side_effect=AssertionError("a launch to sum"))
        with torch.set_grad_enabled(grads), alone:
            layers.append((target(tokens, tokens, attend, aux, wanted).detach(), aux.detach()))
    for found, expected in zip(*layers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_equal_references() -> None:
    """Fault: another row's weights, what is added lost, a boundary without its sum."""
    interpret(__file__)


@on_gpu
def test_kernels_equal_references() -> None:
    """The same on the GPU, at the sizes of real models."""
    run_grid()


def test_compiles_for_hopper() -> None:
    """Fault: a kernel that only the interpreter takes."""
    types = dict.fromkeys(("pairs_ptr", "more_ptr", "out_ptr"), "*bf16")
    types |= {"weights_ptr": "*fp32", "more_stride": "i32", "size": "i32"}
    constants = {"TOP_K": 6, "MORE": True, "BLOCK": module.SUM_BLOCK}
    compiles(module._expert_sum_kernel, types, constants)


if __name__ == "__main__":
    run_grid()
