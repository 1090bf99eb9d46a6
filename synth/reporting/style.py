"""The page's style sheet.

Each kind of number has a colour, a dash and a fill of its own. The colours follow Okabe and Ito's, which colour-blind
readers tell apart, and the tiles of the map go from light to dark, as ColorBrewer's YlGnBu does.
"""

from __future__ import annotations

#: Sizes of a kernel's tile along tokens that have a colour.
TILES = (8, 16, 32, 64, 128, 256)

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --panel: #f6f8fa; --rule: #d0d7de;
  --measured: #0072b2; --verified: #009e73; --predicted: #c2570c; --analytical: #a4508b; --left: #8c959f;
  --loud: #fff1e5; --loud-ink: #7a2e00; --loud-rule: #d9822b; --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b3; --paper: #0d1117; --panel: #161b22;
  --rule: #3d444d; --measured: #56b4e9; --verified: #2fc79b; --predicted: #e69f00; --analytical: #d993c4;
  --left: #768390; --loud: #3a2410; --loud-ink: #ffd8b0; --loud-rule: #d9822b; --link: #7cb7ff; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 1180px; margin: 0 auto; padding: 16px 12px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.3em 0 0.2em; }
h2 { font-size: 1.2rem; margin: 2.2em 0 0.5em; padding-bottom: 0.2em; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.6em 0 0.4em; }
p { margin: 0.5em 0; max-width: 84ch; }
a { color: var(--link); }
code { font: 0.92em ui-monospace, "DejaVu Sans Mono", monospace; }
.lead, .note { color: var(--soft); }
.note { font-size: 0.9rem; }
nav { font-size: 0.9rem; margin: 0.8em 0; }
nav a { display: inline-block; margin-right: 1em; padding: 2px 0; }
.loud { background: var(--loud); color: var(--loud-ink); border: 1px solid var(--loud-rule); border-left-width: 6px;
  padding: 8px 12px; margin: 12px 0; max-width: none; }
.loud strong { letter-spacing: 0.02em; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; margin: 14px 0; }
.cards div { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: 8px 10px; }
.cards dt { font-size: 0.8rem; color: var(--soft); }
.cards dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.cards small { display: block; font-size: 0.8rem; line-height: 1.35; color: var(--soft); }
.facts div { display: flex; flex-wrap: wrap; gap: 0 12px; padding: 3px 0; border-bottom: 1px solid var(--rule); }
.facts dt { flex: 0 0 190px; color: var(--soft); }
.facts dd { margin: 0; flex: 1 1 240px; min-width: 0; }
.wide { overflow-x: auto; max-width: 100%; margin: 10px 0; border: 1px solid var(--rule); border-radius: 6px; }
.wide:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem; }
th, td { padding: 4px 9px; text-align: left; vertical-align: top; overflow-wrap: normal; }
thead th { background: var(--panel); border-bottom: 1px solid var(--rule); vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead .n { white-space: normal; }
td code { font-size: 0.8rem; } td small { color: var(--soft); } .w { white-space: nowrap; }
figure { margin: 14px 0; }
figcaption { font-size: 0.92rem; max-width: 84ch; }
figcaption b { display: block; }
.table figcaption { font-size: 0.86rem; color: var(--soft); max-width: none; }
.table .wide { margin: 4px 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0; padding: 0;
  font-size: 0.84rem; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend svg { flex: none; }
.plots { display: flex; flex-wrap: wrap; gap: 10px 16px; }
.plot { max-width: 100%; height: auto; flex: none; }
.defs { position: absolute; }
.plot text { fill: var(--ink); font: 11px system-ui, "DejaVu Sans", sans-serif; }
.plot .head { font-size: 12px; font-weight: 600; }
.plot .tick, .plot .name { fill: var(--soft); }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--rule); stroke-width: 0.7; } .axis { stroke: var(--soft); stroke-width: 1; }
.measured, .first { --c: var(--measured); } .verified { --c: var(--verified); }
.predicted, .second { --c: var(--predicted); } .analytical, .third { --c: var(--analytical); }
.left, .unknown { --c: var(--left); } .even { --c: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; }
.line.predicted, .line.second { stroke-dasharray: 6 3; } .line.analytical, .line.third { stroke-dasharray: 2 3; }
.line.even { stroke-width: 1; stroke-dasharray: 1 3; } .mark.even { display: none; }
.band { fill: var(--c); opacity: 0.15; } .band.even { display: none; }
.mark { fill: var(--c); stroke: var(--paper); stroke-width: 0.6; }
.mark.predicted, .mark.second, .mark.analytical, .mark.third { fill: var(--paper); stroke: var(--c);
  stroke-width: 1.4; }
.bar { fill: var(--c); stroke: var(--c); stroke-width: 0.8; }
.bar.verified { fill-opacity: 0.55; }
.bar.predicted { fill: url(#fill-predicted); } .bar.analytical { fill: url(#fill-analytical); }
.bar.left { fill: none; stroke-dasharray: 2 2; }
.ground { fill: var(--c); opacity: 0.16; }
.hatch { stroke: var(--predicted); stroke-width: 1.2; fill: none; } .dot { fill: var(--analytical); }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--link); padding: 2px 0; }
.map { width: auto; font-size: 0.78rem; border-collapse: separate; border-spacing: 1px; }
.map th, .map td { padding: 1px 4px; text-align: center; border: 0 !important; }
.map td { min-width: 25px; height: 20px; vertical-align: middle; font-variant-numeric: tabular-nums; }
.map tbody th { text-align: left; font-weight: 400; white-space: nowrap; background: var(--paper);
  vertical-align: middle; }
.map tbody .who { position: sticky; left: 0; max-width: 200px; white-space: normal; line-height: 1.2; z-index: 1; }
.map small { font-weight: 400; color: var(--soft); }
.map tbody .who { font-weight: 600; border-top: 1px solid var(--rule) !important; }
.map .m, .key .m { font-weight: 700; text-decoration: underline; } .map .a, .key .a { font-style: italic; }
.map .o { color: var(--soft); }
.key span { margin-left: 1em; white-space: nowrap; } .key span b { margin-right: 4px; }
.key b { display: inline-block; min-width: 28px; padding: 0 4px; text-align: center; font-weight: 400; }
.t8 { background: #ffffcc; color: #111; } .t16 { background: #d9f0b8; color: #111; }
.t32 { background: #a1dab4; color: #111; } .t64 { background: #41b6c4; color: #111; }
.t128 { background: #2c7fb8; color: #fff; } .t256 { background: #253494; color: #fff; }
.tx { background: var(--panel); color: var(--ink); }
.labels { font-size: 0.85rem; columns: 220px; padding-left: 1.2em; margin: 6px 0; }
footer { margin-top: 3em; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 520px) { h1 { font-size: 1.3rem; } .cards { grid-template-columns: 1fr 1fr; }
  .map tbody .who { min-width: 116px; max-width: 116px; overflow-wrap: break-word; } .facts dt { flex-basis: 100%; } }
@media print { .wide { overflow: visible; } }
"""
