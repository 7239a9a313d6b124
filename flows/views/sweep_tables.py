"""Output of `metaloom sweep`. This module prints nothing."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from metaloom import storage
from metaloom.flows.formatting import number, plural
from metaloom.flows.results.sweep import Trial, best_of
from metaloom.flows.sweeps.stored import Sweep
from metaloom.flows.views.parts import as_text, new_table, optional
from metaloom.flows.views.run_info import list_run_row
from metaloom.flows.views.tables import STATE_STYLES

Row = Mapping[str, Any]


def sweep_rows(sweep: Sweep, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return one row per run: settings, progress, last return, and state (`waiting` before the run begins).

    In a search, rows also contain the trial's number and score.
    """
    rows: list[dict[str, Any]] = []
    by_run = {run.name: trial for trial in trials for run in trial.runs}
    for run in sweep.runs:
        row: dict[str, Any] = {"run": run.name, "seed": run.seed, "settings": dict(run.settings)}
        if (trial := by_run.get(run.name)) is not None:
            row |= {"trial": trial.number, "score": trial.score}
        folder = sweep.folder(run)
        if not storage.run_exists(folder):
            rows.append(row | {"state": "waiting", "iterations_done": 0, "iterations": None, "last_return": None})
            continue
        about = list_run_row(folder)
        known = ("state", "iterations_done", "iterations", "last_return", "problem", "writer")
        rows.append(row | {name: about.get(name) for name in known})
    return rows


def sweep_table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """Return a table of a sweep's runs, captioned with the number of runs in each state."""
    scored = [] if sweep.search is None else [f">score: {sweep.search.metric}"]
    columns = ("run", *sweep.keys, ">seed", ">iterations", ">last return", *scored, "state")
    table = new_table(*columns, drop=("seed", "iterations", *sweep.keys), prose=("state",))
    for row in rows:
        done = f"{row['iterations_done']} / {row['iterations']}" if row["iterations"] else ""
        detail = row.get("problem") or row.get("writer")
        table.add_row(
            row["run"],
            *(_short(row["settings"].get(key, "")) for key in sweep.keys),
            *(row["seed"], done, optional(row["last_return"])),
            *(optional(row["score"]) for _ in scored),
            as_text(row["state"] + (f" ({detail})" if detail else ""), STATE_STYLES[row["state"]]),
        )
    table.title = as_text(f"sweep {sweep.name}: {sweep.recipe} {' '.join(sweep.settings)}".rstrip())
    table.caption = as_text(counted(rows, sweep.num_runs - len(rows)))
    return table


def counted(rows: Sequence[Row], unknown: int) -> str:
    """Format the number of runs by state, as in "10 runs: 7 complete, 3 waiting". Future trials count as waiting."""
    states = Counter(row["state"] for row in rows) + Counter(waiting=unknown)
    return f"{plural(len(rows) + unknown, 'run')}: {', '.join(f'{n} {state}' for state, n in states.most_common())}"


def search_info(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the search and its best trial as plain data; empty for a sweep that is not a search."""
    if sweep.search is None:
        return {}
    best = best_of(trials)
    about = None if best is None else {"trial": best.number, "score": best.score, "settings": _settings(best)}
    return {"search": asdict(sweep.search), "best": about}


def best_lines(sweep: Sweep, trials: Sequence[Trial]) -> list[str]:
    """Return lines of text that show a search's best trial and the command to test it; empty for a grid."""
    if sweep.search is None:
        return []
    best = best_of(trials)
    if best is None or best.score is None:
        return [f"no trial has a score yet; a score is {sweep.search.metric} averaged over the last tenth of each run"]
    words = [word for key, text in _settings(best).items() for word in ("--set", f"{key}={text}")]
    done = sum(trial.score is not None for trial in trials)
    best_line = f"best: trial {best.number} of {done} with a score, {sweep.search.metric} {number(best.score)}"
    # Its score is biased upwards by the selection.
    fresh = ",".join(str(seed) for seed in range(max(sweep.seeds) + 1, max(sweep.seeds) + 6))
    given = [word for assignment in sweep.settings for word in ("--set", assignment)]
    command = ["metaloom", "sweep", sweep.recipe, "--name", f"{sweep.name[:55]}-best", "--seeds", fresh]
    return [f"{best_line}: {shlex.join(words)}", f"test it with other seeds: {shlex.join([*command, *given, *words])}"]


def _settings(trial: Trial) -> dict[str, str]:
    return dict(trial.runs[0].settings)


def _short(text: str) -> str:
    """Return a number's text rounded to four digits if it is long; `--json` shows all digits."""
    return number(float(text)) if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) and len(text) > 8 else text
