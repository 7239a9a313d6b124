"""Two programs beside each other: a file for every program and seed, and what all seeds say together."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.flows.views import charts
from metaloom.flows.views.series import AFTER, BEFORE, Chart, Series, alone
from metaloom.pipeline.comparison.groups import permutation_test
from metaloom.pipeline.comparison.intervals import student_interval
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array

Row = dict[str, Any]
Curve = tuple[Array, Array]
"""Environment steps and the return that was found there, of one seed."""

_POINTS = 100


def complete_row(path: Path, about: Row) -> Row | None:
    """What a file holds of a run that has ended; None where it has not.

    Raises:
        SystemExit: the file is of other settings.
    """
    if not path.exists() or not (row := json.loads(path.read_text()))["complete"]:
        return None
    if (found := {name: row[name] for name in about}) != about:
        raise SystemExit(f"{path} holds {found}; expected {about}. Choose another folder with --out")
    return row


def last_return(row: Row) -> float:
    """Mean return of the episodes of training that end in the last tenth of the steps."""
    ends = np.cumsum(row["lengths"])
    return float(np.array(row["returns"])[ends > 0.9 * row["steps"]].mean())


def compared_returns(returns: Mapping[str, Sequence[float]]) -> list[str]:
    """Markdown: of both programs the mean over seeds with its interval, and the seeds; then the p of their order.

    One seed has no interval, and one program or one seed no order.
    """
    lines = ["| program | mean return | of each seed |", "| --- | --- | --- |"]
    for program, values in returns.items():
        each = ", ".join(f"{value:.0f}" for value in values)
        lines.append(f"| {program} | {np.mean(values):.0f}{_interval(values)} | {each} |")
    if len(returns) == 2 and min(map(len, returns.values())) > 1:
        one, other = (Scores.of([[value] for value in values]) for values in returns.values())
        test = permutation_test(one, other, np.random.default_rng(0))
        lines.append(f"\np = {test.p:.3f} by a permutation test, of which the smallest is {test.smallest:.3f}")
    return lines


def draw(path: Path, title: str, y_label: str, curves: Mapping[str, Sequence[Curve]]) -> None:
    """Write a PNG with a line per program: the mean over seeds; its band: smallest to largest.

    Seeds are looked at at other steps each: between two that are there, a straight line stands in.
    """
    every = [x for found in curves.values() for x, _ in found]
    steps = np.linspace(max(x[0] for x in every), min(x[-1] for x in every), _POINTS)
    series: list[Series] = []
    for color, (program, found) in zip((AFTER, BEFORE), curves.items(), strict=False):
        values = np.stack([np.interp(steps, x, y) for x, y in found])
        series.append(Series(program, color, values.mean(axis=0), (values.min(axis=0), values.max(axis=0))))
    seeds = max(map(len, curves.values()))
    note = f"line: mean of {seeds} seeds; band: smallest to largest" if seeds > 1 else "one seed"
    about = ("side_by_side", "", "lines", title, "environment steps", y_label, note, "", steps, alone(series))
    path.write_bytes(charts.rendered(charts.draw(Chart(*about, wide=True)), "png"))


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    low, high = student_interval(float(np.mean(values)), error, len(values) - 1)
    return f" ({low:.0f} to {high:.0f})"
