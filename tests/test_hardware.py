"""Profiles of machines: curves, presets with sources, JSON that is read as it was written."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import ConfigError
from eyas.hardware import BEST, PROFILES, Curve, Family, HardwareProfile, load_profile, presets


def test_a_curve_interpolates_and_goes_on() -> None:
    """Fault: a value outside the table that jumps, or falls below zero."""
    curve = Curve(((1.0, 10.0), (3.0, 20.0), (5.0, 20.0)))
    assert [curve(x) for x in (0, 1, 2, 3, 4, 5, 9)] == [10, 10, 15, 20, 20, 20, 20]
    assert Curve(((0.0, 1.0), (1.0, 3.0)))(10) == 21
    assert Curve(((0.0, 4.0), (1.0, 3.0)))(10) == 0
    assert Curve(((5.0, 7.0),))(100) == 7
    assert curve.scaled(2)(2) == 30


@pytest.mark.parametrize(
    "points", [(), ((1.0, 1.0), (1.0, 2.0)), ((0.0, -1.0),), ((0.0, float("nan")),)]
)
def test_curves_that_are_none(points: Any) -> None:
    with pytest.raises(ConfigError, match="ascending x"):
        Curve(points)


def test_a_family_mixes_its_neighbours() -> None:
    """Fault: values mixed by the wrong variable, by its value, or carried on past the ends."""
    flat = [Curve(((0.0, y), (10.0, 2 * y))) for y in (1.0, 3.0, 5.0)]
    family = Family(tuple(zip((1.0, 4.0, 64.0), flat, strict=True)))
    assert [family(at, 0) for at in (0, 0.5, 1, 4, 64, 900)] == [1, 1, 1, 3, 5, 5]
    assert family(2, 0) == pytest.approx(2)
    assert family(16, 0) == pytest.approx(4)
    assert family(2, 10) == pytest.approx(4)
    wide = Family(((1.0, family), (100.0, Family(((1.0, flat[2]),)))))
    assert wide(1, 2, 10) == family(2, 10)
    assert wide(10, 4, 0) == pytest.approx((3 + 5) / 2)


@pytest.mark.parametrize("keys", [(), (0.0,), (2.0, 1.0), (1.0, 1.0), (float("nan"),)])
def test_families_that_are_none(keys: Any) -> None:
    with pytest.raises(ConfigError, match="ascending values above 0"):
        Family(tuple((key, Curve(((0.0, 1.0),))) for key in keys))


def test_presets_are_there_and_read_back() -> None:
    """Fault: a preset of the issue missing, or changed by writing and reading it."""
    names = presets()
    wanted = {"h100", "h200", "h200-eyas", "b200"} | {
        f"rtx-pro-6000-{kind}" for kind in ("tuned", "untuned", "cliff", "no-peer")
    }
    assert wanted <= set(names)
    for name in names:
        profile = load_profile(name)
        assert profile.name == name
        again = HardwareProfile.from_json(json.loads(json.dumps(profile.to_json())))
        assert again == profile


def test_every_constant_has_a_source() -> None:
    """Fault: a number without a word on where it comes from."""
    for name in presets():
        record = json.loads((PROFILES / f"{name}.json").read_text())
        for constant, entry in record["constants"].items():
            assert len(entry["source"]) > 10, f"{name}: {constant}"
        for table in record["collectives"]:
            assert len(table["source"]) > 10, f"{name}: {table['kind']}"


def test_the_best_kind_of_all_reduce_depends_on_size() -> None:
    """Fault: one kind for all sizes; a table of other ranks taken where the right one is there."""
    box = load_profile("rtx-pro-6000-tuned")
    assert box.kinds(8) == ("one-shot", "nccl")
    assert box.all_reduce_us(8, 8192) == box.all_reduce_us(8, 8192, "one-shot") == 9.2
    assert box.all_reduce_us(8, 262_144, BEST) == box.all_reduce_us(8, 262_144, "nccl") < 40
    assert box.all_reduce_us(4, 8192) == 6.4
    assert box.all_reduce_us(3, 8192) == 6.4
    assert box.all_reduce_us(1, 8192) == 0
    with pytest.raises(ConfigError, match=r"'two-shot' among 8 ranks.*use one of best, one-shot"):
        box.all_reduce_us(8, 8192, "two-shot")
    alone = dataclasses.replace(box, collectives=())
    with pytest.raises(ConfigError, match="no table"):
        alone.all_reduce_us(2, 8192)


def test_floors() -> None:
    """Fault: a floor that takes the lesser of traffic and arithmetic."""
    h200 = load_profile("h200")
    assert h200.floor_us(15.01e9, 0) == pytest.approx(3419, rel=1e-3)
    assert h200.floor_us(1e3, 640e12) == pytest.approx(1e6)


def broken(change: str) -> Any:
    record: dict[str, Any] = copy.deepcopy(load_profile("h200").to_json())
    match change:
        case "schema":
            record["schema"] = "eyas.bench"
        case "version":
            record["version"] = 7
        case "missing":
            del record["constants"]["small_us"]
        case "unknown":
            record["constants"]["weight_kg"] = {"value": 1.0, "source": "a scale in the cellar"}
        case "sourceless":
            record["constants"]["small_us"]["source"] = ""
        case "negative":
            record["constants"]["small_us"]["value"] = -1
        case "zero":
            record["constants"]["read_gb_s"]["value"] = 0
        case "points":
            record["constants"]["linear_us"]["value"] = [[2, 1], [1, 1]]
        case "members":
            record["constants"]["latent_us"]["value"] = [[2, [[1, [[0, 1]]]]], [1, [[1, [[0, 1]]]]]]
        case "flat":
            record["constants"]["latent_us"]["value"] = [[0, 10.0], [1e9, 278]]
        case "list":
            return [record]
    return record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schema", "no record of schema"),
        ("version", "version 7: this program reads version 3"),
        ("missing", "no complete profile"),
        ("unknown", "unknown key 'weight_kg'"),
        ("sourceless", "small_us of profile 'h200': has no source"),
        ("negative", "small_us=-1"),
        ("zero", "read_gb_s=0: must be positive"),
        ("points", "ascending x"),
        ("members", "ascending values above 0"),
        ("flat", "no complete profile"),
        ("list", "no record of schema"),
    ],
)
def test_profiles_that_are_none(tmp_path: Path, change: str, message: str) -> None:
    """Fault: a profile of another version, or half of one, read as if it were whole."""
    file = tmp_path / "p.json"
    file.write_text(json.dumps(broken(change)))
    with pytest.raises(ConfigError, match=message):
        load_profile(str(file))


def test_names_that_are_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a preset nor a file.*rtx-pro-6000-tuned"):
        load_profile("h300")
    file = tmp_path / "p.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(str(file))
