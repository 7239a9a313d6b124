"""Groups of stored runs compared: runs that differ only in their seed are one group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from metaloom.flows.commands.run_scores import described, read_histories, scored
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import count
from metaloom.flows.results.comparison import Comparison, Group, History
from metaloom.flows.run_groups import check_comparable, difference_notes, fork_notes, grouped, kin_notes
from metaloom.flows.runs import check_seed, require_settings
from metaloom.pipeline.comparison.groups import Resampled
from metaloom.pipeline.comparison.intervals import RESAMPLES
from metaloom.pipeline.types import Array
from metaloom.storage import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_POINTS, PROFILE_POINTS = 60, 101
LAST = 10


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
    """Compare groups of runs, each of runs that differ only in their seed."""
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
        notes = (*notes, f"compared after {count(float(common))} environment steps, the most that all runs have")
    members = grouped(runs, group, mixed=mixed)
    notes = (*notes, *kin_notes(members))
    notes = notes if group else (*notes, *difference_notes(members.values()))
    steps = _curve_steps([*histories.values()], common)  # refuses runs without a score by then, so before `scored`
    scores = scored(chosen, members, common, last)
    resampled = Resampled(scores, seed, resamples)
    values = np.concatenate([run for group in scores.values() for run in group.runs])
    thresholds = np.linspace(values.min(), values.max(), PROFILE_POINTS)
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
        draw=_draw,
    )


def _draw(found: Comparison) -> "Figure":
    from metaloom.flows.views.run_comparison import comparison_figure

    return comparison_figure(found)


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
