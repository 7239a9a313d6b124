"""Groups of stored runs compared: runs that differ only in their seed are one group."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from metaloom.flows.commands.run_scores import History, described, read_histories, scored
from metaloom.flows.errors import UsageError
from metaloom.flows.run_groups import check_comparable, difference_notes, fork_notes, grouped, kin_notes
from metaloom.flows.runs import check_seed, require_settings
from metaloom.flows.views.formatting import count, finite
from metaloom.flows.views.verdicts import verdicts
from metaloom.pipeline.comparison.groups import Band, Estimate, Pair, Resampled
from metaloom.pipeline.comparison.intervals import CONFIDENCE, RESAMPLES
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array
from metaloom.storage import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_POINTS, PROFILE_POINTS = 60, 101
LAST = 10


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and their scores.

    Attributes:
        name: the settings that tell it from the other groups.
        settings: these, setting -> value as text.
        histories: of its runs.
        scores: of its runs; the interval of each measure is over runs.
        mean, iqm: mean and interquartile mean of the scores.
        profile: fraction of scores above the comparison's thresholds.
        curve: interquartile mean over runs of their mean score, at the comparison's environment steps.
    """

    name: str
    settings: Mapping[str, str]
    histories: tuple[History, ...]
    scores: Scores
    mean: Estimate
    iqm: Estimate
    profile: Band
    curve: Band

    @property
    def seeds(self) -> list[int]:
        """Seeds of its runs."""
        return [history.seed for history in self.histories]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs compared, best first. Tables are Arrow's; `.to_pandas()` makes data frames of them.

    Attributes:
        metric: what was compared.
        about: the same in words.
        env_steps: of training, after which runs are compared: the most that all of them have.
        groups: the groups, that with the highest interquartile mean first.
        pairs: every two of them.
        thresholds: [m], scores at which profiles were taken.
        curve_steps: [n], environment steps at which curves were taken.
        notes: what a reader ought to know.
        seed, resamples: of the bootstrap.
    """

    metric: str
    about: str
    env_steps: int
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    thresholds: Array
    curve_steps: Array
    notes: tuple[str, ...]
    seed: int
    resamples: int

    def table(self) -> pa.Table:
        """One row per group: its settings, runs, seeds, mean and interquartile mean with their 95 % intervals."""
        return pa.Table.from_pylist([_group_row(group) for group in self.groups])

    def scores(self) -> pa.Table:
        """One row per run and score that was compared, with the group, run and seed it is from."""
        return pa.Table.from_pylist(
            [
                {"group": group.name, "run": history.name, "seed": history.seed, "task": b, "score": float(score)}
                for group in self.groups
                for history, run in zip(group.histories, group.scores.runs, strict=True)
                for b, score in enumerate(run)
            ]
        )

    def differences(self) -> pa.Table:
        """One row per pair of groups: difference, probability of improvement, p, and whether an order is shown."""
        return pa.Table.from_pylist([_pair_row(pair) for pair in self.pairs])

    def profiles(self) -> pa.Table:
        """One row per group and threshold: the fraction of scores above it, with a pointwise interval."""
        return self._bands("threshold", self.thresholds, [group.profile for group in self.groups], "fraction_above")

    def curves(self) -> pa.Table:
        """One row per group and number of environment steps: interquartile mean over runs, with an interval."""
        return self._bands("env_steps", self.curve_steps, [group.curve for group in self.groups], "iqm")

    @cached_property
    def verdicts(self) -> tuple[str, ...]:
        """What can be said of the order of every pair, a sentence each; or why nothing can."""
        return verdicts(self.pairs, {group.name: len(group.scores) for group in self.groups})

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "metric": self.metric,
            "about": self.about,
            "env_steps": self.env_steps,
            "confidence": CONFIDENCE,
            "bootstrap": {"seed": self.seed, "resamples": self.resamples, "resampled": "runs", "interval": "student"},
            "groups": _json(self.table()),
            "pairs": _json(self.differences()),
            "verdicts": list(self.verdicts),
            "notes": list(self.notes),
            "scores": _json(self.scores()),
            "profiles": _json(self.profiles()),
            "curves": _json(self.curves()),
        }

    def plot(self) -> "Figure":
        """Draw interquartile means, curves, profiles and probabilities of improvement as a matplotlib figure."""
        from metaloom.flows.views.run_comparison import comparison_figure

        return comparison_figure(self)

    def _repr_html_(self) -> str:
        return self.table().to_pandas().to_html()

    def _bands(self, axis: str, places: Array, bands: Sequence[Band], name: str) -> pa.Table:
        parts = [
            pa.table({"group": [group.name] * len(places), axis: places, name: b.values, "low": b.low, "high": b.high})
            for group, b in zip(self.groups, bands, strict=True)
        ]
        return pa.concat_tables(parts)


def compare(
    runs: Sequence[Run],
    *,
    metric: str | None = None,
    group: Sequence[str] = (),
    last: int = LAST,
    mixed: bool = False,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare groups of runs, each of runs that differ only in their seed.

    Args:
        runs: which.
        metric: evaluation: the return on the tasks of the stored evaluations, after the last adaptation step; return:
            that of training, after adaptation; or the name of a metric. By default evaluation where all runs have
            stored ones, else return.
        group: settings by which runs are grouped instead, whatever else they differ in.
        last: iterations of training that `return` and metrics are averaged over, up to where runs are compared.
        mixed: compare runs of different environments or evaluations all the same, resampled environment by
            environment.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        UsageError: the runs cannot be compared.
        storage.StoreError: one of them cannot be read.
    """
    check_seed(seed)
    if last < 1 or resamples < 100:
        raise UsageError(f"found last={last} and resamples={resamples}; required last >= 1 and resamples >= 100")
    for run in runs:
        require_settings(run)
    check_comparable(runs, mixed=mixed)
    chosen, notes = read_histories(runs, metric, mixed=mixed)
    notes = (*notes, *fork_notes(runs))
    histories = {history.path: history for history in chosen.histories}
    common = min(history.steps[-1] for history in histories.values())
    if max(history.steps[-1] for history in histories.values()) > common:
        notes = (
            *notes,
            f"compared after {count(float(common))} environment steps, the most that all runs have",
        )
    members = grouped(runs, group, mixed=mixed)
    notes = (*notes, *kin_notes(members))
    notes = notes if group else (*notes, *difference_notes(members.values()))
    steps = _curve_steps([*histories.values()], common)  # refuses runs without a score by then, so before `scored`
    scores = scored(chosen, members, common, last)
    resampled = Resampled(scores, seed, resamples)
    thresholds = _thresholds(scores)
    groups = [
        Group(
            name,
            found.settings,
            tuple(histories[run.path] for run in found.runs),
            scores[name],
            resampled.mean(name),
            resampled.interquartile_mean(name),
            resampled.profile(name, thresholds),
            resampled.curve(name, np.array([histories[run.path].at(steps) for run in found.runs])),
        )
        for name, found in members.items()
    ]
    return Comparison(
        metric=chosen.metric,
        about=described(chosen, last),
        env_steps=int(common),
        groups=tuple(sorted(groups, key=lambda group: -group.iqm.value)),
        pairs=tuple(resampled.pairs()),
        thresholds=thresholds,
        curve_steps=steps,
        notes=notes,
        seed=seed,
        resamples=resamples,
    )


