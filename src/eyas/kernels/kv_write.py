"""Rotate new keys and keep keys and values in their pages, in one launch for all KV heads.

`Layout` names the sizes both attention kernels are built for. The oracle is
`eyas.attention.rope.rotate` with `KVPool.write`. `head_rows`, `new_rows` and `keep_rows` are parts
of the attention kernel too, which rotates its queries and may keep a pass's keys on the way: what
lies in a page has the same bits, whoever wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.batch import ForwardBatch
from eyas.kernels.lang import prefetch, take_turn, tl, triton, turns
from eyas.model_config import AttentionShape

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of a pass's rows, float32 [T', 1, R] each."""
ROWS = 16
"""New rows of a program."""
PASS_VALUES = (
    "num_new",
    "tail_offset",
    "parts",
    "inverse",
    "tiles",
    "shared",
    "positions",
    "table_stride",
    "table_width",
    "first_request",
    "first_tile",
)
"""Arguments that differ between passes: a kernel is not compiled anew for some of their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes that kernels over a pool are compiled for.

    A head is read as one part, or, in a latent pool, as two: the values and what stands behind
    them. Parts are padded to a power of two.
    """

    shape: AttentionShape
    page_size: int

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernels' constants."""
        dim, wide, latent = self.shape.key_dim, self.shape.value_dim, self.shape.latent
        return {
            "DIM": dim,
            "WIDE": wide,
            "SIZE_A": _padded(wide if latent else dim),
            "SIZE_B": _padded(dim - wide) if latent and dim > wide else 0,
            "SIZE_V": _padded(wide),
            "PAGE": self.page_size,
            "LATENT": latent,
        }


def _padded(size: int) -> int:
    """The power of two from 16 on that covers `size`: what a tensor core takes."""
    return max(16, 1 << (size - 1).bit_length())


