"""The parameters of the baselines of a stored run. They are not stored: the stored episodes give them again."""

from metaloom.flows.errors import UsageError
from metaloom.flows.graph.run_stages import config_of
from metaloom.pipeline.estimation.processing import baseline_parameters
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import EpisodeBatch, Params
from metaloom.storage import Run, StageRef


def fitted_baselines(run: Run, iteration: int, step: int = 0) -> dict[str, Params]:
    """Return what `process_samples` fitted to the episodes of an inner step: parameters [B, ...] by baseline and name.

    Raises:
        UsageError: the run's algorithm has no baseline.
        storage.StoreError: the episodes are not stored, or no longer.
    """
    config = config_of(run, StageRef(iteration, "collect_rollouts", step))
    episodes = run.load(StageRef(iteration, "collect_rollouts", step))
    assert isinstance(episodes, EpisodeBatch)
    seed = seed_for(config.seed, "baseline", iteration, step)
    fitted = baseline_parameters(episodes, config.baseline.build(), config.processing, seed=seed)
    if not any(fitted.values()):
        raise UsageError(f"{run.path.name}: its baseline is {config.baseline.name}, which has no parameters")
    return fitted
