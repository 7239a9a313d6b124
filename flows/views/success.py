"""Success of test episodes, by class of task, and as Meta-World's own evaluator counts it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from metaloom.pipeline.estimation.class_returns import BALANCED
from metaloom.pipeline.estimation.first_to_finish import COUNTED_EPISODES, UNTIL_SUCCESS, official_rates
from metaloom.pipeline.types import Array, Evaluation

if TYPE_CHECKING:
    from metaloom.pipeline.envs.task_classes import Classes

SUCCESS = "success"
OFFICIAL = "official_success_rate"


def official_success(evaluation: Evaluation, k: int) -> dict[str, float]:
    """Name -> the official success rate after k steps, which weighs all classes alike.

    Nothing where the environment does not tell how long episodes last until success, or too few are tested.
    """
    if not _is_officially_counted(evaluation):
        return {}
    of = _class_column(evaluation)
    return {OFFICIAL: float(np.mean(_official(evaluation, k, of, np.unique(of).tolist())))}


def success_rows(evaluation: Evaluation, classes: "Classes | None") -> list[dict[str, Any]]:
    """One row per number of adaptation steps and class, and one in which all classes count alike, as JSON data.

    `success_rate` is the share of all test episodes; nothing where there is no success or there are no classes.
    """
    if classes is None or SUCCESS not in evaluation.test_facts:
        return []
    of = classes.of(evaluation.task_params, evaluation.names)
    among = [int(c) for c in classes.among(of) if (of == c).any()]
    rows: list[dict[str, Any]] = []
    for k in range(evaluation.adaptation_steps + 1):
        success = evaluation.test_facts[SUCCESS][:, k]
        rates = {"success_rate": [float(success[of == c].mean()) for c in among]}
        if _is_officially_counted(evaluation):
            rates[OFFICIAL] = _official(evaluation, k, of, among)
        names, counts = [classes.names[c] for c in among], [int((of == c).sum()) for c in among]
        for i, (name, count) in enumerate(zip([*names, BALANCED], [*counts, len(of)], strict=True)):
            about = {"adaptation_steps": k, "class": name, "num_tasks": count}
            rows.append(about | {key: [*values, float(np.mean(values))][i] for key, values in rates.items()})
    return rows


def _official(evaluation: Evaluation, k: int, of: Array, among: Sequence[int]) -> list[float]:
    lengths, success = (evaluation.test_facts[name][:, k] for name in (UNTIL_SUCCESS, SUCCESS))
    return official_rates(lengths, success, of, among)


def _is_officially_counted(evaluation: Evaluation) -> bool:
    told = {SUCCESS, UNTIL_SUCCESS} <= evaluation.test_facts.keys()
    return told and evaluation.test_returns.shape[2] >= COUNTED_EPISODES


def _class_column(evaluation: Evaluation) -> Array:
    """[B], the class of every task; one for all where tasks have no such field."""
    if "class" not in evaluation.names:
        return np.zeros(len(evaluation.task_ids))
    return evaluation.task_params[:, evaluation.names.index("class")]
