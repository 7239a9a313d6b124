"""Recomputation of stored stages, to compare outputs bit for bit or to debug a failing stage."""

import builtins
import pdb
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import stage_name
from metaloom.flows.graph.faults import debug_command, explained, run_checked
from metaloom.flows.graph.recomputed import Recomputed, nearest_learner
from metaloom.flows.graph.run_stages import RunStages, config_of, stages_of_run
from metaloom.flows.results.replay import ArrayDifference, StageReplay
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.device import EQUALITY
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.reproduce import reproduce
from metaloom.storage import Quarantined, Run, StageRef
from metaloom.storage.format.codec import Value, array_digests, differing, flatten
from metaloom.storage.format.records import ArrayDigest
from metaloom.storage.keep.thinner import changed_versions


def replay(
    path: Path,
    iteration: int | None = None,
    *,
    stage: str | None = None,
    step: int | None = None,
    until_diff: bool = False,
    backend: Backend = Backend(workers=0),
) -> Iterator[StageReplay]:
    """Recompute the stored stages of one iteration, or of all iterations, in order; yield each comparison.

    Each iteration uses a new learner. Plug-ins may keep state in a class or module. Their stages in the last iteration
    are therefore also recomputed first, and the first one that differs is yielded. Thinned inputs are recomputed too.
    """
    run = storage.open_run(path)
    with stages_of_run(run, backend) as stages:
        outputs = Recomputed(run, stages)
        refs = _selected(run, stages, iteration, stage, step)
        first, last = refs[0].iteration, refs[-1].iteration
        alone = [ref for ref in refs if ref.iteration == last != first and stages.plugins(ref)]
        for outcome, _ in _in_order(run, stages, alone, outputs):
            if not outcome.identical:
                yield outcome
                if until_diff:
                    return
                break
        for outcome, _ in _in_order(run, stages, refs, outputs):
            yield outcome
            if until_diff and not outcome.identical:
                return


def _in_order(
    run: Run, stages: RunStages, refs: Sequence[StageRef], outputs: Recomputed, *, trusting: bool = False
) -> Iterator[tuple[StageReplay, Value]]:
    """Recompute stages in order, with a new learner for each iteration; yield each comparison with the output.

    An output whose arrays are not stored is kept for later stages if it equals its record or if `trusting` is True.
    """
    for _, of_iteration in groupby(refs, key=lambda ref: ref.iteration):
        stages.renew_learners()
        for ref in of_iteration:
            outcome, value = _replay_stage(run, stages, ref, outputs)
            if outcome.with_record and (outcome.identical or trusting):
                outputs.remember(ref, value)
            yield outcome, value


def replay_from_learner(
    path: Path, iteration: int, *, first: int | None = None, backend: Backend = Backend(workers=0)
) -> Iterator[tuple[StageReplay, Value]]:
    """Recompute the stages from a stored learner to the end of an iteration; yield each comparison with the output.

    The start is iteration `first`, or by default the nearest one whose learner is stored. Unlike in `replay`, if an
    output's arrays are not stored, later stages read the recomputed output even if its digest differs from the record.
    """
    run = storage.open_run(path)
    require_iteration(run, iteration)
    with stages_of_run(run, backend) as stages:
        iterations = range(nearest_learner(run, iteration) if first is None else first, iteration + 1)
        refs = [ref for i in iterations for ref in stages.order(i) if run.contains(ref)]
        yield from _in_order(run, stages, refs, Recomputed(run, stages), trusting=True)


def _replay_stage(run: Run, stages: RunStages, ref: StageRef, outputs: Recomputed) -> tuple[StageReplay, Value]:
    """Recompute a stage from its stored inputs; return the comparison and the new output."""
    record, equality = run.record(ref), EQUALITY[stages.config(ref).device]
    # Read the arrays even though the digest would suffice, since they may differ from their record.
    stored = None if run.is_thinned(ref) else flatten(run.load(ref))
    with explained(run.path, ref):
        value = run_checked(runner := stages.of(ref), ref, runner.load_inputs(ref, outputs))
    differences = [*compare(ref, stored, flatten(value))] if stored is not None else []
    if not differences:
        differences = [*compare_digests(ref, record.arrays, array_digests(value))]
    changed = (*changed_versions(record), *outputs.changes(ref)) if differences else ()
    if differences and not changed and (plugins := stages.plugins(ref)):
        changed = (
            f"nothing that is recorded; {', '.join(plugins)} may keep state outside the stage outputs, for example in "
            "a learner, class or module; such state belongs in LearnerState.extra. hash() of strings and the order of "
            "sets also differ between processes; use sorted()",
        )
    return StageReplay(ref, tuple(differences), record.seconds, equality, stored is None, changed), value


def compare_digests(
    ref: StageRef, stored: Mapping[str, ArrayDigest], replayed: Mapping[str, ArrayDigest]
) -> Iterator[ArrayDifference]:
    """Yield a difference for each array whose digests differ, for outputs whose arrays are not stored."""
    for name in differing(stored, replayed):
        before, after = _form(stored.get(name)), _form(replayed.get(name))
        yield ArrayDifference(ref, name, (), before, after, float("nan"), None, -1)


