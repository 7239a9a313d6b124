"""What a comparison says of the order of groups, in sentences."""

from collections.abc import Mapping, Sequence

import numpy as np

from metaloom.flows.formatting import number, plural
from metaloom.pipeline.comparison.groups import Estimate, Pair
from metaloom.pipeline.comparison.order import runs_needed


def verdicts(pairs: Sequence[Pair], num_runs: Mapping[str, int]) -> tuple[str, ...]:
    """A sentence for every pair, or why nothing can be said.

    Args:
        pairs: of groups, tested together.
        num_runs: group -> its runs, for all groups.
    """
    if not pairs:
        return ("one group: nothing to order",)
    if len(pairs) > 1 and not any(pair.attainable for pair in pairs):
        least = min(pair.smallest_p for pair in pairs)
        return (
            f"too few seeds to order any two of {plural(len(num_runs), 'group')}: with {len(pairs)} pairs "
            f"the smallest p there can be is {_p(least)}; {runs_needed(len(pairs))} runs of each could tell",
        )
    return tuple(_verdict(pair, (num_runs[pair.a], num_runs[pair.b]), len(pairs)) for pair in pairs)


def _verdict(pair: Pair, runs: tuple[int, int], num_pairs: int) -> str:
    exact = "exact" if pair.test.exact else "drawn"
    tested = f"p = {_p(pair.adjusted_p)}, {exact} permutation test" + (
        f", Holm over {num_pairs} pairs" if num_pairs > 1 else ""
    )
    if pair.shown:
        return f"{pair.a} is higher than {pair.b}: {_by(pair.difference)} ({tested})"
    if not pair.attainable:
        return (
            f"too few seeds to order {pair.a} and {pair.b}: with {runs[0]} and {runs[1]} runs"
            f"{f' and {num_pairs} pairs' if num_pairs > 1 else ''} the smallest p there can be is "
            f"{_p(pair.smallest_p)}; {runs_needed(num_pairs)} runs of each could tell"
        )
    return f"no order of {pair.a} and {pair.b} is shown: the difference is {_by(pair.difference)} ({tested})"


def _by(difference: Estimate) -> str:
    if np.isnan(difference.low):
        return number(difference.value)
    return f"{number(difference.value)}, 95 % interval {number(difference.low)} to {number(difference.high)}"


def _p(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"
