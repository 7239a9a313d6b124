"""One stage of a run, or one episode that a stage failed in, again, in a debugger where it fails."""

import builtins
import pdb
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metaloom import storage
from metaloom.flows.commands.replay import require_known
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import stage_name
from metaloom.flows.graph.faults import debug_command, run_checked
from metaloom.flows.graph.recomputed import Recomputed
from metaloom.flows.graph.run_stages import config_of, stages_of_run
from metaloom.flows.rollouts.workers import Backend
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.reproduce import reproduce
from metaloom.storage import Quarantined, StageRef

INPUTS = "stage_inputs"
"""Name of the stage's stored inputs in every frame of the debugger."""


@dataclass(frozen=True)
class Debugged:
    """Outcome of a stage: the error it ended with, None if it ended well."""

    ref: StageRef
    fault: Exception | None
    identical: bool | None
    """True if it gave the stored bits; None where nothing is stored or it failed."""

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

    Inputs that were thinned are computed again.

    The debugger starts in the innermost frame; `up` leads to the stage and its arguments, and `stage_inputs` holds the
    stored inputs by the names under which the stage declares them, such as episodes. The run is not changed.
    """
    run = storage.open_run(path)
    with stages_of_run(run, backend) as all_stages:
        require_known(all_stages.order(iteration), stage, step)
        ref = StageRef(iteration, stage, step)
        stages = all_stages.of(ref)
        inputs = stages.load_inputs(ref, Recomputed(run, all_stages))
        try:
            value = run_checked(stages, ref, inputs)
        except Exception as fault:
            held = ", ".join(inputs) or "nothing"
            say(f"{type(fault).__name__}: {fault}\n`{INPUTS}` holds {held}; `up` leads out to the stage")
            # Among the builtins a name is found from every frame that the user goes to.
            setattr(builtins, INPUTS, inputs)
            try:
                _enter(debugger or pdb.Pdb(), fault)
            finally:
                delattr(builtins, INPUTS)
            return Debugged(ref, fault, None)
    if not run.contains(ref):
        return Debugged(ref, None, None)
    return Debugged(ref, None, storage.output_digest(storage.digest(value)) == run.record(ref).digest)


def reproduce_kept(
    path: Path, iteration: int, stage: str | None = None, step: int | None = None, *, debugger: pdb.Pdb | None = None
) -> Quarantined:
    """Run the episode again that the quarantine keeps of a fault of the environment, in this process.

    Returns:
        What is kept, when the episode goes well this time.
    """
    run = storage.open_run(path)
    entries = [entry for entry in storage.read_quarantine(path) if entry.ref.iteration == iteration]
    found = [e for e in entries if stage in (None, e.ref.stage) and step in (None, e.ref.step)]
    if len(found) != 1:
        kept = ", ".join(f"--stage {e.ref.stage} --step {e.ref.step}" for e in entries) or "nothing"
        raise UsageError(
            f"{path}: found {len(found)} failures of iteration {iteration} in the quarantine that match; required one. "
            f"Of this iteration it holds {kept}"
        )
    (entry,) = found
    if "env" not in entry.about:
        raise UsageError(
            f"{entry.path}: {entry.message}; required a fault of an environment, whose episode can be run again. "
            f"This one: {debug_command(path, entry.ref)}"
        )
    try:
        # The run's, not what the quarantine says of it, which no hash of the run vouches for.
        reproduce(config_of(run, entry.ref).env, entry.about, entry.arrays())
    except StageFault as fault:
        error: BaseException = fault
        while error.__cause__ is not None:  # up to the one that the environment itself raised, if it did
            error = error.__cause__
        if debugger:
            _enter(debugger, error)
        raise
    return entry


def _enter(debugger: pdb.Pdb, fault: BaseException) -> None:
    debugger.reset()
    debugger.interaction(None, fault.__traceback__)
