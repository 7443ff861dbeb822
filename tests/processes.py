"""The environment of Python processes that tests start: what this one imports, they can."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """This process's with `variables`; the source and the tests come before PYTHONPATH's own."""
    search = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, search))
    return {**os.environ, "PYTHONPATH": path, **variables}
