"""Self-contained HTML pages with text, tables, and images or charts that a script draws."""

import base64
import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path

from metaloom.flows.errors import ExtraMissing
from metaloom.flows.views.series import Chart, chart_data

_VIEWER = Path(__file__).parents[1] / "viewer" / "static"
_REPORT = Path(__file__).parent / "static" / "report.js"
# Enforced by the browser: no network, no scripts, images only from the page itself.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

CONTROLS = """
<p class="controls">Drag to zoom, double-click to reset the zoom. Click a name in a legend, or press Enter on it, to
hide its line.
<label>Against <select id="against" autocomplete="off"><option value="x">environment steps</option><option
value="iterations">iterations</option></select></label></p>
<noscript><p class="problem">Scripts draw the charts, but are disabled in this browser. For a report without scripts:
metaloom report RUN --static</p></noscript>
<p class="problem" id="trouble" hidden>This browser cannot draw the charts. For a report without scripts: metaloom
report RUN --static. </p>
""".strip()


def plotly_file() -> Path:
    """Return the path of the installed plotly.min.js without importing plotly; raise ExtraMissing if there is none."""
    found = importlib.util.find_spec("plotly")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "package_data" / "plotly.min.js"
        if file.exists():
            return file
    raise ExtraMissing("view", "plotly with its plotly.min.js")


@dataclass(frozen=True)
class Picture:
    """Image in a page: data URI, text for screen readers, caption, and whether it fills its container's width."""

    source: str
    alternative: str
    caption: str = ""
    enlarged: bool = True


Figure = Picture | Chart


@dataclass(frozen=True)
class Page:
    """Content of a page as plain text, which is escaped when the page is rendered."""

    title: str  # heading, which is also the window title
    subtitle: str  # line below the heading
    tiles: Sequence[tuple[str, str]]  # names and values of the key figures at the top
    main_figure: Figure  # figure that spans the page
    sections: Sequence[tuple[str, Sequence[Figure]]]  # headings and their figures, in order
    tables: Mapping[str, Sequence[tuple[str, str]]]  # names and values, keyed by heading
    unfolded: Sequence[str] = ()  # headings of the tables that are not folded
    plotly: str = ""  # text of plotly.js, which draws the charts; empty for images and no scripts

    def html(self) -> str:
        tile = '<div class="tile"><b>{}</b><span>{}</span></div>'
        tiles = (tile.format(escape(value), escape(what)) for what, value in self.tiles)
        sections = (
            f'<h2>{escape(heading)}</h2>\n<div class="grid">{"".join(map(_figure, figures))}</div>'
            for heading, figures in self.sections
        )
        tables: list[str] = []
        for heading, rows in self.tables.items():
            body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
            card = f'<details class="card"{" open" if heading in self.unfolded else ""}>'
            tables.append(f'{card}<summary>{escape(heading)}</summary><table class="facts">{body}</table></details>')
        style = (_VIEWER / "style.css").read_text(encoding="utf-8").strip()
        figures = (self.main_figure, *(figure for _, figures in self.sections for figure in figures))
        charts = [figure for figure in figures if isinstance(figure, Chart)]
        policy, scripts = _scripts(charts, self.plotly) if self.plotly else (POLICY, "")
        return "\n".join(
            [
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(self.title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>",
                f'<h1>{escape(self.title)}</h1>\n<p class="quiet">{escape(self.subtitle)}</p>',
                f'<div class="tiles">{"".join(tiles)}</div>',
                CONTROLS if self.plotly else "",
                _figure(self.main_figure, "h2"),
                *sections,
                "<h2>Details</h2>",
                *tables,
                f"</main>\n{scripts}\n</body>\n</html>\n",
            ]
        )


def _scripts(charts: Sequence[Chart], plotly: str) -> tuple[str, str]:
    """Return the Content-Security-Policy for a page with charts, and the HTML of its scripts and chart data."""
    text = (_VIEWER / "traces.js").read_text(encoding="utf-8") + "\n" + _REPORT.read_text(encoding="utf-8")
    # A page opened from disk cannot import modules, so join both files into one script.
    script = "\n" + re.sub(r"^export ", "", text, flags=re.MULTILINE)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, plotly))
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # plotly.js saves a chart as an image through a blob.
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}"
    # Scripts are not escaped; only "<" could end one.
    data = json.dumps([*map(chart_data, charts)], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return policy, (
        f'<script type="application/json" id="charts">{data}</script>\n'
        f'<script type="application/gzip" id="plotly">{_packed(plotly)}</script>\n<script>{script}</script>'
    )


@lru_cache(1)  # a sweep writes many pages
def _packed(plotly: str) -> str:
    return base64.b64encode(gzip.compress(plotly.encode(), 6, mtime=0)).decode()


def _figure(figure: Figure, heading: str = "h3") -> str:
    text = figure.caption if isinstance(figure, Picture) else figure.note
    caption = f"<figcaption>{escape(text)}</figcaption>" if text else ""
    if isinstance(figure, Picture):
        css_class = "card" if figure.enlarged else "card as-is"
        image = f'<img src="{escape(figure.source)}" alt="{escape(figure.alternative)}">'
        return f'<figure class="{css_class}">{image}{caption}</figure>'
    css_class, name, title = f"card chart{' across' * figure.wide}", escape(figure.name), escape(figure.title)
    chart = f'<{heading}>{title}</{heading}><div id="chart-{name}"></div>'
    return f'<figure class="{css_class}">{chart}{caption}</figure>'
