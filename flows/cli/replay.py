"""Terminal part of `metaloom replay`: prints each stage, debugs one, and restores thinned outputs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call
from metaloom.flows.cli.output import console, print_json
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural, stage_label
from metaloom.flows.operations import late
from metaloom.flows.operations.options import agree, refuse_with
from metaloom.flows.operations.replay import materialise
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.runs import RunAt
from metaloom.flows.views.parts import as_text
from metaloom.flows.views.status import STATUS
from metaloom.storage import argument, open_run

if TYPE_CHECKING:
    from metaloom.flows.results.replay import Replay, StageReplay


def replay(
    call: "Call[Replay]",
    *,
    pdb: Annotated[
        bool,
        Parameter(help="Run one stage, stored or not, in this process, and enter Python's debugger where it fails."),
    ] = False,
    materialise: Annotated[
        bool, Parameter(help="Recompute what was thinned and store it again, provided that it has its old digest.")
    ] = False,
    quarantine: Annotated[
        bool, Parameter(help="Rerun, in this process, the episode that was kept because an environment failed in it.")
    ] = False,
    as_recorded: Annotated[
        bool,
        Parameter(
            help="Compute by the machine code of BLAS, torch and NumPy that the run records, as far as the processor "
            "can. Without this it is the processor's own."
        ),
    ] = False,
    as_json: bool = False,
) -> int:
    """Print each stage as it is compared, and what differs."""
    stage, step, until_diff, backend = (call[name] for name in ("stage", "step", "until_diff", "backend"))
    if quarantine or pdb:
        STATUS.end()  # the debugger talks to the terminal
        usual = asdict(Backend(workers=0, threads=backend.threads if backend.workers == 0 else 1))
        elsewhere = {
            name.removesuffix("_seconds"): value for name, value in asdict(backend).items() if value != usual[name]
        }
        option = "--quarantine" if quarantine else "--pdb"
        refuse_with(option, until_diff=until_diff, materialise=materialise, json=as_json, **elsewhere)
    at = RunAt.parse(call["run"])
    agree(at.path, call["trust"])
    if as_recorded:
        _start_as_recorded(at, say=not as_json)
    if quarantine:
        if at.iteration is None:
            raise UsageError(f"{at.path}: --quarantine is about one iteration, such as {at.path}@0")
        from pdb import Pdb

        entry = late.reproduce_kept(at.path, at.iteration, stage, step, debugger=Pdb() if pdb else None)
        told = f"the episode of {entry.path} went well this time. It failed with:\n{entry.message}"
        console().print(told, markup=False)
        return 0
    if pdb:
        return _debug(at, stage, step, backend)
    if materialise:
        return _restore(at, backend, whole=stage is None and step is None and not until_diff, as_json=as_json)
    return _replay(call, as_recorded=as_recorded, as_json=as_json)


def _start_as_recorded(at: RunAt, *, say: bool) -> None:
    run = open_run(at.path)
    iterations = run.select(None) if at.iteration is None else [at.iteration]
    late.start_as_recorded(run, iterations)
    if say:
        console().print(as_text(late.arithmetic_of(run, iterations)))


def _replay(call: "Call[Replay]", *, as_recorded: bool, as_json: bool) -> int:
    stages = 0

    def replayed(outcome: "StageReplay") -> None:
        nonlocal stages
        stages += 1
        STATUS.far(plural(stages, "stage"))
        if not as_json:
            console().print(late.replay_line(outcome))

    outcomes = call(replayed=replayed)
    different = [outcome for outcome in outcomes if not outcome.identical]
    if as_json:
        print_json([outcome.as_dict() for outcome in outcomes])
    elif different:
        console().print(
            late.difference_table([difference for outcome in different for difference in outcome.differences])
        )
        changed = dict.fromkeys(change for outcome in different for change in outcome.changed)
        told = "; ".join(changed) or "nothing that is recorded"
        console().print(as_text(f"Other than when it was computed: {told}"))
        if not as_recorded and any(change.startswith("arithmetic of ") for change in changed):
            console().print("`--as-recorded` computes by the recorded machine code, where the processor can")
    elif outcomes:
        thinned = sum(outcome.with_record for outcome in outcomes)
        about = f"; {thinned} of them were thinned and compared with their records only" if thinned else ""
        console().print(f"{plural(len(outcomes), 'stage')} replayed: all {outcomes[-1].proved}{about}")
    else:
        console().print("nothing to replay")
    return 1 if different else 0


def _debug(at: RunAt, stage: str | None, step: int | None, backend: Backend) -> int:
    if at.iteration is None or stage is None:
        raise UsageError(
            f"{at.path}: --pdb is for one stage; name it as in: "
            f"metaloom replay {argument(at.path)}@0 --stage adapt --pdb"
        )
    outcome = late.debug_stage(
        at.path, at.iteration, stage, step or 0, backend=backend, say=lambda words: console().out(words)
    )
    console().print(str(outcome))
    return 1 if outcome.fault else 0


def _restore(at: RunAt, backend: Backend, *, whole: bool, as_json: bool) -> int:
    if not whole:
        raise UsageError("found --materialise with --stage, --step or --until-diff; it is about whole iterations")

    refs = materialise(at.path, at.iteration, backend=backend)
    if as_json:
        print_json([asdict(ref) for ref in refs])
    for ref in () if as_json else refs:
        console().print(f"{ref.iteration} {stage_label(ref.stage, ref.step)}: stored again, its old digest")
    if not refs and not as_json:
        console().print("nothing was thinned there")
    return 0
