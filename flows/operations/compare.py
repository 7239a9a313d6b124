"""`compare`: compares groups of runs, with intervals over seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Positive, RunsArgument
from metaloom.flows.runs import RunLike

if TYPE_CHECKING:
    from metaloom.flows.results.comparison import Comparison


@checked
def compare(
    runs: RunsArgument,
    *,
    metric: str | None = None,
    group: Sequence[str] = (),
    last: Positive = 10,
    mixed: bool = False,
    seed: int = 0,
) -> "Comparison":
    """Compare groups of runs, with intervals over seeds.

    Runs in a group differ only in their seed. The result has an interquartile mean per group. For each pair of groups,
    it states whether one is significantly higher or there are too few seeds to tell. Runs are compared at the largest
    number of environment steps that all of them have reached.

    Example: `metaloom compare first second --metric return --plot comparison.png`

    Args:
        runs: A run, a pattern, a sweep, or several of these.
        metric: `evaluation`: the return on held-out tasks after the last adaptation step, the default if all runs have
            stored evaluations; `return`: the training return after adaptation; or the name of any metric.
        group: Group by this setting only, ignoring other differences: `--group algorithm.inner_lr`. Repeatable.
        last: Number of final iterations over which `return` and other metrics are averaged.
        mixed: Compare runs even if their environments or evaluations differ.
        seed: Seed of the bootstrap.

    Raises:
        UsageError: The runs cannot be compared.
        storage.StoreError: One of them cannot be read.
    """
    named = [runs] if isinstance(runs, RunLike) else [*runs]
    return late.compare_runs(late.runs_named(named), metric=metric, group=group, last=last, mixed=mixed, seed=seed)
