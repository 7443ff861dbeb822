"""Pages of keys and values, and the allocator that lends them to requests.

A page is a run of KV positions; a request owns whole pages in order. Page 0 is never lent: padding
rows and positions past a request's pages write there, and nothing visible is ever read from it.
The pool knows nothing of requests; the allocator knows nothing of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from eyas.errors import CapacityError
from eyas.model_config import AttentionShape

DUMMY_PAGE = 0


class PageAllocator:
    """Free list over pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be lent now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Lend `count` pages; raises `CapacityError` when fewer are free."""
        if count > len(self._free):
            raise CapacityError(
                f"{count} pages wanted, {len(self._free)} free",
                "a pool lends only free pages",
                "raise num_pages or run fewer requests",
            )
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Assert that every page is either free or owned by exactly one request."""
        lent = [page for pages in owned for page in pages]
        everything = sorted(lent + self._free)
        assert everything == list(range(1, self.num_pages)), (
            f"{len(lent)} lent + {len(self._free)} free pages are not the pool's "
            f"{self.num_pages - 1}: a page is lost or owned twice"
        )


class KVPool:
    """Keys and values of all layers: [L, Hkv, P * page_size, key_dim or value_dim] each.

    KV heads stand outside pages, so that gathering a request's pages gives [Hkv, positions, D]
    without another copy. In a latent pool `v` is a view of the first numbers of every key.
    `kept` are the tensors that hold all of it.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.page_size, self.num_pages = shape, page_size, num_pages
        sizes = (shape.num_layers, shape.num_kv_heads, num_pages * page_size)
        self.k = _zeros((*sizes, shape.key_dim), dtype, device)
        if shape.latent:
            self.v = self.k[..., : shape.value_dim]
        else:
            self.v = _zeros((*sizes, shape.value_dim), dtype, device)
        self.kept = (self.k,) if shape.latent else (self.k, self.v)

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] at flat positions `rows` int64[T] of `layer`; latent: k alone.

        What is not finite is stored as zero. Hidden positions are read with weight zero, and zero
        times NaN is NaN: one request that overflows would spoil all that share or reuse a page.
        """
        for pooled, new in zip(self.kept, (k, v), strict=False):
            finite = new.transpose(0, 1).to(pooled.dtype).nan_to_num(0.0, 0.0, 0.0)
            pooled[layer].index_copy_(1, rows, finite)

    def page_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Rows int64[Hkv * M] that `gather` takes for `pages` int64[M] of every KV head."""
        heads = torch.arange(self.k.shape[1], device=pages.device)
        return (heads[:, None] * self.num_pages + pages).flatten()

    def gather(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy the pages of `page_rows` of `layer` into keys, values [Hkv * M, page_size * D].

        Of a latent pool only the keys: they hold the values.
        """
        for pooled, out in zip(self.kept, (keys, values), strict=False):
            paged = pooled[layer].view(-1, self.page_size * pooled.shape[-1])
            torch.index_select(paged, 0, rows, out=out)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy flat positions `source` int64[M] onto `target` int64[M] in every layer."""
        for tensor in self.kept:
            tensor.index_copy_(2, target, tensor.index_select(2, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on a CPU before they are written: numpy's do, torch's are filled.

    A pool is as large as the longest answers of all slots together; few of its pages are used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def flat_rows(page_table: torch.Tensor, index: torch.Tensor, page_size: int) -> torch.Tensor:
    """Flat pool positions int64[B, M] of KV indices `index` int64[B, M].

    Indices past the table fall on the dummy page.
    """
    page = index // page_size
    inside = page < page_table.shape[1]
    page = page_table.gather(1, page.clamp(max=page_table.shape[1] - 1))
    return torch.where(inside, page, DUMMY_PAGE) * page_size + index % page_size