def compare(ref: StageRef, stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> Iterator[ArrayDifference]:
    """Yield a difference for each array that is not bitwise identical."""
    for name in sorted({*stored, *replayed}):
        before, after = stored.get(name), replayed.get(name)
        if before is None or after is None or before.shape != after.shape or before.dtype != after.dtype:
            yield ArrayDifference(ref, name, (), _form(before), _form(after), float("inf"), None, -1)
        elif before.tobytes() != after.tobytes():
            before, after = np.ascontiguousarray(before), np.ascontiguousarray(after)
            # As unsigned integers, so that NaN equals itself and -0.0 differs from 0.0.
            bits = np.dtype(f"u{before.dtype.itemsize}")
            differs = before.view(bits) != after.view(bits)
            where, left, right = np.argwhere(differs), before[differs], after[differs]
            index = tuple(int(n) for n in where[0])
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.abs(left.astype(np.float64) - right.astype(np.float64))
            ulp = int(ulp_distance(left, right).max()) if before.dtype.kind == "f" else None
            largest = float(np.nanmax(gap, initial=0))
            yield ArrayDifference(ref, name, index, str(before[index]), str(after[index]), largest, ulp, len(where))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the elementwise distance between two arrays, in units in the last place (ULPs)."""
    kind = {2: np.int16, 4: np.int32, 8: np.int64}[a.dtype.itemsize]

    def ordered(x: np.ndarray) -> np.ndarray:
        # As signed integers, the bits of positive numbers are ordered; negative ones must be mirrored.
        bits = x.view(kind).astype(object)
        return np.where(bits < 0, -(bits & np.iinfo(kind).max), bits)

    return np.abs(ordered(a) - ordered(b))


def _form(values: np.ndarray | ArrayDigest | None) -> str:
    return "absent" if values is None else f"{values.dtype}{list(values.shape)}"


def _selected(
    run: Run, stages: RunStages, iteration: int | None, stage: str | None, step: int | None
) -> list[StageRef]:
    if iteration is None and not run.iterations:
        where = storage.argument(run.path)
        raise UsageError(f"{run.path}: no iteration is complete; name one, as in: metaloom replay {where}@0")
    if iteration is not None:
        require_iteration(run, iteration)
    # An interrupted iteration also has stored stages, which are replayed only if that iteration is given.
    order = [ref for i in (run.iterations if iteration is None else [iteration]) for ref in stages.order(i)]
    require_known(order, stage, step)
    wanted = [ref for ref in order if stage in (None, ref.stage) and step in (None, ref.step)]
    if not (refs := [ref for ref in wanted if run.contains(ref)]):
        run.record(wanted[0])  # raises StageMissing, listing what exists
    return refs


def require_known(order: list[StageRef], stage: str | None, step: int | None) -> None:
    """Raise UsageError unless the iteration has this stage and this inner step."""
    names = list(dict.fromkeys(ref.stage for ref in order))
    if stage not in (None, *names):
        raise UsageError(f"iteration {order[0].iteration} has no stage {stage!r}; its stages are {', '.join(names)}")
    steps = dict.fromkeys(ref.step for ref in order if stage in (None, ref.stage))
    if step not in (None, *steps):
        found = ", ".join(map(str, steps))
        raise UsageError(f"--step must be one of {found} (the inner steps of {stage or 'this run'}), got {step}")


INPUTS = "stage_inputs"  # name of the variable that holds the stage's inputs in every debugger frame


@dataclass(frozen=True)
class Debugged:
    """Result of running a stage in the debugger; `fault` is None if the stage did not fail."""

    ref: StageRef
    fault: Exception | None
    identical: bool | None
    """True if the stored output was reproduced; None if nothing is stored or the stage failed."""

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
    """Run a stage from its stored inputs, and enter the debugger if it fails; the run is not changed.

    Thinned inputs are recomputed, and the output need not be stored. The debugger starts in the innermost frame; `up`
    moves to the stage. `stage_inputs` holds the inputs, keyed by the names that the stage declares, such as episodes.
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
            say(f"{type(fault).__name__}: {fault}\n`{INPUTS}` holds {held}; `up` moves to the stage")
            # A builtin name is visible from every frame.
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
    """Rerun the quarantined episode in which an environment failed, in this process; return its entry on success."""
    run = storage.open_run(path)
    entries = [entry for entry in storage.read_quarantine(path) if entry.ref.iteration == iteration]
    found = [e for e in entries if stage in (None, e.ref.stage) and step in (None, e.ref.step)]
    if len(found) != 1:
        kept = ", ".join(f"--stage {e.ref.stage} --step {e.ref.step}" for e in entries) or "nothing"
        raise UsageError(
            f"{path}: the quarantine has {len(found)} matching failures of iteration {iteration}; expected "
            f"exactly one. For this iteration, it contains {kept}"
        )
    (entry,) = found
    if "env" not in entry.about:
        raise UsageError(
            f"{entry.path}: {entry.message}; only failures of an environment have an episode to rerun. "
            f"To debug this one: {debug_command(path, entry.ref)}"
        )
    try:
        # The run's settings, since the quarantine is not covered by the run's hashes.
        reproduce(config_of(run, entry.ref).env, entry.about, entry.arrays())
    except StageFault as fault:
        error: BaseException = fault
        while error.__cause__ is not None:  # down to the environment's own error, if any
            error = error.__cause__
        if debugger:
            _enter(debugger, error)
        raise
    return entry


def _enter(debugger: pdb.Pdb, fault: BaseException) -> None:
    debugger.reset()
    debugger.interaction(None, fault.__traceback__)
