"""A guard that fails on everything that would make the host wait for a device value.

Python-level reads are seen by a `TorchFunctionMode`, operators whose shape or result depends on
data by a `TorchDispatchMode`. It works on a CPU, where such reads cost nothing and go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__array__",
    "__contains__",
    "__repr__",
    "__format__",
    "__dlpack__",
    "cuda",
    "tensor",
    "as_tensor",
    "from_numpy",
    "equal",
    "allclose",
}
"""Functions that read a value, or copy between host and device."""

SHAPED_BY_DATA = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "equal",
    "is_nonzero",
    "bincount",
    "histc",
    "lift_fresh",
    "lift_fresh_copy",
}
"""Operators that need a value on the host to go on; `lift_fresh` is a tensor made of host data."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class HostReadError(AssertionError):
    """Something inside the guard reads on the host."""


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in READS:
            raise HostReadError(f"{name}() reads or copies on the host")
        devices = [a for a in (*args[1:], *(kwargs or {}).values()) if _is_device(a)]
        if name == "to" and any(torch.device(d) != args[0].device for d in devices):
            raise HostReadError("to() copies between devices")
        return func(*args, **(kwargs or {}))


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda"))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name, overload = func.overloadpacket.__name__, func._overloadname
        if name in SHAPED_BY_DATA:
            raise HostReadError(f"{name} needs a value on the host")
        if name == "repeat_interleave" and overload == "Tensor":
            known = (kwargs or {}).get("output_size")
            if known is None:
                raise HostReadError("repeat_interleave by a tensor has a length from data")
        if name in INDEXING and any(_is_mask(i) for i in args[1]):
            raise HostReadError("indexing by a mask has a shape from data")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostReadError` for a host read inside."""
    with _Operators(), _Functions():
        yield
