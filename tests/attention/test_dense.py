"""Attention without a cache: documents do not leak, and training-time test is what serving does."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from eyas.attention.dense import DenseCausal, Documents, TrainingTimeTest
from eyas.attention.rope import Rope, rotate
from eyas.layers.linear import row_tile
from eyas.model_config import AttentionShape, DrafterConfig
from eyas.models.eagle3 import Eagle3

CPU = torch.device("cpu")
CONFIG = DrafterConfig(
    vocab_size=50,
    draft_vocab_size=20,
    hidden_size=24,
    target_hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    aux_layers=(0, 1, 2),
    fc_norm=True,
    norm_output=True,
)


PLAIN = AttentionShape.heads(1, 2, 64)
LATENT = AttentionShape(
    num_layers=1, num_kv_heads=1, key_dim=80, value_dim=64, scale=0.07, latent=True
)
each_shape = pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=["heads", "latent"])


def drafter() -> Eagle3:
    """A random drafter with norms off one."""
    torch.manual_seed(0)
    module = Eagle3(CONFIG, row_tile(CPU, torch.float32))
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return module


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Grouped-query attention of one document, last query sees all keys; `[L, H * D]`.

    With a window a query sees that many latest keys.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[0])
    if window:
        hidden |= torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-window)
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1)


class Growing:
    """Oracle `Attend`: one request, keys appended call by call, as serving drafts.

    `rows` of the first call are new, then one a call; what the network pads is left out.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.k, self.v = torch.empty(0), torch.empty(0)

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None = None,
    ) -> torch.Tensor:
        """Append and attend."""
        rows, self.rows = self.rows, 1
        q, k = rotate(q, rope), rotate(k, rope)
        self.k = torch.cat((self.k, k[:rows])) if self.k.numel() else k[:rows]
        self.v = torch.cat((self.v, v[:rows])) if self.v.numel() else v[:rows]
        out = causal(q[:rows], self.k, self.v)
        return torch.cat((out, out.new_zeros(q.shape[0] - rows, out.shape[1])))


def qkv(
    rows: int, dtype: torch.dtype, device: torch.device = CPU, shape: AttentionShape = PLAIN
) -> list[torch.Tensor]:
    """Float q, k as rotation leaves them, and v in `dtype`, requiring gradients."""
    generator = torch.Generator().manual_seed(1)
    heads, key, value = shape.num_kv_heads, shape.key_dim, shape.value_dim
    shapes = ((rows, 6, key), (rows, heads, key), (rows, heads, value))
    made = [torch.randn(s, generator=generator).to(device) for s in shapes]
    return [x.requires_grad_() for x in (made[0], made[1], made[2].to(dtype))]


def test_dense_causal_equals_each_document_alone() -> None:
    lengths = (5, 1, 9)
    q, k, v = qkv(17, torch.float32)
    got = DenseCausal(Documents.of(lengths, CPU, "loop"), PLAIN)(3, q, k, v)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        torch.testing.assert_close(got[rows], causal(q[rows], k[rows], v[rows]))
        start += length
    assert not got[15:].any(), "padding rows must be zero"


def test_a_window_is_its_layers() -> None:
    """Fault: a window off by one, reaching over documents, or in a layer without one."""
    lengths = (5, 1, 9)
    shape = dataclasses.replace(PLAIN, num_layers=2, windows=(0, 4))
    q, k, v = qkv(15, torch.float32)
    attend = DenseCausal(Documents.of(lengths, CPU, "loop"), shape)
    for layer, window in enumerate(shape.windows):
        got, start = attend(layer, q, k, v), 0
        for length in lengths:
            rows = slice(start, start + length)
            torch.testing.assert_close(got[rows], causal(q[rows], k[rows], v[rows], window))
            start += length


