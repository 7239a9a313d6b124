"""Results of the operations `ls` and `show`."""

from collections.abc import Mapping
from typing import Any

from metaloom.flows.formatting import number, plural
from metaloom.pipeline import shown
from metaloom.pipeline.shown import Shown

Row = Mapping[str, Any]


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
        return plural(len(self), "fact"), [(name, _short(value)) for name, value in self.items()]


def _short(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return plural(len(value), "value")
    return text if len(text := str(value)) <= 60 else f"{text[:57]}..."
