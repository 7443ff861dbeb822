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
header{margin:0 0 1.2rem}
.quiet,.unit,.value,.note,.axis,.scale{color:var(--quiet)}
.unit,.note,.legend,.setting{font-size:.9rem}
.verdict{font-size:1.1rem;font-weight:600;margin:.6rem 0 .3rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.8rem,1fr));
 gap:.6rem 1rem;margin:.9rem 0 0}
.facts dt{color:var(--quiet);font-size:.8rem}
.facts dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.beside{border-top:2px solid var(--rule);margin-top:2rem;padding-top:1rem}
.warn{color:var(--warn);font-weight:600}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;
 padding:.9rem;margin:1rem 0}
svg{display:block;overflow:hidden}
.bar{width:100%;height:1.15rem;background:var(--page);border-radius:3px}
.row{display:grid;grid-template-columns:minmax(0,13rem) minmax(0,1fr) minmax(0,17rem);
 gap:.1rem .7rem;align-items:center;margin:.25rem 0}
.name{line-height:1.25}
.value{font-variant-numeric:tabular-nums;font-size:.9rem}
.note{grid-column:2/-1;margin-bottom:.3rem}
.strip{margin:.35rem 0}
.strip .name{font-size:.9rem}
.bar.stage{height:.7rem}
.axis{position:relative;height:1.4em;font-size:.8rem;font-variant-numeric:tabular-nums}
.axis span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.axis span:first-child{transform:none}
.axis span:last-child{transform:translateX(-100%)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.4rem 0}
.legend li{display:flex;align-items:center;gap:.35rem}
.swatch{width:.9rem;height:.9rem;flex:none;border-radius:2px}
.plotted{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.2rem .5rem;margin:.9rem 0}
.plotted .axis{grid-column:2}
.scale{display:flex;flex-direction:column;justify-content:space-between;font-size:.8rem;
 line-height:1.2em;margin:-.6em 0;text-align:right;white-space:nowrap;
 font-variant-numeric:tabular-nums}
.plot{width:100%;height:14rem;overflow:visible;background:var(--page)}
.grid{stroke:var(--rule);vector-effect:non-scaling-stroke}
.curve{fill:none;stroke-width:2.5;vector-effect:non-scaling-stroke}
.dots{stroke-width:8;stroke-linecap:round}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:.6rem 0}
th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--rule);
 vertical-align:top;overflow-wrap:normal}
td:first-child:not(.number){overflow-wrap:anywhere;min-width:9rem}
.code td:first-child{font:.8rem/1.5 ui-monospace,Menlo,Consolas,monospace}
.number{text-align:right}
td.number{white-space:nowrap}
details summary{cursor:pointer}
pre{white-space:pre-wrap;font-size:.8rem}
@media (max-width:40rem){
 body{padding:.6rem}
 .row{display:flex;flex-wrap:wrap;justify-content:space-between;margin:.5rem 0}
 .row .bar,.row .note{order:1;flex:0 0 100%}
 .axis span:nth-child(even){display:none}
 td:first-child:not(.number){min-width:4rem}
 .wide thead{display:none}
 .wide table,.wide tbody{display:block}
 .wide tr{display:flex;flex-wrap:wrap;gap:0 .9rem;padding:.35rem 0;
  border-bottom:1px solid var(--rule)}
 .wide td{border:0;padding:0}
 .wide td:first-child{flex:0 0 100%;font-weight:600}
 .wide.code td:first-child{font-weight:400}
 .wide td[data-label]::before{content:attr(data-label) " ";color:var(--quiet)}
 .wide td:empty{display:none}
}
@media print{
 html{font-size:11px}
 body{max-width:none;padding:0;font-size:1rem}
 section{background:none;padding:.6rem}
 .row,.strip,tr,li,header{break-inside:avoid}
 h1,h2,h3,.unit,thead{break-after:avoid}
 details{display:none}
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
        *("mark", "other", "good", "warn"),
    ]
    fills = "".join(
        f"rect.{c}{{fill:var(--{c})}}.curve.{c}{{fill:none;stroke:var(--{c})}}" for c in classes
    )
    return (
        f":root{{color-scheme:light dark;{shared}{_variables(LIGHT)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        f"{RULES}{fills}"
    )


def _variables(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())
