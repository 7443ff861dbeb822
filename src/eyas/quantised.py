"""Quantised checkpoints: from a stream of packed tensors to the weights that they stand for.

Two forms are read: FP8 in blocks (DeepSeek-V3's `weight_scale_inv`) and INT4 in groups (the
pack-quantized format of compressed-tensors, as Kimi's experts have it). A weight is the product in
float32 of its stored number and its scale, as both projects define it. Whatever else a
`quantization_config` can ask for is refused by name. Knows neither files nor networks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from eyas.errors import CheckpointError

Named = tuple[str, torch.Tensor]

_SCALE_INV = "_scale_inv"
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_NIBBLES = 8
"""INT4 numbers in a packed int32."""


class Scheme(Protocol):
    """How the weights of a checkpoint are stored."""

    @property
    def parts(self) -> tuple[str, ...]:
        """What follows a weight's name in the names of the tensors that make it."""

    @property
    def summary(self) -> str:
        """The form in words."""

    def part(self, name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
        """(weight's name, part) of a tensor of the checkpoint; None for a plain one."""

    def shape(self, name: str, parts: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(N, K) of the weight that `parts` make; raises `CheckpointError` if they do not fit."""

    def weight(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight float32 [N, K] of parts that fit."""


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a checkpoint's config, at its top or in its `text_config`.

    Raises `CheckpointError` if it is no object, or if both places have one and they differ.
    """
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    found = [p["quantization_config"] for p in places if p.get("quantization_config") is not None]
    for value in found:
        if not isinstance(value, dict):
            _refuse(f"quantization_config={value!r}", "must be an object")
    if len(found) == 2 and found[0] != found[1]:
        _refuse("quantization_config", "differs from the one in text_config")
    return found[0] if found else None


def scheme_of(quantization: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` asks for; raises `CheckpointError` for others."""
    method = quantization.get("quant_method")
    if method == "fp8":
        return _block_fp8(quantization)
    if method == "compressed-tensors":
        return _packed_int4(quantization)
    _refuse(
        f"quantization_config: quant_method={method!r}", "only fp8 and compressed-tensors are read"
    )


def dequantised(stream: Iterable[Named], quantization: Mapping[str, Any] | None) -> Iterator[Named]:
    """`stream` with every quantised weight as one float32 tensor under its plain name.

    The tensors that make a weight may come in any order and from different files. What waits for
    its partners is held as it came: a view of a mapped file, where it came from one. Plain tensors
    pass through. Of parts on the meta device only shapes are made. Raises `CheckpointError` for a
    missing partner, a wrong shape or type, and for what `scheme_of` refuses.
    """
    if quantization is None:
        yield from stream
        return
    scheme = scheme_of(quantization)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stream:
        place = scheme.part(name, tensor)
        if place is None:
            yield name, tensor
            continue
        weight, part = place
        parts = waiting.setdefault(weight, {})
        if part in parts:
            _refuse(f"tensor {name!r}", "comes twice")
        parts[part] = tensor
        if len(parts) == len(scheme.parts):
            yield weight, _made(scheme, weight, waiting.pop(weight))
    for weight, parts in waiting.items():
        lacking = next(part for part in scheme.parts if part not in parts)
        _refuse(
            f"tensor {weight + next(iter(parts))!r}",
            f"its partner {weight + lacking!r} is missing",
        )


def _made(scheme: Scheme, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    shape = scheme.shape(name, parts)
    if any(part.is_meta for part in parts.values()):
        return torch.empty(shape, device="meta")
    return scheme.weight(name, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFP8:
    """FP8 (e4m3) weights with one scale for each block of rows and columns."""

    block: tuple[int, int]

    @property
    def parts(self) -> tuple[str, ...]:
        """The weight itself and `weight_scale_inv`, which is multiplied despite its name."""
        return ("", _SCALE_INV)

    @property
    def summary(self) -> str:
        """The form in words."""
        rows, columns = self.block
        return (
            f"FP8 in blocks of {rows} x {columns}; weights are read exactly, "
            "activations stay in the model's type"
        )

    def part(self, name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Told by the name of a scale and by the type of a weight."""
        if name.endswith(_SCALE_INV):
            return name.removesuffix(_SCALE_INV), _SCALE_INV
        return (name, "") if tensor.dtype == torch.float8_e4m3fn else None

    def shape(self, name: str, parts: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """A weight [N, K] has scales [ceil(N / rows), ceil(K / columns)]."""
        stored = parts[""]
        if stored.dim() != 2:
            _refuse(f"tensor {name!r} of shape {list(stored.shape)}", "must be a matrix")
        n, k = stored.shape
        wanted = (-(-n // self.block[0]), -(-k // self.block[1]))
        types = (*_SCALE_TYPES, torch.float8_e8m0fnu)
        _check(name + _SCALE_INV, parts[_SCALE_INV], wanted, types)
        return n, k

    def weight(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Every block times its scale."""
        stored, scales = parts[""], parts[_SCALE_INV]
        rows, columns = self.block
        weight = stored.float()
        for band, scale in zip(weight.split(rows), scales.float(), strict=True):
            band *= scale.repeat_interleave(columns)[: stored.shape[1]]
        return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Group:
    """Modules of one `config_groups` entry: symmetric INT4, a scale for each run of a row."""

    targets: tuple[str, ...]
    group_size: int
    """Numbers that share a scale; 0: the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInt4:
    """Eight INT4 numbers in an int32, the lowest bits first, each stored with 8 added."""

    groups: tuple[Int4Group, ...]
    ignore: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """`weight_packed`, `weight_scale` and `weight_shape`."""
        return (_PACKED, _SCALE, _SHAPE)

    @property
    def summary(self) -> str:
        """The form in words."""
        sizes = sorted({g.group_size for g in self.groups})
        runs = " and ".join(f"groups of {size}" if size else "whole rows" for size in sizes)
        return f"INT4 in {runs}; weights are read exactly"

    def part(self, name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Told by name; zero points and reordered columns are refused."""
        for suffix in ("_zero_point", "_g_idx"):
            if name.endswith(".weight" + suffix):
                _refuse(f"tensor {name!r}", "only symmetric INT4 in its own order is read")
        for suffix in self.parts:
            if name.endswith(".weight" + suffix):
                return name.removesuffix(suffix), suffix
        return None

    def shape(self, name: str, parts: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """What `weight_shape` says, which is no meta tensor; scales are [N, K / group]."""
        _check(name + _SHAPE, parts[_SHAPE], (2,), (torch.int64, torch.int32))
        rows, columns = parts[_SHAPE].tolist()
        size = self._group_size(name) or columns
        if rows < 1 or columns < 1 or columns % size:
            _refuse(f"tensor {name + _SHAPE!r}: {[rows, columns]}", f"needs groups of {size}")
        _check(name + _PACKED, parts[_PACKED], (rows, -(-columns // _NIBBLES)), (torch.int32,))
        _check(name + _SCALE, parts[_SCALE], (rows, columns // size), _SCALE_TYPES)
        return rows, columns

    def weight(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Numbers -8 .. 7 times the scale of their group."""
        packed, scales = parts[_PACKED], parts[_SCALE]
        rows, columns = parts[_SHAPE].tolist()
        size = columns // scales.shape[1]
        pairs = packed.contiguous().view(torch.uint8)
        numbers = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns]
        weight = numbers.float().sub_(8).view(rows, -1, size)
        return weight.mul_(scales.float()[:, :, None]).view(rows, columns)

    def _group_size(self, name: str) -> int:
        """Of the first group that takes the module of weight `name`."""
        module = name.removesuffix(".weight")
        if any(_matches(pattern, module) for pattern in self.ignore):
            _refuse(f"tensor '{module}.weight_packed'", "quantization_config ignores its module")
        for group in self.groups:
            if any(target == "Linear" or _matches(target, module) for target in group.targets):
                return group.group_size
        _refuse(f"tensor '{module}.weight_packed'", "no group of quantization_config has it")


_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _refuse(value: str, rule: str) -> NoReturn:
    raise CheckpointError(value, rule, "use another checkpoint of this model, or download it again")


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], types: tuple[torch.dtype, ...]
) -> None:
    kind, *others = (str(t).removeprefix("torch.") for t in (tensor.dtype, *types))
    if tuple(tensor.shape) != shape:
        _refuse(f"tensor {name!r} of shape {list(tensor.shape)}", f"must have {list(shape)}")
    if tensor.dtype not in types:
        _refuse(f"tensor {name!r} of type {kind}", f"must be {' or '.join(others)}")


def _matches(pattern: str, module: str) -> bool:
    """A module's name, or a regular expression behind `re:` that its beginning must match."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


def _only(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Refuse a value that asks for other arithmetic."""
    for key, fine in allowed.items():
        value = values.get(key)
        if not any(type(value) is type(one) and value == one for one in fine):
            rest = " or ".join(repr(one) for one in fine if one is not None)
            _refuse(f"{where}{key}={value!r}", f"only {rest or 'none'} is read")


_FP8: dict[str, tuple[Any, ...]] = {
    "activation_scheme": (None, "dynamic"),
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
    "kv_cache_scheme": (None,),
}
_GROUP: dict[str, tuple[Any, ...]] = {
    "format": ("pack-quantized",),
    "input_activations": (None,),
    "output_activations": (None,),
}
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": (None, "int"),
    "symmetric": (None, True),
    "strategy": (None, "group", "channel"),
    "dynamic": (None, False),
    "actorder": (None, "weight", "static"),
    "block_structure": (None,),
}
"""Keys of a config that change arithmetic -> the values that are read; None: the key is absent."""


def _block_fp8(values: Mapping[str, Any]) -> BlockFP8:
    where = "quantization_config: "
    _only(values, _FP8, where)
    block = values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(map(_positive, block)):
        _refuse(f"{where}weight_block_size={block!r}", "must be two positive numbers")
    return BlockFP8(block=(block[0], block[1]))


def _packed_int4(values: Mapping[str, Any]) -> PackedInt4:
    """Of the nested form with `config_groups`, or of one group spelt at the top."""
    where = "quantization_config: "
    groups = values.get("config_groups", {"": {"weights": values, **values}})
    if not isinstance(groups, dict) or not groups:
        _refuse(f"{where}config_groups={groups!r}", "must name groups of modules")
    _only(values, {"kv_cache_scheme": (None,)}, where)
    sparsity, transforms = (
        values.get(f"{kind}_config") or {} for kind in ("sparsity", "transform")
    )
    if sparsity and sparsity.get("format") != "dense":
        _refuse(f"{where}sparsity_config={sparsity!r}", "only dense weights are read")
    if transforms and transforms.get("config_groups") != {}:
        _refuse(f"{where}transform_config={transforms!r}", "would change the arithmetic")
    return PackedInt4(
        groups=tuple(_int4_group(group, values, where) for group in groups.values()),
        ignore=_patterns(values.get("ignore") or [], f"{where}ignore"),
    )


def _int4_group(group: Any, values: Mapping[str, Any], where: str) -> Int4Group:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        _refuse(f"{where}group {group!r}", "must describe its weights")
    _only({**group, "format": group.get("format") or values.get("format")}, _GROUP, where)
    _only(weights, _WEIGHTS, where)
    size: Any = weights.get("group_size")
    whole = weights.get("strategy") == "channel"
    if not (size in (None, -1) if whole else _positive(size)):
        _refuse(f"{where}group_size={size!r}", "must be a positive number, or none for whole rows")
    targets = _patterns(group.get("targets", ["Linear"]), f"{where}targets")
    return Int4Group(targets=targets, group_size=0 if whole else size)


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    """Names of modules and regular expressions behind `re:`."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        _refuse(f"{where}={value!r}", "must be a list of names")
    for one in value:
        try:
            re.compile(one.removeprefix("re:"))
        except re.error as e:
            _refuse(f"{where}: {one!r}", f"is no regular expression ({e})")
    return tuple(value)
