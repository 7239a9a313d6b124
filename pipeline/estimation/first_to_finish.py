"""Success as Meta-World's own evaluator counts it: of the episodes that finish first.

`metaworld.evaluation.evaluation` (version 3.1.1) runs a few environments of a class side by side, begins each anew when
its episode is over, lets success end an episode, and stops when three episodes of the class are over. An episode
without success lasts to the step limit, so those that succeed are over first and count, however rare they are. It is
offered to compare with published tables; what a policy is worth is the share of all test episodes.
"""

from collections.abc import Sequence

import numpy as np

from metaloom.pipeline.types import Array

COUNTED_EPISODES = 3
"""Of a class, in one round."""

ENVIRONMENTS = 20
"""Side by side in all, the package's default: each class has its share of them."""

UNTIL_SUCCESS = "steps_until_success"
"""The fact of an episode that tells how long it would have been, had success ended it."""


def first_to_finish(lengths: Array, success: Array) -> float:
    """The share of successes among the COUNTED_EPISODES episodes of a class that are over first.

    Episodes of an environment follow each other without a break; of those that are over in the same step, the
    environments' order decides.

    Args:
        lengths: [n, M] of n environments' episodes, in steps, if success ends them.
        success: [n, M] bool.

    Raises:
        ValueError: M is less than COUNTED_EPISODES, so that it may depend on episodes that there are not.
    """
    if lengths.shape[1] < COUNTED_EPISODES:
        raise ValueError(f"found {lengths.shape[1]} episodes of an environment; required {COUNTED_EPISODES} or more")
    over = np.cumsum(lengths, axis=1)
    # By the time, and then by the environment: of one environment no two are over at once.
    order = np.lexsort((np.repeat(np.arange(len(over)), over.shape[1]), over.ravel()))
    return float(success.ravel()[order[:COUNTED_EPISODES]].mean())


def official_rates(lengths: Array, success: Array, of: Array, among: Sequence[int]) -> list[float]:
    """The official success rate of each class: the mean over rounds of `first_to_finish`.

    The tasks of a class, in their order, take part in rounds of ENVIRONMENTS // classes tasks, as in the package; those
    that are left over for no whole round take part in none. With fewer side by side the rate would be another.

    Args:
        lengths: [B, M], of test episodes, in steps, if success ends them.
        success: [B, M] bool.
        of: [B], the class of every task.
        among: numbers of the classes.

    Returns:
        One for each of `among`; NaN for a class without a whole round.
    """
    size = max(1, ENVIRONMENTS // len(among))
    rates: list[float] = []
    for c in among:
        rows = np.flatnonzero(of == c)
        rounds = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        found = [first_to_finish(lengths[tasks], success[tasks]) for tasks in rounds]
        rates.append(float(np.mean(found)) if found else np.nan)
    return rates
