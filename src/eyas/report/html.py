"""A record as one HTML page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

import json
from typing import Any

from eyas.report.markup import Html, tag
from eyas.report.records import kind_of
from eyas.report.sections import sections
from eyas.report.style import css

FACTS = (
    ("engine", "engine"),
    ("gpu", "device"),
    ("kind", "run"),
    ("layers", "layers"),
    ("batch", "requests"),
    ("nodes", "nodes"),
    ("cycle_ms", "cycle, ms"),
    ("device_ms", "device, ms"),
    ("idle_ms", "idle, ms"),
    ("accept_length", "accept length"),
    ("classified_fraction", "of device time named"),
)
"""Keys of a record whose value stands on top of its page, and their names."""


def page(record: dict[str, Any]) -> str:
    """The page of a stamped record; its runs `beside` have their own figures below."""
    kind = kind_of(record)
    title = f"eyas {kind}" + (f": {', '.join(record['files'])}" if "files" in record else "")
    body = [tag("header", tag("h1", title), *_top(record)), *sections(record)]
    beside = [(", ".join(run["files"]), run) for run in record.get("beside") or []]
    if record.get("decode"):
        beside.append(("plain decoding", record["decode"]))
    for i, (name, run) in enumerate(beside):
        body.append(tag("h1", f"Beside it: {name}"))
        body += _top(run)
        body += [_renamed(section, i) for section in sections(run)]
    body += _provenance(record)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(css())),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"


def _top(record: dict[str, Any]) -> list[Html]:
    """Verdict, warnings and facts."""
    parts = []
    if record.get("simulated"):
        parts.append(tag("p", f"SIMULATED: {record['simulated']}", class_="warn"))
    if record.get("verdict"):
        parts.append(tag("p", record["verdict"], class_="verdict"))
    parts += [tag("p", note, class_="warn") for note in record.get("notes") or []]
    if record.get("tokens_equal") is False:
        parts.append(tag("p", "Texts DIFFER, which is a defect.", class_="warn"))
    facts = [f"{name} {_fact(record[key])}" for key, name in FACTS if record.get(key)]
    return [*parts, tag("p", "; ".join(facts), class_="quiet")] if facts else parts


def _fact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _renamed(section: Html, number: int) -> Html:
    """The section with an id of its own."""
    return Html(section.replace('id="', f'id="beside-{number}-', 1))


def _provenance(record: dict[str, Any]) -> list[Html]:
    """Flags and provenance, folded away."""
    found = {key: record[key] for key in ("flags", "provenance") if key in record}
    if not found:
        return []
    text = json.dumps(found, indent=1)
    return [tag("details", tag("summary", "Flags and provenance"), tag("pre", text))]
