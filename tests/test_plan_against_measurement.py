"""The benchmark that holds predictions against measurements: which rows it pairs, and how."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        file = FOLDER / "plan_against_measurement.py"
        spec = importlib.util.spec_from_file_location("plan_against_measurement", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def row(name: str, value: float = 1.0, unit: str = "ms") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def test_rows_find_their_predictions(script: ModuleType) -> None:
    """Fault: a ratio or a start-up time compared with a cycle, or a batch that is not read."""
    rows = [
        row("llama-3.1-8b decode B=1", 4.5),
        row("llama-3.1-8b decode B=32", 5.5),
        row("llama-3.1-8b K=3 B=1 / decode", 1.2, "x"),
        row("llama-3.1-8b start", 20.0, "s"),
        row("llama-3.1-8b verify(4)", 4.5),
        row("llama-3.1-8b verify(4)/(1)", 1.02, "x"),
        row("llama-3.1-8b tree 5-4-16 B=8 C=8192", 9.0),
        row("llama-3.1-8b K=3 B=1 launches", 200.0, ""),
        row("llama-3.1-8b K=3 B=1 host gap", 2.0, "%"),
    ]
    found = list(script.pairs(rows, "h200", 512))
    assert [(p.name.split(" ", 1)[1], p.kind) for p in found] == [
        ("decode B=1", "decode"),
        ("decode B=32", "decode"),
        ("verify(4)", "verify"),
        ("tree 5-4-16 B=8 C=8192", "cycle"),
        ("K=3 B=1 launches", "launches"),
    ]
    one, many, verify, tree, _ = found
    assert 4 < one.predicted < many.predicted < tree.predicted
    assert verify.predicted == pytest.approx(one.predicted, rel=0.03)
    assert many.error == pytest.approx(many.predicted / 5.5 - 1)


def test_counted_experts_are_told_to_the_plan(script: ModuleType) -> None:
    """Fault: a text whose drafts share experts held against drafts that share none."""
    name = "deepseek-v2-lite verify(8) B=1 C=512"
    (alone,) = script.pairs([row(name)], "h200-eyas", 512)
    counts = row("deepseek-v2-lite experts a layer in verify(8)", 20.0, "")
    (told,) = script.pairs([row(name), counts], "h200-eyas", 512)
    assert told.predicted < 0.85 * alone.predicted
    other = row("deepseek-v2-lite experts a layer in verify(4)", 20.0, "")
    (apart,) = script.pairs([row(name), other], "h200-eyas", 512)
    assert apart.predicted == alone.predicted


def test_the_shipped_profile_predicts_what_was_measured(script: ModuleType) -> None:
    """Fault: counts, curves or constants that no longer are those of the engine's kernels."""
    rows = json.loads((FOLDER / "measured" / "h200.json").read_text())["rows"]
    found = list(script.pairs(rows, "h200-eyas", 512))
    times = {pair.name for pair in found}
    runs = ("decode", "verify(2)", "verify(4)", "verify(8)", "verify(16)", "K=3")
    for run, batch, context in product(runs, (1, 8, 32), (512, 8192)):
        for shape in ("llama-3.1-8b", "smollm2-135m", "deepseek-v2-lite"):
            fitting = 7168 if "smollm2" in shape and context == 8192 else context
            assert f"{shape} {run} B={batch} C={fitting}" in times
    for summed in script.summary(found):
        assert summed["holds"], summed


def test_errors_are_summed_by_kind(script: ModuleType) -> None:
    """Fault: a bad figure hidden by its group, or launches counted among times."""
    pairs = [
        script.Pair(name=name, kind=kind, measured=1.0, predicted=predicted)
        for name, kind, predicted in (
            ("a", "decode", 1.05),
            ("b", "decode", 0.75),
            ("c", "cycle", 1.01),
            ("d", "launches", 3.0),
        )
    ]
    found = {r["kind"]: r for r in script.summary(pairs)}
    assert found["decode"]["worst_of"] == "b" and not found["decode"]["holds"]
    assert found["cycle"]["holds"]
    assert found["all times"]["count"] == 3
    assert found["all times"]["median"] == pytest.approx(0.05)


def test_the_script_writes_its_record(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a script that ends without a table or a record."""
    measured, out = tmp_path / "gpu.json", tmp_path / "errors.json"
    measured.write_text(json.dumps({"rows": [row("smollm2-135m decode B=1")], "provenance": {}}))
    monkeypatch.setattr(sys, "argv", ["script", str(measured), "--json", str(out)])
    script.main()
    record = json.loads(out.read_text())
    assert record["rows"][0]["kind"] == "decode"
    assert record["summary"][0]["count"] == 1
    assert record["provenance"]["versions"]["torch"]
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit):
        script.main()
