"""Charts as an offline page draws them: as JSON data beside plotly.js, which the page holds."""

import base64
import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from metaloom.flows.errors import ExtraMissing
from metaloom.flows.views.series import Chart, numbers, series_data

_TRACES = Path(__file__).parents[1] / "viewer" / "static" / "traces.js"
_REPORT = Path(__file__).parent / "static" / "report.js"


@dataclass(frozen=True)
class Drawings:
    """Charts with all that a browser needs to draw them.

    Attributes:
        charts: Charts to draw.
        plotly: Source text of plotly.js.
    """

    charts: Sequence[Chart]
    plotly: str

    @cached_property
    def script(self) -> str:
        """The script that draws, less plotly.js."""
        text = _TRACES.read_text(encoding="utf-8") + "\n" + _REPORT.read_text(encoding="utf-8")
        # A page that is opened from a folder can import no modules: both files are one script.
        return "\n" + re.sub(r"^export ", "", text, flags=re.MULTILINE)

    @property
    def policy(self) -> str:
        """The Content-Security-Policy of a page that holds these: two scripts, and no network."""
        digests = (hashlib.sha256(text.encode()).digest() for text in (self.script, self.plotly))
        scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        # plotly.js saves a chart as a picture through a blob.
        return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {scripts}"

    @property
    def html(self) -> str:
        """The scripts and their data as markup."""
        data = json.dumps([chart_data(chart) for chart in self.charts], allow_nan=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(self.plotly.encode(), 6, mtime=0)).decode()
        # Within a script nothing is escaped; "<" alone could end it.
        return (
            f'<script type="application/json" id="charts">{data.replace("<", chr(92) + "u003c")}</script>\n'
            f'<script type="application/gzip" id="plotly">{packed}</script>\n<script>{self.script}</script>'
        )


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON data."""
    return {
        **{name: getattr(chart, name) for name in ("name", "kind", "x_label", "y_label", "band", "diagonal", "wide")},
        "x": numbers(chart.x),
        "iterations": None if chart.iterations is None else chart.iterations.tolist(),
        "texts": list(chart.texts),
        "panels": [
            {"title": panel.title, "series": [series_data(series) for series in panel.series]} for panel in chart.panels
        ],
    }


def plotly_file() -> Path:
    """Find plotly.js, without importing the package that brings it."""
    found = importlib.util.find_spec("plotly")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "package_data" / "plotly.min.js"
        if file.exists():
            return file
    raise ExtraMissing("view", "plotly with its plotly.min.js")
