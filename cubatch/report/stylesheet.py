"""
The style sheet of pages and of outputs in a notebook, for light and dark themes.

All rules are nested in those of the class `cubatch`, so that the notebook's own style does not change.  They depend on
the width of that element, since an output is narrower than the window.
"""

STYLE = """
.cubatch { color-scheme: light dark; container-type: inline-size; background: var(--paper); color: var(--ink);
--ink: light-dark(#1d2126, #e6e9ec); --soft: light-dark(#5c6670, #9aa5b0); --rule: light-dark(#dde2e7, #343b43);
--paper: light-dark(#ffffff, #15181c); --card: light-dark(#f4f7fa, #1f242a); --orange: light-dark(#c24e00, #ff9d4d);
--red: light-dark(#b22222, #ff7b7b); --mark: light-dark(#fff3e6, #33271a); font: 16px/1.5 system-ui, sans-serif;
* { box-sizing: border-box; }
h1, .title { margin: 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
.title { font-size: 1.15rem; font-weight: 600; }
.soft { color: var(--soft); } p.soft { margin: .1rem 0 1.25rem; }
.answer { background: var(--card); border-left: 4px solid var(--orange); padding: .8rem 1.1rem; border-radius: 4px; }
.answer { overflow-wrap: anywhere; } .answer p { margin: 0; } .answer ul { margin: .5rem 0 0; padding-left: 1.2rem; }
.predicted { color: var(--red); font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; width: 100%; margin: 0; }
table { table-layout: auto; }
th { text-align: left !important; border-bottom: 2px solid var(--rule); }
th, td { padding: .3rem .6rem; vertical-align: top; }
td { border-bottom: 1px solid var(--rule); text-align: left !important; background: var(--paper); }
.n { text-align: right !important; font-variant-numeric: tabular-nums; }
.wide th, .wide td { white-space: nowrap; } .wide td:last-child { white-space: normal; min-width: 16rem; }
.wide td.n:last-child { min-width: 0; white-space: nowrap; }
tr.mark td { background: var(--mark); font-weight: 600; }
ul.soft { padding-left: 1.2rem; font-size: .86rem; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: 0 2rem; }
.facts th { border-bottom: 1px solid var(--rule); font-weight: 400; color: var(--soft); width: 45%; }
.facts td { overflow-wrap: anywhere; }
summary { margin: 1rem 0 .5rem; font-weight: 600; cursor: pointer; }
.figure { width: 100%; max-width: 60rem; height: auto; background: #ffffff; border-radius: 4px; }
pre { background: var(--card); padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@container (max-width: 36rem) {
th, td { padding: .3rem .4rem; }
.wide th { white-space: normal; vertical-align: bottom; }
.sticky th:nth-child(-n+2), .sticky td:nth-child(-n+2) { position: sticky; left: 0; background: var(--paper); }
.sticky th:nth-child(2), .sticky td:nth-child(2) { left: 1.6rem; } .sticky tr.mark td { background: var(--mark); }
.sticky td:last-child { white-space: nowrap; } .sticky table { border-collapse: separate; border-spacing: 0; }
}
@media print {
.wide { overflow: visible; } h2 { break-after: avoid; } tr, img, pre, .answer { break-inside: avoid; }
}
}
/* Themes of JupyterLab, VS Code and Colab; they override the theme of the system. */
body[data-jp-theme-light="true"] .cubatch, .vscode-light .cubatch, html[theme="light"] .cubatch { color-scheme: light; }
body[data-jp-theme-light="false"] .cubatch, .vscode-dark .cubatch, html[theme="dark"] .cubatch { color-scheme: dark; }
body.cubatch { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 70rem; }
div.cubatch { padding: .8rem 1rem; font-size: 14px; }
@media (max-width: 38rem) { body.cubatch { padding: 1.25rem .8rem 2rem; } }
"""
