"""Operations that recompute stored stages, and check this machine or an environment."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    InProcess,
    Iteration,
    Natural,
    Overrides,
    PythonOnly,
    RunAtArgument,
    Trust,
    agree,
    changes,
)
from metaloom.flows.results.replay import Replay, StageReplay
from metaloom.flows.rollouts.backend import IN_PROCESS
from metaloom.flows.runs import RunAt, require_one_iteration, runs_root
from metaloom.flows.views.status import STATUS
from metaloom.storage import StageRef

if TYPE_CHECKING:
    from metaloom.flows.results.checks import Checks
    from metaloom.flows.results.counterfactual import Counterfactual


@checked
def replay(
    run: RunAtArgument,
    iteration: Iteration = None,
    *,
    stage: str | None = None,
    step: Natural | None = None,
    until_diff: bool = False,
    trust: Trust = False,
    backend: InProcess = IN_PROCESS,
    replayed: Annotated[Callable[[StageReplay], None] | None, PythonOnly] = None,
) -> Replay:
    """Recompute stored stages, and compare every bit of their outputs.

    Each stage is computed from its stored inputs. Exit code 0 if all outputs are identical, 1 if any differs.

    Example: `metaloom replay first@3 --stage adapt`

    Args:
        run: Run that contains the stages.
        iteration: Iteration, counted from the end if negative; all complete iterations if None.
        stage: Replay only this stage, such as adapt; `metaloom graph RUN` lists the stages of a run.
        step: Replay only this inner step of the stage.
        until_diff: Stop after the first stage that differs.
        trust: Allow importing the modules that the run's settings name, now and later.
        backend: Rollout backend.
        replayed: Called with the result of each stage.
    """
    at = RunAt.of(run, iteration)
    agree(at.path, trust)
    outcomes = Replay()
    for outcome in late.replay_run(
        at.path, at.iteration, stage=stage, step=step, until_diff=until_diff, backend=backend
    ):
        outcomes.append(outcome)
        if replayed is not None:
            replayed(outcome)
    return outcomes


@checked
def materialise(
    run: RunAtArgument, iteration: Iteration = None, *, trust: Trust = False, backend: InProcess = IN_PROCESS
) -> list[StageRef]:
    """Recompute thinned outputs, and store them if their digests are unchanged.

    Args:
        run: Run that contains the stages.
        iteration: Iteration, counted from the end if negative; all complete iterations if None.
        trust: Allow importing the modules that the run's settings name, now and later.
        backend: Rollout backend.

    Returns:
        The stages whose outputs were stored again.

    Raises:
        storage.DigestMismatch: A recomputed output has a different digest; nothing of its iteration was stored.
        storage.RunLocked: Another process is writing the run.
    """
    at = RunAt.of(run, iteration)
    agree(at.path, trust)
    refs: list[StageRef] = []
    for ref in late.materialise_run(at.path, at.iteration, backend=backend):
        refs.append(ref)
        STATUS.far(f"{plural(len(refs), 'output')} stored again")
    return refs


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
    """Recompute a stage under different settings.

    It runs on the stored batches, without sampling, and compares the two outputs.

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


@checked
def doctor(*, env: str | None = None, overrides: Overrides = ()) -> "Checks":
    """Check this machine or an environment.

    The machine check covers packages, cores, disk, physics and Prefect. Exit code 1 if a check fails; the output
    suggests remedies.

    Example: `metaloom doctor --env my_envs:Thermostat --set env.options.target=20`

    Args:
        env: Check this environment instead: its return values must be valid and identical in two runs.
        overrides: Environment settings to change, as KEY=VALUE.
    """
    if env is None and overrides:
        raise UsageError("--set requires --env; add --env, or remove --set")
    if env is None:
        return late.Checks(late.check_all(runs_root()))
    # Imported here, since the other table must show a broken package as a row.
    return late.Checks(late.check_environment(late.env_config(env, changes(overrides))))
