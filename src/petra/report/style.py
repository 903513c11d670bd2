"""The style sheet of a report: one column on a phone, light and dark as the reader's system has it."""

from __future__ import annotations

from collections.abc import Sequence

from petra.measure.method_style import LineStyle

_LIGHT = {
    "bg": "#ffffff",
    "card": "#f6f8fa",
    "fg": "#1f2328",
    "muted": "#59636e",
    "border": "#d1d9e0",
    "grid": "#dfe4ea",
    "accent": "#0969da",
    "warn": "#fff4d6",
    "warn-border": "#d4a72c",
    **{f"s{i}": c for i, c in enumerate(("#3b3f98", "#1f78b4", "#b15928", "#00855f", "#b8860b", "#c2386b"))},
}
_DARK = {
    "bg": "#0d1117",
    "card": "#161b22",
    "fg": "#e6edf3",
    "muted": "#9aa4af",
    "border": "#3d444d",
    "grid": "#2a313c",
    "accent": "#58a6ff",
    "warn": "#2d2410",
    "warn-border": "#9e6a03",
    **{f"s{i}": c for i, c in enumerate(("#a5a8ff", "#6cb6ff", "#f0a36b", "#4cc38a", "#e3b341", "#ff8fb0"))},
}
# Okabe and Ito's colours, which are distinct on both backgrounds and with any colour vision.
_PARTS = ("#0072b2", "#56b4e9", "#7f8c9b", "#cc79a7", "#e69f00", "#c9b400", "#d55e00", "#009e73")
_ACTIONS = {"forward": "#56b4e9", "backward": "#e69f00", "update": "#009e73", "learn": "#cc79a7"}

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:16px;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.2em 0}
h2{font-size:1.3rem;margin:1.6em 0 .6em;border-bottom:1px solid var(--border);padding-bottom:.2em}
h3{font-size:1.08rem;margin:1.5em 0 .5em}
a{color:var(--accent)}
p{margin:.5em 0}
nav{margin:.6em 0}nav a{margin-right:1em}
.note,.sub,figcaption span{color:var(--muted);font-size:.88rem}
.results{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:8px}
.results div{background:var(--card);border:1px solid var(--border);border-radius:8px;padding:8px 10px}
.results strong{display:block;font-size:1.06rem}
.results span{color:var(--muted);font-size:.82rem;line-height:1.3;display:block}
.charts{margin:12px 0;display:grid;gap:14px;align-items:start;
grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr))}
figure{margin:0 0 12px;padding:10px;background:var(--card);border:1px solid var(--border);border-radius:8px;min-width:0}
.charts figure{margin:0}
figcaption{font-weight:600;font-size:.92rem;margin-bottom:4px}
figure svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;max-width:100%}
.scroll svg.wide{min-width:620px;max-width:920px}
.schedule svg{width:auto;max-width:none;height:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px}
.legend svg,figure .legend svg{width:auto;flex:none}
table{border-collapse:collapse;font-size:.88rem;margin:.3em 0}
th,td{padding:4px 10px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--border)}
th{font-weight:600}
td,thead th{white-space:nowrap}
.number{text-align:right;padding:4px 0 4px 14px;font-variant-numeric:tabular-nums}
.names th{color:var(--muted);font-weight:400;white-space:nowrap;padding-right:18px}.names td{white-space:normal}
pre{margin:.3em 0;padding:10px;background:var(--card);border:1px solid var(--border);border-radius:8px;
white-space:pre-wrap;font-size:.84rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
details{margin:.6em 0}summary{cursor:pointer}
.missing{background:var(--warn);border-left:3px solid var(--warn-border);padding:6px 12px;border-radius:4px;
font-size:.92rem;margin:.6em 0}
ul.missing{padding-left:28px}
svg text{fill:var(--fg);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text.label{fill:var(--muted)}svg text.inside{fill:#1f2328;font-size:11px}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--muted);fill:none}.idle{fill:var(--grid)}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}
svg g{fill:currentColor}
.schedule svg g,.schedule svg text{fill:#1f2328}
@media print{figure,section{break-inside:avoid}}
"""


def style_sheet(styles: Sequence[LineStyle]) -> str:
    """Return the rules of a report.

    Args:
        styles: The style of each run.

    Returns:
        CSS, without characters that HTML escapes.
    """
    light = _LIGHT | {f"r{i}": style.light for i, style in enumerate(styles)}
    dark = _DARK | {f"r{i}": style.dark for i, style in enumerate(styles)}
    names = [name for name in light if name[0] in "rs" and name[1:].isdigit()]
    colours = [f".{name}{{color:var(--{name})}}" for name in names]
    colours += [f".m{i}{{fill:{colour}}}" for i, colour in enumerate(_PARTS)]
    colours += [f".{name}{{fill:{colour}}}" for name, colour in _ACTIONS.items()]
    return (
        f":root{{color-scheme:light dark;{_variables(light)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(dark)}}}}}" + _RULES + "".join(colours)
    )


def _variables(values: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in values.items())
