"""A page looked at by a headless Chromium: where its texts are, what it asked for, what it said.

`seen` is what a browser finds wrong with a page; `looked_at` is what it is told by.

The page stands in a frame, since browsers do not make their windows as narrow as a phone. A guard
in its head forbids every request, so that each is told of, whether it would succeed or not. A probe
at its end measures, a while after the page has loaded, and hands its findings to the frame's page,
whose text is then dumped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
FRAME = """<!doctype html><title>frame</title><body style="margin:0">
<iframe src="page.html" style="border:0;width:WIDTHpx;height:4000px"></iframe>
<pre id="out"></pre>
<script>
addEventListener("message", (e) => { document.getElementById("out").textContent = e.data; });
</script>"""


def seen(
    folder: Path, text: str, width: int, colours: dict[str, str], figures: set[str], dark: bool
) -> list[str]:
    """What is wrong with a page `width` pixels wide that should show `figures` in `colours`."""
    found, said = looked_at(folder, text, width, dark)
    wrong = [f"console: {line}" for line in said]
    wrong += [f"request: {url}" for url in found["requests"]]
    wrong += [f"figure: {name} is missing" for name in sorted(figures - set(found["figures"]))]
    wrong += [f"figure: {name} is one too many" for name in set(found["figures"]) - figures]
    wrong += [f"width: {found['wide']} of {width}"] * (found["wide"] > width)
    wrong += [f"small: {text!r}" for text in found["small"]]
    wrong += [f"cut: {text!r}" for text in found["cut"]]
    wrong += [f"overlap: {pair}" for pair in overlaps([tuple(box) for box in found["texts"]])]
    if found["dark"] != dark:
        wrong.append(f"colours: the browser is {'light' if dark else 'dark'}")
    for place, name in (("ground", "page"), ("ink", "text")):
        wanted = ", ".join(str(int(colours[name][i : i + 2], 16)) for i in (1, 3, 5))
        if found[place] != f"rgb({wanted})":
            wrong.append(f"colours: {place} is {found[place]}, not rgb({wanted})")
    return wrong


def looked_at(
    folder: Path, text: str, width: int, dark: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """What the browser makes of a page `width` pixels wide, and its console's messages.

    Leaves a screenshot `shot-WIDTH.png` in `folder`.
    """
    assert CHROMIUM is not None
    probe = PROBE.replace("SMALLEST", str(SMALLEST))
    guarded = text.replace("<head>", f"<head>{GUARD}", 1).replace("</body>", f"{probe}</body>")
    assert GUARD in guarded
    assert probe in guarded
    (folder / "page.html").write_text(guarded, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
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
        f"--window-size={max(width, 800)},4100",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]
    url, shot = (folder / "frame.html").as_uri(), folder / f"shot-{width}.png"
    command += [f"--screenshot={shot}", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert shot.stat().st_size > 5_000
    match = re.search(r'<pre id="out">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(match.group(1))), said