def rope_arguments(
    rope: Rope | None, any_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cosines, sines, their row stride and R; without rope a placeholder and R = 0."""
    if rope is None:
        return any_tensor, any_tensor, 0, 0
    cos, sin = rope
    assert cos.stride(0) == sin.stride(0), "cosines and sines lie alike"
    return cos, sin, cos.stride(0), cos.shape[-1]


@triton.jit
def head_rows(  # type: ignore[no-untyped-def]
    ptr, cos_ptr, sin_ptr, start, row, used, rope_stride,
    FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    """Numbers FIRST .. END - 1 of heads of DIM numbers, rotated: float32 [M, SIZE], zeros behind.

    Heads start at `start` int32[M]; `row` int32[M] are their rows of the tables. The last ROPE
    numbers of a head are rotated in half-split order.
    """
    dims = FIRST + tl.arange(0, SIZE)
    inside = used[:, None] & (dims < END)[None, :]
    x = tl.load(ptr + start[:, None] + dims[None, :], inside, 0.0).to(tl.float32)
    if END > DIM - ROPE:
        turn = dims - (DIM - ROPE)
        turned = inside & (turn >= 0)[None, :]
        other = DIM - ROPE + (turn + ROPE // 2) % ROPE
        y = tl.load(ptr + start[:, None] + other[None, :], turned, 0.0).to(tl.float32)
        place = row[:, None] * rope_stride + turn[None, :]
        cos = tl.load(cos_ptr + place, turned, 1.0)
        sin = tl.load(sin_ptr + place, turned, 0.0)
        x = tl.fma(y, sin, x * cos)
    return x


@triton.jit
def _finite(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in the pool's type, zero where it is not finite there."""
    kept = x.to(kind)
    return tl.where(tl.abs(kept.to(tl.float32)) < float("inf"), kept, 0.0)


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    ptr, x, flat, used, FIRST: tl.constexpr, END: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Store x [M, SIZE] as numbers FIRST .. END - 1 of one head at positions `flat` int64[M]."""
    dims = FIRST + tl.arange(0, x.shape[1])
    tl.store(ptr + flat[:, None] * DIM + dims[None, :], x, used[:, None] & (dims < END)[None, :])


@triton.jit
def new_rows(  # type: ignore[no-untyped-def]
    k_new_ptr, v_new_ptr, cos_ptr, sin_ptr, new, used, k_new_stride, v_new_stride, rope_stride,
    kind: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE_A: tl.constexpr,
    SIZE_B: tl.constexpr, SIZE_V: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """What is to be kept of the rows `new` int32[M]: keys in one part or two, and values.

    All pointers are of one request and head.
    """
    ka = head_rows(
        k_new_ptr, cos_ptr, sin_ptr, new * k_new_stride, new, used, rope_stride,
        0, SIZE_A, DIM if SIZE_B == 0 else WIDE, DIM, ROPE,
    )  # fmt: skip
    kb, v = ka, ka
    if SIZE_B > 0:
        kb = head_rows(
            k_new_ptr, cos_ptr, sin_ptr, new * k_new_stride, new, used, rope_stride,
            WIDE, SIZE_B, DIM, DIM, ROPE,
        )  # fmt: skip
    if not LATENT:
        v = head_rows(
            v_new_ptr, cos_ptr, sin_ptr, new * v_new_stride, new, used, rope_stride,
            0, SIZE_V, WIDE, WIDE, 0,
        )  # fmt: skip
    return _finite(ka, kind), _finite(kb, kind), _finite(v, kind)


@triton.jit
def keep_rows(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, table_ptr, ka, kb, v, index, used, table_width,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE_B: tl.constexpr, PAGE: tl.constexpr,
    LATENT: tl.constexpr,
):  # fmt: skip
    """Keep rows at the KV indices `index` int32[M] of one request and head, where `used`."""
    page = tl.load(table_ptr + index // PAGE, used & (index // PAGE < table_width), 0)
    flat = page * PAGE + index % PAGE
    _put(k_ptr, ka, flat, used, 0, DIM if SIZE_B == 0 else WIDE, DIM)
    if SIZE_B > 0:
        _put(k_ptr, kb, flat, used, WIDE, DIM, DIM)
    if not LATENT:
        _put(v_ptr, v, flat, used, 0, WIDE, WIDE)


@triton.jit
def ask_rows(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, table_ptr, kv, most, table_width,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, BYTES: tl.constexpr,
    LATENT: tl.constexpr,
):  # fmt: skip
    """Bring the keys and values at the places `kv`, short of `most`, into the L2 cache."""
    kv = tl.maximum(tl.minimum(kv, most - 1), 0)
    page = tl.load(table_ptr + tl.minimum(kv // PAGE, table_width - 1))
    flat = page.to(tl.int64) * PAGE + kv % PAGE
    lines: tl.constexpr = 2 if DIM * BYTES <= 256 else 8
    prefetch((k_ptr + flat * DIM).to(tl.int64), DIM * BYTES, lines)
    if not LATENT:
        prefetch((v_ptr + flat * WIDE).to(tl.int64), WIDE * BYTES, lines)


@triton.jit(do_not_specialize=PASS_VALUES)
def _kv_write_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, table_ptr, prefix_ptr, k_new_ptr, v_new_ptr, cos_ptr, sin_ptr,
    num_new, tail_offset, positions, table_stride, table_width,
    k_new_stride, v_new_stride, rope_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE_A: tl.constexpr, SIZE_B: tl.constexpr,
    SIZE_V: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, LATENT: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (run of new rows, KV head, request)."""
    take_turn(EARLY)
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    new = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.load(prefix_ptr + request).to(tl.int32) + tail_offset
    row, used = request * num_new, new < num_new
    ka, kb, v = new_rows(
        k_new_ptr + row * k_new_stride + head * DIM, v_new_ptr + row * v_new_stride + head * WIDE,
        cos_ptr + row * rope_stride, sin_ptr + row * rope_stride, new, used,
        k_new_stride, v_new_stride, rope_stride, k_ptr.dtype.element_ty,
        DIM, WIDE, SIZE_A, SIZE_B, SIZE_V, ROPE, LATENT,
    )  # fmt: skip
    keep_rows(
        k_ptr + head * positions * DIM, v_ptr + head * positions * WIDE,
        table_ptr + request * table_stride, ka, kb, v, first + new, used, table_width,
        DIM, WIDE, SIZE_B, PAGE, LATENT,
    )  # fmt: skip


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    batch: ForwardBatch,
    rope: Rope | None,
) -> None:
    """Keep the new rows of `batch` in one layer's pages; see `Attend` and `KVPool.write`.

    k [T', Hkv, key_dim] and v [T', Hkv, value_dim] with dense heads; pool_k and pool_v are
    [Hkv, P * page_size, key_dim or value_dim]. Positions past the page table fall on page 0.
    """
    cos, sin, rope_stride, rope_dim = rope_arguments(rope, k)
    requests, heads = batch.prefix_lens.shape[0], pool_k.shape[0]
    _kv_write_kernel[(triton.cdiv(batch.num_new, ROWS), heads, requests)](
        pool_k,
        pool_v,
        batch.page_table,
        batch.prefix_lens,
        k,
        v,
        cos,
        sin,
        batch.num_new,
        batch.tail_offset,
        pool_k.shape[1],
        batch.page_table.stride(0),
        batch.page_table.shape[1],
        k.stride(0),
        v.stride(0),
        rope_stride,
        ROPE=rope_dim,
        ROWS=ROWS,
        enable_fp_fusion=False,
        **layout.constants,
        **turns(pool_k),
    )


def write_cost(layout: Layout, batch: ForwardBatch, element: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one `write_kv` with numbers of `element` bytes."""
    rows = batch.prefix_lens.shape[0] * batch.num_new
    numbers = rows * layout.shape.values_per_position
    return 3 * numbers, 2 * numbers * element
