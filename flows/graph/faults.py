"""Stage faults: detecting them, quarantining their data, and explaining how to reproduce them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np

from metaloom import storage
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import table_of
from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.baselines import BaselineError
from metaloom.pipeline.dataflow.outputs import Outputs
from metaloom.pipeline.dataflow.refs import Span
from metaloom.pipeline.device import ON_DEVICE, asks_for_gpu
from metaloom.pipeline.envs import REPRODUCED
from metaloom.pipeline.envs.answers import last_line
from metaloom.pipeline.global_random import SEEDED
from metaloom.pipeline.plugins import is_installed
from metaloom.pipeline.types import BatchError
from metaloom.stages.counters import require_complete
from metaloom.stages.faults import StageFault, require_finite
from metaloom.storage import StageRef
from metaloom.storage.format.arrays import crc32c
from metaloom.storage.format.codec import Value, array_digests, as_read, differing, flatten
from metaloom.storage.format.records import ArrayDigest

FAULTS = (StageFault, NumericalError, BaselineError)  # stage errors caused by data or environments rather than by bugs


def run_checked(stages: Runner, ref: StageRef, inputs: Mapping[str, Any]) -> Value:
    """Compute a stage's output from its inputs, keyed by name, and check that all values are finite.

    Raises StageFault if a value is not finite, or if a plug-in modified an input or returned what cannot be stored.
    """
    declared = stages.graph.inputs(stages.config, ref) if stages.own else {}
    read = dict[StageRef, tuple[Value, dict[str, int]]]()
    for name, wanted in declared.items():
        if name in inputs and not isinstance(wanted, Span):
            value = inputs[name]
            refs, held = (wanted, value) if isinstance(wanted, tuple) else ((wanted,), (value,))
            read |= {given: (one, _checksums(one)) for given, one in zip(refs, held, strict=True)}
    folder = os.getcwd() if stages.own else None
    try:
        value = stages.witnessed(ref, stages.run(ref, inputs), inputs)
    except BaseException as error:
        if (mistake := _mistake(error, stages)) is None:
            raise
        raise StageFault(f"{ref.where}: {mistake}") from error
    if folder is not None and (found := os.getcwd()) != folder:
        os.chdir(folder)
        raise StageFault(
            f"{ref.where}: the stage changed the working directory to {found}, from which the run's files could not be "
            "found; use absolute paths instead"
        )
    for given, (held, sums) in read.items():  # the arrays are read-only, but tensors that share their memory are not
        if changed := [name for name, found in _checksums(held).items() if found != sums[name]]:
            raise StageFault(
                f"{ref.where}: the stage changed {changed[0]} of {given}, which others read; use a copy, as in "
                "torch.tensor(...), since torch.from_numpy(...) shares memory"
            )
    if type(value) is not (required := stages.graph[ref.stage].output):
        raise StageFault(
            f"{ref.where}: the stage returned {type(value).__name__}; expected {required.__name__}, its declared output"
        )
    if (schema := table_of(stages.graph)[ref.stage].schema) and (problem := schema.problem_of(value)):
        raise StageFault(f"{ref.where}: {problem}")
    arrays = flatten(value)
    for name, array in arrays.items():
        if type(array) is not np.ndarray:  # a subclass's extra data, such as a mask, would not be stored
            raise StageFault(f"{ref.where}: {name} is {type(array).__name__}; expected a plain NumPy array")
    require_finite(ref, value, arrays)
    # A plug-in may reuse the memory before it is stored. Later stages must not read more than a replay can.
    if not stages.own:
        return value
    value = as_read(table_of(stages.graph), ref, value)
    if schema and hasattr(required, "__post_init__"):  # built-in outputs also have one, which only validates
        read_again = stages.graph[ref.stage].as_declared(deepcopy(value))
        if changed := differing(array_digests(value), array_digests(read_again)):
            raise StageFault(
                f"{ref.where}: {required.__name__}.__post_init__ changes {changed[0]} each time it runs, including "
                "when a stage reads the output; compute it in the stage instead"
            )
    return value


def _mistake(error: BaseException, stages: Runner) -> str | None:
    """Return a description of a plug-in's mistake and its source line, or None for an unrecognized error."""
    if isinstance(error, SystemExit):  # would end the program as if the run were complete
        return f"the stage asked Python to exit ({error}); it must return a result or raise an error"
    if not stages.own:
        return None
    device, places = stages.config.device, _places(error)
    if isinstance(error, BatchError):
        found = str(error)
    elif isinstance(error, ValueError) and "read-only" in str(error):
        found = "modifies an input array that other stages read; use a copy, as in np.array(...)"
    elif isinstance(error, Exception) and device != "cuda" and asks_for_gpu(error):
        found = f"asks for a GPU ({error}); put tensors on setup.device, which is {device}"
    elif isinstance(error, RuntimeError) and device == "cuda" and "same device" in str(error):
        found = f"uses tensors on different devices ({error}); {ON_DEVICE}"
    elif isinstance(error, StopIteration):  # would end the generator that trains as if the run were complete
        found = "raised StopIteration, for example from next(); give next() a default, or raise another Exception"
    elif not isinstance(error, Exception | KeyboardInterrupt) and places[0]:
        found = f"raised {last_line(error)}, which is not an Exception; return a result or raise an Exception"
    else:
        return None
    return next(filter(None, places), "") + found


