"""A record as one HTML page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

import json
from typing import Any

from eyas.report.heading import heading, title
from eyas.report.markup import Html, tag
from eyas.report.records import kind_of
from eyas.report.sections import sections
from eyas.report.style import css


def page(record: dict[str, Any]) -> str:
    """The page of a stamped record; its runs `beside` have their own figures below."""
    kind = kind_of(record)
    name = title(record, kind)
    body = [tag("header", tag("h1", name), *heading(record)), *sections(record)]
    beside = [(", ".join(run["files"]), run) for run in record.get("beside") or []]
    if record.get("decode"):
        beside.append(("plain decoding", record["decode"]))
    for i, (other, run) in enumerate(beside):
        about = [tag("h1", f"Beside it: {other}"), *heading(run)]
        body.append(tag("header", *about, class_="beside"))
        body += [_renamed(section, i) for section in sections(run)]
    body += _provenance(record)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", name),
        tag("style", Html(css())),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n"


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
