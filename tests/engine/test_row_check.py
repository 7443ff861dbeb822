"""The trial at start: products whose rows depend on each other are found, others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from eyas.config import EngineConfig
from eyas.engine import row_check
from eyas.engine.row_check import MOST_ROWS, RowCheck, check_rows, check_start, row_counts
from eyas.layers.linear import Linear, fix_rows
from eyas.models.decoder import Decoder
from tests.helpers import LATENT, NONE, TREES, chain, make_engine, tiny_experts, tiny_target
from tests.kernels.running import interpret

COUNTS = (1, 2, 5, 8, 16)
TARGETS: dict[str, tuple[dict[str, Any], int]] = {
    "grouped": ({}, 5),
    "biased": ({"qkv_bias": True}, 5),
    "experts": ({"moe": tiny_experts()}, 5 + 2),
    "latent": ({"mla": LATENT}, 6 + 2),
}
"""Changes of the tiny target, and its distinct products: of linear layers, and others.

The shared expert's layers have shapes of other ones.
"""


def made(name: str) -> Decoder:
    """A target whose head has a shape of its own."""
    return tiny_target(vocab_size=112, **TARGETS[name][0])


def shaken(monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int) -> None:
    """A library whose sums change from so many rows on, in layers of so many outputs."""
    whole = Linear.product

    def product(self: Linear, x: torch.Tensor, gates: bool = False) -> torch.Tensor:
        y = whole(self, x, gates)
        changes = x.shape[0] >= rows and self.weight.shape[0] == outputs
        return y * 1.5 if changes else y

    monkeypatch.setattr(Linear, "product", product)


def test_gates_are_tried_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a product tried by another kernel than the one that runs."""
    shaken(monkeypatch, rows=8, outputs=192)
    [found] = check_rows(tiny_target(torch.bfloat16), COUNTS[1:]).dependent
    assert (found.name, found.rows) == ("gate_proj+up_proj", 8)
    with torch.inference_mode():
        widths = {
            p.name: p.run(p.x, slice(0, 3)).shape for p in row_check.products(made("grouped"), 3)
        }
    assert widths["gate_proj+up_proj"] == (3, 96)


@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_product_is_tried_once(name: str) -> None:
    """Fault: a layer left out, or the same one tried in every block."""
    with torch.inference_mode():
        found = [(p.name, p.shape) for p in row_check.products(made(name), 3)]
    assert len(set(found)) == len(found) == TARGETS[name][1], found


@pytest.mark.parametrize("name", ["grouped", "biased", "experts"])
def test_fixed_rows_pass(name: str) -> None:
    """Fault: a trial that finds differences where there can be none.

    The products take 8 rows a call, by which rows are independent on a CPU too; what is latent
    attention's is a kernel's on a GPU.
    """
    target = made(name)
    fix_rows(target, 8)
    found = check_rows(target, COUNTS)
    assert found.dependent == ()
    assert found.products == TARGETS[name][1]
    assert found.counts == COUNTS
    assert found.warning("auto") == ""


def test_a_dependent_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a difference overlooked, or blamed on another layer or another number of rows."""
    target = tiny_target(torch.bfloat16)
    shaken(monkeypatch, rows=5, outputs=128)
    found = check_rows(target, COUNTS[1:])
    assert [(d.name, d.shape, d.rows) for d in found.dependent] == [
        ("q_proj+k_proj+v_proj", (128, 64), 5)
    ]
    warning = found.warning("auto")
    assert "q_proj+k_proj+v_proj (128 x 64, bfloat16) from 5 rows on" in warning
    assert "--deterministic on" in warning
    assert "fixed rows" in found.warning("on")
    assert found.warning("off") == ""
    assert json.loads(json.dumps(found.record()))["dependent"][0]["rows"] == 5


def test_counts_are_those_of_the_engines_passes() -> None:
    """Fault: the verify pass of a captured batch, or plain decoding's, never tried."""
    config = EngineConfig(max_running_requests=8)
    assert row_counts(config, NONE) == (1, 2, 4, 8)
    assert row_counts(config, chain(3)) == (1, 2, 4, 8, 16, 32)
    assert row_counts(config, TREES[2]) == (1, 2, 4, 8, 16, 32, 64, 128)
    many = row_counts(EngineConfig(max_running_requests=512), chain(7))
    assert max(many) <= MOST_ROWS and {8, 16, 192} <= set(many)


def test_a_cpu_says_why_nothing_was_tried() -> None:
    """Fault: a start that got slower for nothing, or silence about it."""
    engine = make_engine(tiny_target(), deterministic="on")
    found: RowCheck = engine.runner.row_check
    assert "row tile" in found.skipped and found.counts == ()
    assert found == check_start(tiny_target(), engine.config, NONE)
    assert found.warning("auto") == ""


def test_a_warning_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a trial that nobody hears of."""
    one = row_check.Dependent(name="o_proj", shape=(64, 64), dtype="bfloat16", rows=2)
    monkeypatch.setattr(
        "eyas.engine.runner.check_start", lambda *_: RowCheck(counts=(1, 2), dependent=(one,))
    )
    make_engine(tiny_target())
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and "o_proj (64 x 64, bfloat16) from 2 rows on" in said


def run_kernels() -> None:
    """Latent attention and experts of a deterministic target, where kernels run."""
    target = tiny_target(mla=LATENT, moe=tiny_experts())
    fix_rows(target, 8)
    found = check_rows(target, (1, 3, 9))
    assert not found.dependent, "; ".join(map(str, found.dependent))
    assert found.products == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_interpreted_kernels_pass() -> None:
    """Fault: kernels whose rows depend on each other, or a trial that hands them other rows."""
    interpret(__file__)


if __name__ == "__main__":
    run_kernels()
