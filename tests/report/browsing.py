"""A page looked at by a headless Chromium: where its texts are, what it asked for, what it said.

The page stands in a frame, since browsers do not make their windows as narrow as a phone. A probe
inside it measures and hands its findings to the frame's page, whose text is then dumped.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

PROBE = """
<script>
addEventListener("load", () => {
  const texts = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, range = document.createRange();
    if (!node.data.trim() || node.parentElement.tagName === "SCRIPT") continue;
    range.selectNodeContents(node);
    for (const r of range.getClientRects())
      if (r.width > 1)
        texts.push([r.left, r.top + 2, r.right, r.bottom - 2, node.data.slice(0, 40)]);
  }
  const shown = [...document.querySelectorAll("section")].filter(
    (s) => s.getBoundingClientRect().height > 20);
  parent.postMessage(JSON.stringify({
    texts,
    figures: shown.map((s) => s.id),
    wide: document.documentElement.scrollWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    requests: performance.getEntriesByType("resource").map((e) => e.name),
    ground: getComputedStyle(document.documentElement).backgroundColor,
  }), "*");
});
</script>"""
FRAME = """<!doctype html><title>frame</title><body style="margin:0">
<iframe src="page.html" style="border:0;width:WIDTHpx;height:4000px"></iframe>
<pre id="out"></pre>
<script>
addEventListener("message", (e) => { document.getElementById("out").textContent = e.data; });
</script>"""


def looked_at(folder: Path, text: str, width: int, *flags: str) -> tuple[dict[str, Any], str]:
    """What the browser makes of a page `width` pixels wide, and its console's messages.

    Leaves a screenshot `shot-WIDTH.png` in `folder`.
    """
    assert CHROMIUM is not None
    (folder / "page.html").write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
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
        *flags,
    ]
    url, shot = (folder / "frame.html").as_uri(), folder / f"shot-{width}.png"
    taking = [*command, f"--screenshot={shot}", url]
    subprocess.run(taking, capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 5_000
    dumping = [*command, "--dump-dom", url]
    done = subprocess.run(dumping, capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r'<pre id="out">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    assert match, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(match.group(1))), "\n".join(said)