def _thresholds(scores: Mapping[str, Scores]) -> Array:
    """Scores from the lowest to the highest of all, evenly."""
    values = np.concatenate([run for group in scores.values() for run in group.runs])
    return np.linspace(values.min(), values.max(), PROFILE_POINTS)


def _curve_steps(histories: Sequence[History], common: float) -> Array:
    """Environment steps from where all runs have a score to where all still have one."""
    first = max(history.steps[0] for history in histories)
    points = np.unique(np.concatenate([history.steps for history in histories]))
    points = points[(points >= first) & (points <= common)]
    if not len(points):
        raise UsageError(
            f"found runs of which one ends after {count(float(common))} environment steps and another begins to have "
            f"scores at {count(float(first))}; required steps that all have. `metaloom resume` continues a run"
        )
    return points[np.unique(np.linspace(0, len(points) - 1, CURVE_POINTS).round().astype(int))]


def _group_row(group: Group) -> dict[str, Any]:
    return {
        "group": group.name,
        **group.settings,
        "runs": len(group.scores),
        "seeds": group.seeds,
        "scores": sum(len(run) for run in group.scores.runs),
        "iqm": group.iqm.value,
        "iqm_low": group.iqm.low,
        "iqm_high": group.iqm.high,
        "mean": group.mean.value,
        "mean_low": group.mean.low,
        "mean_high": group.mean.high,
        "lowest_run": float(group.scores.run_means.min()),
        "highest_run": float(group.scores.run_means.max()),
    }


def _pair_row(pair: Pair) -> dict[str, Any]:
    estimates = {
        f"{name}{end}": value
        for name, estimate in (("difference", pair.difference), ("improvement", pair.improvement))
        for end, value in zip(("", "_low", "_high"), asdict(estimate).values(), strict=True)
    }
    tested = {
        "p": pair.test.p,
        "adjusted_p": pair.adjusted_p,
        "exact": pair.test.exact,
        "smallest_p": pair.test.smallest,
    }
    return {"a": pair.a, "b": pair.b, **estimates, **tested, "shown": pair.shown, "attainable": pair.attainable}


def _json(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table, with null where a number is not finite."""
    return [
        {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}
        for row in table.to_pylist()
    ]
