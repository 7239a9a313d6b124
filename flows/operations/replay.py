"""`replay`: recomputes stored stages and compares the outputs with the stored ones."""

from collections.abc import Callable
from typing import Annotated

from metaloom.flows.arguments import checked
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import InProcess, Iteration, Natural, PythonOnly, RunAtArgument, Trust, agree
from metaloom.flows.results.replay import Replay, StageReplay
from metaloom.flows.rollouts.backend import IN_PROCESS
from metaloom.flows.runs import RunAt
from metaloom.flows.views.status import STATUS
from metaloom.storage import StageRef


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
