"""Result of comparing groups of runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from metaloom.flows.formatting import as_json, count, interval, number, plural
from metaloom.pipeline.comparison.groups import Band, Estimate, Pair, runs_needed
from metaloom.pipeline.comparison.intervals import CONFIDENCE
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.shown import Row, Shown
from metaloom.pipeline.types import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class History:
    """Scores of a run over training."""

    path: Path
    name: str
    seed: int
    environment: str
    iterations: Array  # iterations with a score, [n]
    steps: Array  # environment steps at the ends of these iterations, [n]
    values: Array  # mean scores, [n]

    def at(self, steps: Array) -> Array:
        """Return the latest score at each environment step count in `steps`, [m]."""
        return self.values[np.searchsorted(self.steps, steps, side="right") - 1]

    def before(self, steps: float) -> Array:
        """Return the iterations that were completed within this number of environment steps."""
        return self.iterations[self.steps <= steps]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and their scores."""

    name: str  # the settings below, as text
    settings: Mapping[str, str]  # settings that distinguish the group from others, keyed by name
    histories: tuple[History, ...]
    scores: Scores
    mean: Estimate  # mean of the scores
    iqm: Estimate  # interquartile mean of the scores
    profile: Band  # fraction of scores above each of the comparison's thresholds
    curve: Band  # interquartile mean over the runs' mean scores at the comparison's environment steps

    @property
    def seeds(self) -> list[int]:
        return [history.seed for history in self.histories]


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Comparison of groups of runs. Tables are Arrow tables, which `.to_pandas()` converts."""

    metric: str
    about: str  # description of the compared metric
    env_steps: int  # number of environment steps after which runs are compared: the maximum that all have reached
    groups: tuple[Group, ...]  # groups in order of decreasing interquartile mean
    pairs: tuple[Pair, ...]  # all pairs of groups
    thresholds: Array  # scores at which profiles were evaluated, [m]
    curve_steps: Array  # environment steps at which curves were evaluated, [n]
    notes: tuple[str, ...]  # remarks for the reader
    seed: int  # seed of the bootstrap
    resamples: int  # number of bootstrap resamples
    draw: "Callable[[Comparison], Figure]"  # function that draws the comparison

    def shown(self) -> tuple[str, list[Row]]:
        rows = [
            (g.name, str(len(g.scores)), number(g.iqm.value), interval(g.iqm.low, g.iqm.high, "")) for g in self.groups
        ]
        title = f"Comparison by {self.metric} after {count(self.env_steps)} environment steps"
        header = ("group", "runs", "interquartile mean", "95% interval")
        return "; ".join([title, *self.verdicts[:3]]), [header, *rows]

    def table(self) -> pa.Table:
        """Return one row per group: settings, runs, seeds, mean and interquartile mean with their 95% intervals."""
        return pa.Table.from_pylist(
            [
                {
                    "group": group.name,
                    **group.settings,
                    "runs": len(group.scores),
                    "seeds": group.seeds,
                    "scores": sum(len(run) for run in group.scores.runs),
                    **_named(iqm=group.iqm, mean=group.mean),
                    "lowest_run": float(group.scores.run_means.min()),
                    "highest_run": float(group.scores.run_means.max()),
                }
                for group in self.groups
            ]
        )

    def scores(self) -> pa.Table:
        """Return one row per compared score, with its group, run and seed."""
        return pa.Table.from_pylist(
            [
                {"group": group.name, "run": history.name, "seed": history.seed, "task": b, "score": float(score)}
                for group in self.groups
                for history, run in zip(group.histories, group.scores.runs, strict=True)
                for b, score in enumerate(run)
            ]
        )

    def differences(self) -> pa.Table:
        """Return one row per pair of groups: difference, probability of improvement, p-value and significance."""
        rows: list[dict[str, Any]] = []
        for pair in self.pairs:
            estimates = _named(difference=pair.difference, improvement=pair.improvement)
            test = {"p": pair.test.p, "adjusted_p": pair.adjusted_p, "exact": pair.test.exact}
            shown = {"smallest_p": pair.test.smallest, "shown": pair.shown, "attainable": pair.attainable}
            rows.append({"a": pair.a, "b": pair.b, **estimates, **test, **shown})
        return pa.Table.from_pylist(rows)

    def profiles(self) -> pa.Table:
        """Return one row per group and threshold: fraction of scores above the threshold, with a pointwise interval."""
        return self._bands("threshold", self.thresholds, [group.profile for group in self.groups], "fraction_above")

    def curves(self) -> pa.Table:
        """Return one row per group and number of environment steps: interquartile mean over runs, with its interval."""
        return self._bands("env_steps", self.curve_steps, [group.curve for group in self.groups], "iqm")

    @property
    def conditions(self) -> str:
        """Description of the metric, and the number of steps after which runs are compared."""
        return f"{self.about}; after {count(float(self.env_steps))} environment steps"

    @property
    def intervals(self) -> str:
        """Description of the intervals, shown below the table."""
        resamples = f"{plural(self.resamples, 'bootstrap resample')} of whole runs, seed {self.seed}"
        return f"intervals: 95% over seeds, {resamples}; Student's t"

    @cached_property
    def verdicts(self) -> tuple[str, ...]:
        """One sentence per pair that states which group is higher, or why that cannot be concluded."""
        return verdicts(self.pairs, {group.name: len(group.scores) for group in self.groups})

    def as_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "about": self.about,
            "env_steps": self.env_steps,
            "confidence": CONFIDENCE,
            "bootstrap": {"seed": self.seed, "resamples": self.resamples, "resampled": "runs", "interval": "student"},
            "groups": as_json(self.table().to_pylist()),
            "pairs": as_json(self.differences().to_pylist()),
            "verdicts": list(self.verdicts),
            "notes": list(self.notes),
            "scores": as_json(self.scores().to_pylist()),
            "profiles": as_json(self.profiles().to_pylist()),
            "curves": as_json(self.curves().to_pylist()),
        }

    def plot(self) -> "Figure":
        """Plot interquartile means, curves, profiles and probabilities of improvement with matplotlib."""
        return self.draw(self)

    def _bands(self, axis: str, places: Array, bands: Sequence[Band], name: str) -> pa.Table:
        return pa.concat_tables(
            pa.table({"group": [group.name] * len(places), axis: places, name: b.values, "low": b.low, "high": b.high})
            for group, b in zip(self.groups, bands, strict=True)
        )


def _named(**estimates: Estimate) -> dict[str, float]:
    """Return the value and the interval bounds of estimates, keyed by name, name_low and name_high."""
    parts = {"": "value", "_low": "low", "_high": "high"}.items()
    return {f"{name}{end}": getattr(each, part) for name, each in estimates.items() for end, part in parts}


def verdicts(pairs: Sequence[Pair], num_runs: Mapping[str, int]) -> tuple[str, ...]:
    """Return a sentence per pair of groups, or a single one if no conclusion is possible."""
    if not pairs:
        return ("only one group: nothing to compare",)
    if len(pairs) > 1 and not any(pair.attainable for pair in pairs):
        least = min(pair.smallest_p for pair in pairs)
        return (
            f"too few seeds to rank any two of {plural(len(num_runs), 'group')}: with {len(pairs)} pairs "
            f"the smallest possible p-value is {_p(least)}; {runs_needed(len(pairs))} runs per group could suffice",
        )
    return tuple(_verdict(pair, (num_runs[pair.a], num_runs[pair.b]), len(pairs)) for pair in pairs)


def _verdict(pair: Pair, runs: tuple[int, int], num_pairs: int) -> str:
    exact = "exact" if pair.test.exact else "drawn"
    p = _p(pair.adjusted_p)
    tested = f"p {p if p.startswith('<') else f'= {p}'}, {exact} permutation test"
    tested += f", Holm over {num_pairs} pairs" if num_pairs > 1 else ""
    if pair.shown:
        return f"{pair.a} is higher than {pair.b}: {_by(pair.difference)} ({tested})"
    if not pair.attainable:
        return (
            f"too few seeds to rank {pair.a} and {pair.b}: with {runs[0]} and {runs[1]} runs"
            f"{f' and {num_pairs} pairs' if num_pairs > 1 else ''} the smallest possible p-value is "
            f"{_p(pair.smallest_p)}; {runs_needed(num_pairs)} runs per group could suffice"
        )
    return f"{pair.a} and {pair.b} cannot be ranked: the difference is {_by(pair.difference)} ({tested})"


def _by(difference: Estimate) -> str:
    ends = interval(difference.low, difference.high, "")
    return number(difference.value) + (f", 95% interval {ends}" if ends else "")


def _p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"
