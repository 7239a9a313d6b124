"""Results of the operations `ls` and `show`."""

from collections.abc import Mapping
from typing import Any, Literal

from metaloom.flows.formatting import number, plural
from metaloom.pipeline import shown
from metaloom.pipeline.shown import Shown

Row = Mapping[str, Any]
State = Literal["complete", "training", "stopped", "killed", "damaged", "unreadable"]


class Rows(Shown, list[Row]):
    """List of rows that describe runs; `nothing` is the message for an empty list."""

    nothing = ""

    def shown(self) -> tuple[str, list[shown.Row]]:
        if not self:
            return self.nothing, []
        columns = ("name", "env", "algorithm", "iterations_done", "iterations", "state")
        header = ("run", "environment", "algorithm", "complete", "of", "state", "return")
        returns = ("" if (last := row.get("last_return")) is None else number(last) for row in self)
        rows = [(*(str(row.get(name, "")) for name in columns), last) for row, last in zip(self, returns, strict=True)]
        return plural(len(self), "run"), [header, *rows]


class Facts(Shown, dict[str, Any]):
    """Facts about a run, keyed by name, as `--json` prints them."""

    def shown(self) -> tuple[str, list[shown.Row]]:
        rows: list[shown.Row] = []
        for name, value in self.items():
            text = plural(len(value), "value") if isinstance(value, Mapping | list) else str(value)
            rows.append((name, text if len(text) <= 60 else f"{text[:57]}..."))
        return plural(len(self), "fact"), rows
