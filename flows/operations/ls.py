"""`ls`: lists the runs in the runs folder."""

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import seconds_of
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Positive
from metaloom.flows.results.run_rows import Row, Rows, State
from metaloom.flows.runs import runs_root
from metaloom.storage import find_runs, location

Order = Literal["started", "return", "size", "name"]

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# A run that cannot be read has neither start nor return: it comes last.
_ORDERS: Mapping[Order, Callable[[Row], Any]] = {
    "started": lambda row: -seconds_of(row.get("started")),
    "return": lambda row: -value if (value := row.get("last_return")) is not None else math.inf,
    "size": lambda row: -row["bytes"],
    "name": lambda row: row["name"],
}


@checked
def ls(
    *,
    algorithm: str | None = None,
    env: str | None = None,
    status: State | None = None,
    since: str | None = None,
    sort: Order = "started",
    reverse: bool = False,
    limit: Positive | None = None,
) -> Rows:
    """List the runs in the runs folder.

    The newest run comes first. Columns: age, environment, algorithm; complete and planned iterations; average return of
    the last iteration, after adaptation if there is any; bytes on disk, including shared files; state. A narrow
    terminal shows fewer columns.

    Example: `METALOOM_RUNS=/data/runs metaloom ls --algorithm promp --since 2d --sort return`

    Args:
        algorithm: List only runs with this algorithm.
        env: List only runs in this environment.
        status: List only runs in this state. A run that is neither complete nor being written was stopped, by an error
            or on request, or its writer was killed.
        since: List only runs that started in the last 30m, 12h, 2d or 1w, or since a date such as 2026-11-22 or
            2026-11-22T08:30 in local time.
        sort: Order: newest first, highest return first, largest first, or by name.
        reverse: Reverse this order.
        limit: Maximum number of runs.
    """
    earliest = -math.inf if since is None else _moment(since).timestamp()
    found = [*map(late.list_run_row, find_runs(runs_root()))]
    wanted = {"algorithm": algorithm, "env": env, "state": status}
    matching = (
        row
        for row in found
        if all(value is None or row.get(name) == value for name, value in wanted.items())
        and seconds_of(row.get("started")) >= earliest
    )
    rows = Rows(sorted(matching, key=_ORDERS[sort])[:: -1 if reverse else 1][:limit])
    if found:
        rows.nothing = f"none of {len(found)} runs in {location(runs_root())} matches"
    else:
        rows.nothing = f"no runs in {location(runs_root())}; `metaloom train promp-point-corner` makes one"
    return rows


def _moment(text: str) -> datetime:
    """Return the time in UTC that --since specifies; raise UsageError if it cannot be parsed."""
    if match := re.fullmatch(r"(\d{1,4})([mhdw])", text):
        return datetime.now(UTC) - timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise UsageError(
            f"--since {text}: expected a span such as 30m, 12h, 2d or 1w, or a date such as 2026-11-22"
        ) from None