def describe_error(error: Exception) -> str:
    """Return an error's message, preceded by the source line and the error's type if a plug-in caused the error."""
    place = next(filter(None, _places(error)), "")
    return f"{place}{last_line(error)}" if place or isinstance(error, KeyError) else str(error)


def _places(error: BaseException) -> list[str]:
    """Return the function and line of each frame in a traceback, innermost first; "" for libraries and Metaloom."""
    places = list[str]()
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        is_ours = module.startswith("metaloom.") or is_installed(code.co_filename)
        places.append("" if is_ours else f"{module}:{code.co_qualname}, line {line}: ")
    return places


def require_sound(stages: Runner, ref: StageRef, outputs: Outputs, value: Value) -> None:
    """Raise StageFault if a plug-in's update lacks counters, or if an output differs when a new learner recomputes it.

    Stages that run environments are not recomputed; instead, the witness replays one of their episodes.
    """
    stage = stages.graph[ref.stage]
    if stages.own and stage.ends_iteration:
        require_complete(value, outputs.load(stages.graph.learner_ref(ref.iteration)), ref.where)
    if not stages.own or stage.samples:
        return
    first, again = array_digests(value), stages.with_new_learner()
    second = run_checked(again, ref, again.load_inputs(ref, outputs, witness=False))
    if name := first_differing(first, array_digests(second)):
        raise StageFault(
            f"{ref.where}: two computations from the same inputs gave different results, first in {name}; check "
            f"{', '.join(stages.own)}. Draw from {SEEDED}, not from an unseeded generator, and keep state in "
            "LearnerState.extra, not in a class or a module"
        )


def _checksums(value: Value) -> dict[str, int]:
    """Return the CRC-32C of each of a value's arrays, keyed by array name."""
    return {name: crc32c(array.tobytes()) for name, array in flatten(value).items()}


def first_differing(stored: Mapping[str, ArrayDigest], again: Mapping[str, ArrayDigest]) -> str | None:
    """Return the name of the first array that differs in a recomputation without a witness, or None."""
    return next((name for name in differing(stored, again) if name != f"metrics.{REPRODUCED}"), None)


@contextmanager
def explained(run: Path, ref: StageRef, seed_position: Sequence[int] | None = None) -> Iterator[None]:
    """Within the block, add to a stage's error where it failed and how to reproduce it.

    The error keeps its type. If `seed_position` is given, the failing stage's data are quarantined.
    """
    debug = f"To look at it in a debugger: {debug_command(run, ref)}"
    try:
        yield
    except FAULTS as error:
        kept = debug if seed_position is None else _keep(error, run, ref, seed_position, debug)
        raise reworded(error, f"{run}: {str(error).removesuffix('.')}. {kept}") from error
    except Exception as error:  # a bug, such as one in a plug-in
        error.add_note(f"{run}: in {ref.where}. {debug}")
        raise


def reworded(error: Exception, message: str) -> Exception:
    """Return an error with the same class and attributes but another message, without calling its constructor."""
    again = type(error).__new__(type(error), message)
    vars(again).update(vars(error))
    return again


def debug_command(run: Path, ref: StageRef) -> str:
    """Return the command that reruns a stage and enters the debugger where it fails."""
    return f"metaloom replay {storage.argument(run)}@{ref.iteration} --stage {ref.stage} --step {ref.step} --pdb"


def _keep(error: Exception, run: Path, ref: StageRef, seed_position: Sequence[int], debug: str) -> str:
    about = {**getattr(error, "about", {}), "run": run.name, **ref.document(), "seed_position": list(seed_position)}
    try:
        folder = storage.put_in_quarantine(
            run, ref, message=str(error), about=about, arrays=getattr(error, "arrays", {})
        )
    except storage.StoreError as problem:
        return f"The details of the failure could not be stored ({problem}). {debug}"
    if "env" in about:
        command = debug_command(run, ref).removesuffix("--pdb") + "--quarantine"
        debug = f"To run that episode again: {command}. To look at it in a debugger, add --pdb"
    return f"The message and arrays of the failure are kept in {folder}. {debug}"
