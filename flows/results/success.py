"""Success rates of test episodes per task class, and as computed by Meta-World's evaluator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from metaloom.pipeline.estimation.statistics import BALANCED, COUNTED_EPISODES, UNTIL_SUCCESS, official_rates
from metaloom.pipeline.types import Array, Evaluation

if TYPE_CHECKING:
    from metaloom.pipeline.envs.task_classes import Classes

SUCCESS = "success"
OFFICIAL = "official_success_rate"


def official_success(evaluation: Evaluation, k: int, classes: "Classes | None") -> dict[str, float]:
    """Return Meta-World's success rate after k steps, averaged over classes, keyed by OFFICIAL; {} if undefined."""
    of = np.zeros(len(evaluation.task_ids))  # one class if tasks have no such field
    if "class" in evaluation.names:
        of = evaluation.task_params[:, evaluation.names.index("class")]
    rates = _official(evaluation, k, of, np.unique(of).tolist(), classes)
    return {OFFICIAL: float(np.mean(rates))} if rates else {}


def success_rows(evaluation: Evaluation, classes: "Classes | None") -> list[dict[str, Any]]:
    """Return a JSON row per number of adaptation steps and class, and a class-balanced row per number.

    `success_rate` is the fraction of successful test episodes. Empty without success facts or classes.
    """
    if classes is None or SUCCESS not in evaluation.test_facts:
        return []
    of = classes.of(evaluation.task_params, evaluation.names)
    among = [int(c) for c in classes.among(of) if (of == c).any()]
    rows: list[dict[str, Any]] = []
    for k in range(evaluation.adaptation_steps + 1):
        success = evaluation.test_facts[SUCCESS][:, k]
        rates = {"success_rate": [float(success[of == c].mean()) for c in among]}
        if official := _official(evaluation, k, of, among, classes):
            rates[OFFICIAL] = official
        names, counts = [classes.names[c] for c in among], [int((of == c).sum()) for c in among]
        for i, (name, count) in enumerate(zip([*names, BALANCED], [*counts, len(of)], strict=True)):
            about = {"adaptation_steps": k, "class": name, "num_tasks": count}
            rows.append(about | {key: [*values, float(np.mean(values))][i] for key, values in rates.items()})
    return rows


def _official(
    evaluation: Evaluation, k: int, of: Array, among: Sequence[int], classes: "Classes | None"
) -> list[float]:
    """Return Meta-World's success rate per class.

    Empty if the environment does not report the length until success, if there are too few tasks or test episodes for
    the package's evaluator, or if there are several classes and none is held out: the package evaluates multi-task
    benchmarks differently, in one environment per class.
    """
    if not {SUCCESS, UNTIL_SUCCESS} <= evaluation.test_facts.keys():
        return []
    multi_task = not classes.held_out if classes else len(among) > 1
    if multi_task or evaluation.test_returns.shape[2] < COUNTED_EPISODES:
        return []
    lengths, success = (evaluation.test_facts[name][:, k] for name in (UNTIL_SUCCESS, SUCCESS))
    rates = official_rates(lengths, success, of, among)
    return [] if np.isnan(rates).any() else rates
