"""What stands on top of a record's page: what ran where, the verdict, the facts that count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from eyas.report.markup import Html, arrows, short, tag

Record = dict[str, Any]

STAYS = "\N{NO-BREAK SPACE}"
FACTS = (
    ("speedup", "speed-up", "x"),
    ("tok_per_s", "rate", "tok/s"),
    ("decode_ms", "decode step", "ms"),
    ("verify_ms", "verify", "ms"),
    ("cycle_ms", "cycle", "ms"),
    ("device_ms", "device works", "ms"),
    ("idle_ms", "device idles", "ms"),
    ("accept_length", "accept length, tokens", ""),
    ("break_even", "break-even, tokens", ""),
    ("batch", "requests", ""),
    ("nodes", "nodes a request", ""),
    ("layers", "layers", ""),
)
"""Keys whose values are facts, in a record or in what `_value` looks at; their names and units."""


def title(record: Record, kind: str) -> str:
    """The page's name: the command, and what it was run on."""
    files = record.get("files")
    if files and kind == "diff":
        return f"eyas diff: A {files[0]}, B {files[1]}"
    model = (record.get("flags") or {}).get("model")
    about = ", ".join(files) if files else Path(str(model)).name if model else ""
    return f"eyas {kind}: {about}" if about else f"eyas {kind}"


def heading(record: Record) -> list[Html]:
    """Setting, warnings, verdict and facts."""
    parts = []
    if setting := _setting(record):
        parts.append(tag("p", "; ".join(setting), class_="quiet setting"))
    if record.get("simulated"):
        parts.append(tag("p", f"SIMULATED: {record['simulated']}", class_="warn"))
    if record.get("tokens_equal") is False:
        parts.append(tag("p", "Texts DIFFER, which is a defect.", class_="warn"))
    first, *rest = re.split(r"(?<=\.) (?=[A-Z])", record.get("verdict") or _bench_verdict(record))
    if first:
        parts.append(tag("p", arrows(first), class_="verdict"))
    if rest:
        parts.append(tag("p", arrows(" ".join(rest))))
    parts += [tag("p", note, class_="warn") for note in record.get("notes") or []]
    facts = [
        tag("div", tag("dt", name), tag("dd", text))
        for key, name, unit in FACTS
        if (text := _fact(_value(record, key), unit))
    ]
    if record.get("classified_fraction"):
        named = f"{record['classified_fraction']:.1%}"
        facts.append(tag("div", tag("dt", "device time named"), tag("dd", named)))
    return [*parts, tag("dl", *facts, class_="facts")] if facts else parts


def _setting(record: Record) -> list[str]:
    """What ran, where, with which versions, as far as the record says."""
    flags, provenance = record.get("flags") or {}, record.get("provenance") or {}
    profile, engine = record.get("profile"), record.get("engine")
    found = [f"drafter {Path(str(flags['drafter'])).name}"] if flags.get("drafter") else []
    if engine:
        found.append(f"engine {engine['name'] if isinstance(engine, dict) else engine}")
    if isinstance(profile, dict):
        found.append(f"predicted for {profile['machine']}")
    elif record.get("gpu"):
        found.append(str(record["gpu"]))
    elif provenance.get("device"):
        found.append(_machine(provenance))
    code, versions = provenance.get("code") or {}, provenance.get("versions") or {}
    commit = f" at {code['commit'][:9]}" if code.get("commit") else ""
    if versions.get("eyas"):
        found.append(f"eyas {versions['eyas']}{commit}, torch {versions.get('torch')}")
    return found


def _machine(provenance: Record) -> str:
    gpus, cpu = provenance.get("gpus") or [], provenance.get("cpu") or {}
    name = f"{cpu.get('model', 'CPU')}, {cpu.get('cores', '?')} cores"
    if provenance["device"] != "cpu" and gpus:
        name = f"{len(gpus)} x {gpus[0]['name']}"
    return f"{name}, {provenance.get('dtype')}"


def _bench_verdict(record: Record) -> str:
    """A sentence on the rates of a bench, and one on its texts."""
    plain, spec = (record.get(side) or {} for side in ("plain", "spec"))
    if not plain.get("tok_per_s") or not spec.get("tok_per_s"):
        return ""
    rates = f"{spec['tok_per_s']:.1f} tokens a second, plain decoding {plain['tok_per_s']:.1f}"
    count = record.get("num_pairs")
    equal = f" Texts are equal token by token in all {count} pairs." if count else ""
    return f"Speculation writes {rates}.{equal if record.get('tokens_equal') else ''}"


def _value(record: Record, key: str) -> Any:
    places = [record, record.get("spec") or {}]
    if not key.endswith("_ms"):
        places.append(record.get("against_decode") or {})
    return next((place[key] for place in places if place.get(key) is not None), None)


def _fact(value: Any, unit: str) -> str:
    """A value with its unit; of two runs, both."""
    if isinstance(value, list):
        both = (
            f"{side}{STAYS}{_fact(v, unit).replace(' ', STAYS)}"
            for side, v in zip("AB", value, strict=True)
            if v
        )
        return ", ".join(both)
    if not isinstance(value, int | float) or not value:
        return ""
    text = f"{value:,}" if isinstance(value, int) else short(value)
    return f"{text} {unit}".strip()
