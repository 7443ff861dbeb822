"""What a machine can do, in few numbers: rates, latencies, and what collectives take.

A profile is measured (`report/calibrate.py`) or one of the presets, whose constants each name their
source. It knows neither networks nor engines. Curves are piecewise linear: what lies between two
measured points is interpolated, what lies past the last goes on with the last slope. A family is of
curves at values of a further variable; past its ends the last of them stands.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

from eyas.config import Strict, require
from eyas.errors import ConfigError

SCHEMA, VERSION = "eyas.hardware", 3
PROFILES = Path(__file__).parent / "profiles"
BEST = "best"
"""The fastest kind of all-reduce for a message."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through `points`, ascending in x; flat before the first."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        xs = [x for x, _ in self.points]
        numbers = all(math.isfinite(v) and v >= 0 for point in self.points for v in point)
        require(
            bool(xs) and numbers and all(a < b for a, b in itertools.pairwise(xs)),
            f"points {self.points}",
            "a curve has points of ascending x, without negative values",
            "mend the profile",
        )

    def __call__(self, x: float) -> float:
        """The value at `x`, never negative."""
        points = self.points
        if x <= points[0][0] or len(points) == 1:
            return points[0][1]
        i = min(bisect_right(points, (x, math.inf)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))

    def scaled(self, factor: float) -> Curve:
        """The curve with every value times `factor`."""
        return Curve(tuple((x, y * factor) for x, y in self.points))


Member = TypeVar("Member", bound=Callable[..., float])


@dataclass(frozen=True, slots=True)
class Family(Generic[Member]):
    """Curves, or families of them, at ascending values of a further variable.

    Between two members their values are mixed by the variable's logarithm. A machine of which one
    member is known has that one for all.
    """

    members: tuple[tuple[float, Member], ...]

    def __post_init__(self) -> None:
        keys = [key for key, _ in self.members]
        fine = all(math.isfinite(key) and key > 0 for key in keys)
        require(
            bool(keys) and fine and all(a < b for a, b in itertools.pairwise(keys)),
            f"members at {keys}",
            "a family has members at ascending values above 0",
            "mend the profile",
        )

    def __call__(self, at: float, *rest: float) -> float:
        """The value `at` this variable, and `rest` of the members'."""
        right = bisect_right([key for key, _ in self.members], at)
        low, one = self.members[max(0, right - 1)]
        high, other = self.members[min(right, len(self.members) - 1)]
        if low == high:
            return one(*rest)
        share = math.log(at / low) / math.log(high / low)
        return (1 - share) * one(*rest) + share * other(*rest)


