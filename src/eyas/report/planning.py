"""What `eyas plan` does: a record of a scenario or of the starting case, shown as it is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from eyas.config import SpeculationConfig, require
from eyas.fingerprint import fingerprint
from eyas.report.options import PlanConfig
from eyas.report.plan_table import show
from eyas.report.scenarios import scenario_of
from eyas.report.starting_case import starting_case
from eyas.report.starting_page import page
from eyas.report.whatif import plan


def planned(
    console: Console,
    model: str,
    drafter: str,
    speculation: SpeculationConfig | None,
    config: PlanConfig,
) -> dict[str, Any]:
    """The record of the flags' scenario; raises `ConfigError` and `CheckpointError`."""
    require(
        not config.markdown,
        f"markdown={config.markdown}",
        "only the starting case is a page",
        "give --starting-case with it",
    )
    record = plan(scenario_of(model, drafter, speculation, config))
    show(console, record)
    flags = dataclasses.asdict(config) | {"model": model, "drafter": drafter}
    return record | {"flags": flags, "provenance": fingerprint()}


def taken_apart(console: Console, markdown: str) -> dict[str, Any]:
    """The record of the starting case; its page goes to `markdown` too, if that is given."""
    record = starting_case()
    text = page(record)
    console.print(Markdown(text))
    if markdown:
        Path(markdown).write_text(text, encoding="utf-8")
    return record | {"provenance": fingerprint()}