def test_training_time_test_equals_incremental_drafting() -> None:
    """Row i of step s equals a chain drafted s steps from a prefill of rows 0..i.

    Within 3e-7 of the row's length a step, as each step feeds its rounding to the next. Elements
    near zero are small differences of large terms, so none is compared alone.
    """
    module, steps, lengths = drafter(), 4, (6, 1, 8)
    rows = sum(lengths)
    aux, embeds = torch.randn(rows, 72), torch.randn(steps, rows, 24)
    positions = torch.cat([torch.arange(n) for n in lengths])
    docs = Documents.of(lengths, CPU, "loop")
    attend, hidden, seen = TrainingTimeTest(docs, CONFIG.attention_shape()), None, []
    for step in range(steps):
        hidden = module.fuse(aux) if hidden is None else hidden
        _, hidden = module(embeds[step], hidden, positions + step, attend)
        seen.append(hidden)
    start = 0
    for length in lengths:
        for anchor in range(length):
            prefix = slice(start, start + anchor + 1)
            growing = Growing(anchor + 1)
            _, x = module(embeds[0, prefix], module.fuse(aux[prefix]), positions[prefix], growing)
            for step in range(steps):
                off = (seen[step][start + anchor] - x[-1]).norm() / x[-1].norm()
                assert off < 3e-7 * (step + 1), (
                    f"step {step} of row {start + anchor} is off by {off:.1e}"
                )
                if step + 1 < steps:
                    row = embeds[step + 1, start + anchor][None]
                    _, x = module(row, x[-1:], torch.tensor([anchor + step + 1]), growing)
        start += length


def explicit_ttt(
    lengths: tuple[int, ...], calls: list[list[torch.Tensor]], step: int, scale: float
) -> torch.Tensor:
    """Step `step` by one masked softmax over all keys of all steps (EAGLE's own formulation)."""
    q, rows = calls[step][0], sum(lengths)
    groups = q.shape[1] // calls[0][1].shape[1]
    keys = torch.cat([c[1] for c in calls[: step + 1]]).repeat_interleave(groups, 1)
    values = torch.cat([c[2].float() for c in calls[: step + 1]]).repeat_interleave(groups, 1)
    doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first = (doc[:, None] == doc[None]).tril()
    mask = torch.cat([first] + [torch.eye(rows, dtype=torch.bool)] * step, dim=1).to(q.device)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    probs = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", probs, values).flatten(1)


def compare_with_explicit(
    backend: str, dtype: torch.dtype, device: torch.device, shape: AttentionShape
) -> None:
    """Outputs and gradients of three steps, against autograd through the masked softmax."""
    lengths, steps = (5, 1, 130, 9), 3
    docs = Documents.of(lengths, device, backend)
    calls = [qkv(docs.num_rows, dtype, device, shape) for _ in range(steps)]
    with torch.no_grad():
        for s, call in enumerate(calls):
            for x in call:
                x.mul_(1.0 + 0.5 * s).copy_(x.to(dtype))
    attend = TrainingTimeTest(docs, shape)
    got = [attend(0, q, k, v) for q, k, v in calls]
    want = [explicit_ttt(lengths, calls, s, shape.scale) for s in range(steps)]
    weights = torch.randn(len(got), docs.num_rows, 1, device=device)
    leaves = [x for call in calls for x in call]
    sums = [(torch.stack([o.float() for o in outs]) * weights).sum() for outs in (got, want)]
    got_grads = torch.autograd.grad(sums[0], leaves)
    want_grads = torch.autograd.grad(sums[1], leaves)
    tolerance = 3e-5 if dtype == torch.float32 else 4e-2
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm().clamp(min=1.0)
        torch.testing.assert_close(a.float(), b.float(), atol=10 * tolerance, rtol=tolerance)


@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_masked_softmax(dtype: torch.dtype, shape: AttentionShape) -> None:
    """Fault: a scale, a width or a head's share of the gradient lost in the merged form."""
    compare_with_explicit("loop", dtype, CPU, shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a CUDA GPU")
@each_shape
@pytest.mark.parametrize("backend", ["flash", "loop"])
def test_gradients_equal_masked_softmax_on_gpu(backend: str, shape: AttentionShape) -> None:
    """Fault: values padded to the keys' width and not cut, or heads that flash does not take."""
    compare_with_explicit(backend, torch.bfloat16, torch.device("cuda"), shape)