Times = Family[Family[Curve]]
"""Of attention, over walks (requests times KV heads), over rows that walk side by side (query heads
of a KV head times new positions), over bytes of all keys and values that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What one kind of all-reduce takes among `ranks` ranks of this machine."""

    kind: str
    """nccl, one-shot, two-shot, host (NCCL through host memory), gloo."""
    ranks: int
    us: Curve
    """Over message bytes."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile(Strict):
    """A machine's constants. Times are of work inside a CUDA graph where there are graphs.

    `sources` says for every constant where it comes from.
    """

    name: str
    machine: str
    date: str
    num_devices: int
    memory_gb: float
    """Of one device."""
    read_gb_s: float
    """Large reads from device memory."""
    copy_gb_s: float
    """Large copies, read and written bytes together."""
    cache_mb: float
    """Of the last cache before memory."""
    cache_gb_s: float
    """Reads that this cache serves."""
    linear_us: Curve
    """A linear layer of few rows, over bytes of weights."""
    rows_factor: Curve
    """What more rows cost a large linear layer, over rows; 1 at one row."""
    small_rows_factor: Family[Curve]
    """The same of layers of `SMALL_LAYER` bytes or less, over bytes of weights, over more rows."""
    matmul_tflops: Curve
    """Reached by a large matmul, over rows; counts above `MANY_ROWS`."""
    experts_us: Curve
    """Routed experts of a layer without their router, over bytes of touched weights."""
    pairs_factor: Curve
    """What more rows cost them, over rows that a touched expert has on average; 1 for few."""
    attention_us: Times
    """Grouped-query attention of a layer."""
    narrow_us: Times
    """The same with heads of 64 numbers or less."""
    latent_us: Times
    """Latent attention of a layer."""
    attention_tflops: float
    """Reached by attention of heads with more rows than its times are known for."""
    narrow_tflops: float
    """The same with heads of 64 numbers or less."""
    latent_tflops: float
    """The same of heads over latents."""
    serial_ns: float
    """A position of attention that walks a request's keys without splitting them."""
    sampling_us: Curve
    """The greatest of a row's scores, over the vocabulary."""
    small_us: float
    """A norm or an elementwise kernel over few rows, in a graph."""
    node_us: float
    """A kernel that does nothing, in a graph."""
    eager_us: float
    """Host time of launching a kernel without a graph; 0: a CPU, which launches none."""
    graph_us: float
    """What the device idles between two replays of graphs."""
    host_us: float
    """Host time of an engine's step; it shows where the device takes less."""
    copy_us: float
    """A few bytes from device to host, and waiting for them."""
    skew_us: float
    """Mean time that a rank waits in a collective for the last one."""
    decode_us: float
    """Device time of a plain step outside of the network."""
    cycle_us: float
    """Device time of a cycle outside of the networks: metadata, acceptance, commit."""
    step_us: float
    """Device time of one more level of drafting outside of the network."""
    collectives: tuple[Collective, ...] = ()
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in _constants(type(self)):
            require(
                bool(self.sources.get(name)),
                f"constant {name} of profile {self.name!r}",
                "has no source",
                "say where it was measured or published",
            )
            value = getattr(self, name)
            fine = not isinstance(value, int | float) or (math.isfinite(value) and value >= 0)
            require(fine, f"{name}={value}", "must be a number from 0 on", "mend the profile")
        rates = ("memory_gb", "read_gb_s", "copy_gb_s", "cache_gb_s")
        for name in (*rates, "attention_tflops", "narrow_tflops", "latent_tflops"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value}", "must be positive", "mend the profile")
        require(
            self.num_devices >= 1,
            f"num_devices={self.num_devices}",
            "must be at least 1",
            "mend the profile",
        )

    def floor_us(self, num_bytes: float, flops: float, rows: float = 4096) -> float:
        """The least time for so much memory traffic and arithmetic."""
        return max(num_bytes / self.read_gb_s / 1e3, flops / self.matmul_tflops(rows) / 1e6)

    def kinds(self, ranks: int) -> tuple[str, ...]:
        """Kinds of all-reduce with a table for `ranks`, or for the number nearest to it."""
        return tuple(table.kind for table in self._tables(ranks))

    def all_reduce_us(self, ranks: int, message: float, kind: str = BEST) -> float:
        """Time of an all-reduce of `message` bytes, without waiting for late ranks.

        Raises `ConfigError` for a kind without a table.
        """
        if ranks == 1:
            return 0.0
        tables = [t for t in self._tables(ranks) if kind in (BEST, t.kind)]
        require(
            bool(tables),
            f"all-reduce {kind!r} among {ranks} ranks on profile {self.name!r}",
            "the profile has no table for it",
            f"use one of {', '.join((BEST, *self.kinds(ranks)))}, or another profile",
        )
        return min(table.us(message) for table in tables)

    def _tables(self, ranks: int) -> list[Collective]:
        """Tables of the number of ranks nearest to `ranks`, the larger of two as near."""
        sizes = {table.ranks for table in self.collectives}
        if not sizes:
            return []
        nearest = min(sizes, key=lambda size: (abs(size - ranks), -size))
        return [table for table in self.collectives if table.ranks == nearest]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `from_json` reads them."""
        constants = {
            name: {"value": _plain(getattr(self, name)), "source": self.sources[name]}
            for name in _constants(type(self))
        }
        tables = [
            {"kind": t.kind, "ranks": t.ranks, "us": _plain(t.us), "source": t.source}
            for t in self.collectives
        ]
        head = {name: getattr(self, name) for name in ("name", "machine", "date", "num_devices")}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **head,
            "constants": constants,
            "collectives": tables,
        }

    @classmethod
    def from_json(cls, record: Any, where: str = "profile") -> Self:
        """A profile of plain values; raises `ConfigError` for what is none of this version."""
        known = isinstance(record, dict) and record.get("schema") == SCHEMA
        require(known, where, f"is no record of schema {SCHEMA}", "make one with eyas calibrate")
        require(
            record.get("version") == VERSION,
            f"{where}: version {record.get('version')!r}",
            f"this program reads version {VERSION}",
            "measure again with eyas calibrate",
        )
        try:
            constants, hints = record["constants"], get_type_hints(cls)
            values: dict[str, Any] = {
                name: record[name] for name in ("name", "machine", "date", "num_devices")
            }
            for name, entry in constants.items():
                value = entry["value"]
                values[name] = _read(hints.get(name), value)
            values["sources"] = {name: entry["source"] for name, entry in constants.items()}
            values["collectives"] = tuple(
                Collective(kind=t["kind"], ranks=t["ranks"], us=_curve(t["us"]), source=t["source"])
                for t in record["collectives"]
            )
            return cls.from_dict(values)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ConfigError(
                where, f"is no complete profile ({e})", "make one with eyas calibrate"
            ) from e


SMALL_LAYER = 2**23
"""Bytes of a linear layer that more rows than few cost otherwise than a large one."""
MANY_ROWS = 64
"""Up to so many rows a linear layer is bound by its weights' bytes."""


def presets() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name: str) -> HardwareProfile:
    """The preset `name`, or the profile in file `name`; raises `ConfigError`."""
    path = PROFILES / f"{name}.json" if name in presets() else Path(name)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"profile {name!r}",
            f"is neither a preset nor a file that can be read ({e.strerror})",
            f"give a file of eyas calibrate, or one of {', '.join(presets())}",
        ) from e
    except ValueError as e:
        raise ConfigError(
            f"profile {name!r}", f"is not JSON ({e})", "make one with eyas calibrate"
        ) from e
    return HardwareProfile.from_json(record, f"profile {name!r}")


def _constants(profile: type[Any]) -> list[str]:
    """Names of fields that are a number or a curve and need a source."""
    hints = get_type_hints(profile)
    return [
        field.name
        for field in dataclasses.fields(profile)
        if hints[field.name] in (float, Curve) or get_origin(hints[field.name]) is Family
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Family):
        return [[key, _plain(member)] for key, member in value.members]
    return [list(point) for point in value.points] if isinstance(value, Curve) else value


def _read(hint: Any, value: Any) -> Any:
    """A constant of the type `hint` from plain values."""
    if get_origin(hint) is Family:
        (member,) = get_args(hint)
        return Family(tuple((float(key), _read(member, own)) for key, own in value))
    return _curve(value) if hint is Curve else value


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(x), float(y)) for x, y in points))
