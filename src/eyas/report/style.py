"""The look of a report: light and dark, on a phone, on a desk, on paper."""

from __future__ import annotations

LIGHT = {
    "page": "#ffffff",
    "card": "#f6f7f9",
    "text": "#1b1f24",
    "quiet": "#545b66",
    "rule": "#d5d9df",
    "good": "#0b6e3b",
    "warn": "#9a3412",
    "mark": "#1b1f24",
    "other": "#7f8793",
}
DARK = {
    "page": "#14171c",
    "card": "#1d2128",
    "text": "#e8eaee",
    "quiet": "#a7aeba",
    "rule": "#363c46",
    "good": "#5fd08f",
    "warn": "#ffab70",
    "mark": "#ffffff",
    "other": "#7c8592",
}
"""Colours of both schemes; texts are `text`, `quiet`, `good` and `warn` on `page` or `card`."""

COMPONENT_COLOURS = (
    "#d55e00",
    "#0072b2",
    "#b5539c",
    "#6b7a8f",
    "#1a9e77",
    "#2a8fce",
    "#b97a00",
    "#8a8f00",
    "#9c6355",
    "#a04db8",
    "#e0245e",
    "#7069da",
    "#838b98",
)
"""In the order of `components.COMPONENTS`; each stands out on both schemes' cards."""
STAGE_COLOURS = (
    "#9c6355",
    "#b97a00",
    "#0072b2",
    "#0072b2",
    "#b5539c",
    "#a04db8",
    "#1a9e77",
    "#2a8fce",
    "#6b7a8f",
)
"""In the order of `components.STAGES`."""

RULES = """
*{box-sizing:border-box}
html{background:var(--page);color:var(--text);-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:68rem;padding:1rem;
 font:16px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:.2rem 0}
h2{font-size:1.05rem;margin:0 0 .4rem}
h3{font-size:.95rem;margin:1rem 0 .3rem}
p{margin:.3rem 0}
.quiet,.unit,.value,.axis,.scale{color:var(--quiet)}
.verdict{color:var(--good);font-weight:600}
.warn{color:var(--warn);font-weight:600}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;
 padding:.9rem;margin:1rem 0}
svg{display:block;overflow:hidden}
.bar{width:100%;height:1.15rem;background:var(--page);border-radius:3px}
.row{display:grid;grid-template-columns:minmax(0,13rem) minmax(0,1fr) minmax(0,15rem);
 gap:.1rem .7rem;align-items:center;margin:.25rem 0}
.value{font-variant-numeric:tabular-nums;font-size:.9rem}
.strip{margin:.35rem 0}
.strip .name{font-size:.9rem}
.bar.stage{height:.7rem}
.axis{display:flex;justify-content:space-between;gap:.5rem;font-size:.8rem;
 font-variant-numeric:tabular-nums}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.4rem 0;
 font-size:.9rem}
.legend li{display:flex;align-items:center;gap:.35rem}
.swatch{width:.9rem;height:.9rem;flex:none;border-radius:2px}
.plotted{display:flex;gap:.5rem}
.scale{display:flex;flex-direction:column;justify-content:space-between;font-size:.8rem}
.plot{width:100%;height:14rem;background:var(--page)}
.curve{fill:none;stroke-width:2.5;vector-effect:non-scaling-stroke}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;border-bottom:1px solid var(--rule);
 vertical-align:top;overflow-wrap:normal}
td:first-child{overflow-wrap:anywhere;min-width:9rem}
.number{text-align:right;white-space:nowrap}
details summary{cursor:pointer}
pre{white-space:pre-wrap;font-size:.8rem}
@media (max-width:40rem){
 body{padding:.6rem}
 .row{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}
 .row .bar{grid-column:1/-1;grid-row:2}
 .row .value{text-align:right}
 .axis span:nth-child(even){display:none}
}
@media print{
 body{max-width:none;padding:0;font-size:11px}
 section{break-inside:avoid;background:none}
 *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""


def css() -> str:
    """The style sheet."""
    shared = _variables(
        {f"c{i}": c for i, c in enumerate(COMPONENT_COLOURS)}
        | {f"s{i}": c for i, c in enumerate(STAGE_COLOURS)}
    )
    classes = [
        *(f"c{i}" for i in range(len(COMPONENT_COLOURS))),
        *(f"s{i}" for i in range(len(STAGE_COLOURS))),
        "mark",
        "other",
    ]
    fills = "".join(
        f".{c}{{fill:var(--{c})}}.curve.{c}{{fill:none;stroke:var(--{c})}}" for c in classes
    )
    return (
        f":root{{color-scheme:light dark;{shared}{_variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        f"{RULES}{fills}"
    )


def _variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())
