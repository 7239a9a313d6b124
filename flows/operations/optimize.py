"""`optimize`: recomputes a stored stage with different settings."""

from typing import TYPE_CHECKING, Any

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Iteration, Natural, Overrides, RunAtArgument, Trust, agree, changes
from metaloom.flows.runs import require_one_iteration

if TYPE_CHECKING:
    from metaloom.flows.results.counterfactual import Counterfactual


@checked
def optimize(
    run: RunAtArgument,
    iteration: Iteration = None,
    *,
    overrides: Overrides = (),
    stage: str | None = None,
    step: Natural = 0,
    trust: Trust = False,
    **settings: Any,
) -> "Counterfactual":
    """Recompute a stage with different settings.

    The stage reads the stored batches, and nothing is sampled. The output is compared with the stored one.

    Example: `metaloom optimize first@3 --set algorithm.clip_eps=0.1`

    Args:
        run: Run that contains the stage.
        iteration: Iteration, unless given as RUN@ITERATION.
        overrides: Settings to change, as KEY=VALUE.
        stage: Stage to recompute: any that does not sample, such as adapt; by default the one that ends the iteration.
        step: Inner step of that stage.
        trust: Allow importing the modules that the run's settings name, now and later.
        **settings: Settings to change; see `train`.
    """
    path, chosen = require_one_iteration(run, iteration)
    agree(path, trust)
    return late.optimize_run(path, chosen, changes(overrides, settings), stage=stage, step=step)
