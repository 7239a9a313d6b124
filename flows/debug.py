"""One stage of a run again, in a debugger where it fails."""

import builtins
import pdb
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import storage
from flows.faults import compute_checked
from flows.replay import require_known
from flows.run_stages import config_at, stages_of
from flows.words import stage_name
from flows.workers import Backend
from storage import StageRef

INPUTS = "stage_inputs"
"""What the debugger calls the stored inputs of the stage, in every frame."""


@dataclass(frozen=True)
class Debugged:
    """What came of a stage: the error it ended with, None if it ended well."""

    ref: StageRef
    fault: Exception | None
    identical: bool | None
    """Whether it gave the stored bits; None where nothing is stored or it failed."""

    def __str__(self) -> str:
        what = f"iteration {self.ref.iteration}, {stage_name(self.ref)}"
        if self.fault is not None:
            return f"{what} failed: {self.fault}"
        stored = {None: "nothing is stored to compare with", True: "identical to what is stored"}
        return f"{what} did not fail; {stored.get(self.identical, 'different from what is stored')}"


def debug_stage(
    path: Path,
    iteration: int,
    stage: str,
    step: int = 0,
    *,
    backend: Backend = Backend(workers=0),
    debugger: pdb.Pdb | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Debugged:
    """Run a stage from its stored inputs, whether or not its output is stored, and enter the debugger if it fails.

    The debugger starts in the innermost frame; `up` leads to the stage and its arguments, and `stage_inputs` holds the
    stored inputs by name, such as collect_rollouts.0. The run is not changed.

    Args:
        path: the run's folder.
        iteration: the stage's iteration.
        stage: its name.
        step: its inner step.
        backend: where rollouts run; only faults of this process can be debugged.
        debugger: the one to enter; one on the terminal when None.
        say: is told what failed, before the debugger starts.

    Raises:
        UsageError: the run has no such stage.
        storage.StageMissing: an input of the stage is not stored.
    """
    run = storage.open_run(path)
    with stages_of(config_at(run, iteration), backend) as stages:
        require_known(stages.order(iteration), stage, step)
        ref = StageRef(iteration, stage, step)
        inputs = {f"{i.stage}.{i.step}": run.load(i) for i in stages.inputs(ref)}
        try:
            value = compute_checked(stages, ref, run.load)
        except Exception as fault:
            held = ", ".join(inputs) or "nothing"
            say(f"{type(fault).__name__}: {fault}\n`{INPUTS}` holds {held}; `up` leads out to the stage")
            with _everywhere(INPUTS, inputs):
                _enter(debugger or pdb.Pdb(), fault)
            return Debugged(ref, fault, None)
    if not run.contains(ref):
        return Debugged(ref, None, None)
    return Debugged(ref, None, storage.output_digest(storage.digest(value)) == run.record(ref).digest)


def _enter(debugger: pdb.Pdb, fault: Exception) -> None:
    debugger.reset()
    debugger.interaction(None, fault.__traceback__)


@contextmanager
def _everywhere(name: str, value: Mapping[str, Any]) -> Iterator[None]:
    # Among the builtins a name is found from every frame that the user goes to.
    setattr(builtins, name, value)
    try:
        yield
    finally:
        delattr(builtins, name)
