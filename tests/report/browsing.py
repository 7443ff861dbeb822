"""Pages looked at by a headless Chromium: where texts are, what was asked for, what was said.

Pages stand in frames, since browsers do not make their windows as narrow as a phone. A guard in a
page's head forbids every request, so that each is told of, whether it would succeed or not. A probe
at its end measures, a while after the page has loaded, and hands its findings to the page of the
frames, whose text is then dumped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.report.style import DARK, LIGHT
from tests.report.page_checks import overlaps

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

SMALLEST = 10.5
"""Pixels of a font that is still read."""
GUARD = """<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src data: 'unsafe-inline'">
<script>
const requests = [];
addEventListener("securitypolicyviolation", (e) => { requests.push(e.blockedURI); });
</script>"""
PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const texts = [], small = [], cut = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const frames = (e) => {
    const found = [];
    for (; e !== document.documentElement; e = e.parentElement)
      if (getComputedStyle(e).overflowX !== "visible") found.push(e.getBoundingClientRect());
    return found;
  };
  while (walk.nextNode()) {
    const node = walk.currentNode, range = document.createRange();
    if (!node.data.trim() || node.parentElement.tagName === "SCRIPT") continue;
    range.selectNodeContents(node);
    const said = node.data.slice(0, 40), inside = frames(node.parentElement);
    for (const r of range.getClientRects())
      if (r.width > 1) {
        texts.push([r.left, r.top + 2, r.right, r.bottom - 2, said]);
        if (inside.some((f) => r.left < f.left - 1 || r.right > f.right + 1)) cut.push(said);
        if (parseFloat(getComputedStyle(node.parentElement).fontSize) < SMALLEST) small.push(said);
      }
  }
  const drawn = (e) => {
    const r = e.getBoundingClientRect();
    return r.width > 100 && r.height > 5;
  };
  const shown = [...document.querySelectorAll("section")].filter(
    (s) => [...s.querySelectorAll("svg, table")].some(drawn));
  parent.postMessage(JSON.stringify({
    name: location.pathname.split("/").pop(),
    texts, small, cut,
    figures: shown.map((s) => s.id),
    wide: document.documentElement.scrollWidth,
    ink: getComputedStyle(document.body).color,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    requests: requests.concat(performance.getEntriesByType("resource").map((e) => e.name)),
    ground: getComputedStyle(document.documentElement).backgroundColor,
  }), "*");
}, 1000));
</script>"""
FRAMES = """<!doctype html><title>frames</title><body style="margin:0">
<pre id="out"></pre>
FRAMES
<script>
const told = [];
addEventListener("message", (e) => {
  told.push(JSON.parse(e.data));
  document.getElementById("out").textContent = JSON.stringify(told);
});
</script>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A page as it shall be seen."""

    text: str
    figures: set[str]
    width: int
    dark: bool


def seen(folder: Path, sights: Sequence[Sight]) -> list[list[str]]:
    """What is wrong with each of several pages, by one start of the browser a colour scheme."""
    wrong: list[list[str]] = [[] for _ in sights]
    for dark in sorted({sight.dark for sight in sights}):
        numbers = [i for i, sight in enumerate(sights) if sight.dark == dark]
        place = folder / ("dark" if dark else "light")
        place.mkdir()
        found, said = looked_at(place, [sights[i] for i in numbers], dark)
        for n, i in enumerate(numbers):
            name = f"page-{n}.html"
            faults = judged(sights[i], found[name]) if name in found else ["silent: no findings"]
            own = [f"{kind(line)}: {line}" for line in said.get(name, [])]
            wrong[i] = own + [f"browser: {line}" for line in said.get("", [])] + faults
    return wrong


def kind(line: str) -> str:
    """Of a fault that the console tells of: a page may not hear in time what its guard forbade."""
    return "request" if "Content Security Policy" in line else "console"


def judged(sight: Sight, found: dict[str, Any]) -> list[str]:
    """What is wrong with a page by what a probe has found in it."""
    colours, figures = DARK if sight.dark else LIGHT, set(found["figures"])
    wrong = [f"request: {url}" for url in found["requests"]]
    wrong += [f"figure: {name} is missing" for name in sorted(sight.figures - figures)]
    wrong += [f"figure: {name} is one too many" for name in sorted(figures - sight.figures)]
    wrong += [f"width: {found['wide']} of {sight.width}"] * (found["wide"] > sight.width)
    wrong += [f"small: {text!r}" for text in found["small"]]
    wrong += [f"cut: {text!r}" for text in found["cut"]]
    wrong += [f"overlap: {pair}" for pair in overlaps([tuple(box) for box in found["texts"]])]
    if found["dark"] != sight.dark:
        wrong.append(f"colours: the browser is {'light' if sight.dark else 'dark'}")
    for place, name in (("ground", "page"), ("ink", "text")):
        wanted = ", ".join(str(int(colours[name][i : i + 2], 16)) for i in (1, 3, 5))
        if found[place] != f"rgb({wanted})":
            wrong.append(f"colours: {place} is {found[place]}, not rgb({wanted})")
    return wrong


def looked_at(
    folder: Path, sights: Sequence[Sight], dark: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """What the browser makes of pages, and what its console says, by their file's name.

    What the console says of no page stands under no name.
    """
    assert CHROMIUM is not None
    probe, frames = PROBE.replace("SMALLEST", str(SMALLEST)), []
    for i, sight in enumerate(sights):
        guarded = sight.text.replace("<head>", f"<head>{GUARD}", 1)
        guarded = guarded.replace("</body>", f"{probe}</body>")
        assert GUARD in guarded
        assert probe in guarded
        (folder / f"page-{i}.html").write_text(guarded, encoding="utf-8")
        look = f"border:0;width:{sight.width}px;height:1000px"
        frames.append(f'<iframe src="page-{i}.html" style="{look}"></iframe>')
    start = folder / "frames.html"
    start.write_text(FRAMES.replace("FRAMES", "\n".join(frames)), encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--virtual-time-budget=4000",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1400,1000",
        "--dump-dom",
        start.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<pre id="out">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stderr[-2000:]
    found = {one.pop("name"): one for one in json.loads(html.unescape(match.group(1)))}
    said: dict[str, list[str]] = {}
    for line in filter(lambda line: "CONSOLE" in line, done.stderr.splitlines()):
        place = re.search(r"source: \S*/(page-\d+\.html) \(\d+\)$", line)
        said.setdefault(place.group(1) if place else "", []).append(line)
    return found, said
