"""`metaloom reference`: a group of commands."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from metaloom.flows.cli.options import ANYWHERE, AsJson, BackendOptions, RunArgument
from metaloom.flows.cli.output import answer
from metaloom.flows.errors import UsageError
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.references.index import Reference

reference = App(
    name="reference",
    help="""List, show, verify, extract or add reference runs.

    Anybody can compute every iteration of a reference run again.

    Example: `metaloom reference ls`
    """,
)

From = Annotated[
    Path | None,
    Parameter(name="--from", show_default=False, help="Folder of the references; that of the checkout by default."),
]
Name = Annotated[str, Parameter(help="A reference, as `metaloom reference ls` names it.")]
NameAt = Annotated[str, Parameter(help="NAME of a reference, or NAME@ITERATION for one iteration.")]


@reference.command
def ls(*, folder: From = None, as_json: AsJson = False) -> int:
    """List the references: what each is, how far it goes, and the average return of its last iteration.

    Example: `metaloom reference ls`
    """
    from metaloom.flows.references.index import read_index
    from metaloom.flows.references.tables import reference_rows, references_table

    rows = reference_rows(read_index(_folder(folder)))
    answer(as_json, lambda: rows, lambda: references_table(rows, folder))
    return 0


@reference.command
def show(name: NameAt, /, *, folder: From = None, as_json: AsJson = False) -> int:
    """Show a reference as `metaloom show` shows a run: settings, metrics, returns by class, records with digests.

    Example: `metaloom reference show dense-maml-ppo-seed-1@37`
    """
    place, found, iteration = _named(name, folder)
    from metaloom.flows.references.archive import opened
    from metaloom.flows.runs import require_iteration
    from metaloom.flows.views.run_info import iteration_info, run_info
    from metaloom.flows.views.tables import iteration_view, run_view
    from metaloom.storage import open_run

    with opened(place, found) as path:
        run = open_run(path)
        if iteration is None:
            lies = str(place / found.archive)
            answer(as_json, lambda: run_info(run) | {"path": lies}, lambda: run_view(run, path=lies, everything=True))
        else:
            require_iteration(run, iteration)
            answer(as_json, lambda: iteration_info(run, iteration), lambda: iteration_view(run, iteration))
    return 0


@reference.command
def verify(name: NameAt, /, *, folder: From = None, where: BackendOptions = ANYWHERE, as_json: AsJson = False) -> int:
    """Recompute an iteration of a reference, or all, and compare every output on the way with its record.

    It begins with the nearest learner that is stored, and computes by the machine code of BLAS, torch and NumPy that
    the run records, if the processor can. Exit code 0 when all outputs have the recorded bits, 1 when one has not; then
    it prints what else differs (versions, processor) and both average returns.

    Example: `metaloom reference verify dense-maml-ppo-seed-1@37`
    """
    place, found, iteration = _named(name, folder)
    if where.workers is None and where.scheduler is None:
        where = replace(where, workers=0)
    backend = where.backend()
    from metaloom.flows.as_recorded import start_as_recorded
    from metaloom.flows.references.archive import opened
    from metaloom.storage import open_run

    with opened(place, found) as path:
        start_as_recorded(open_run(path), range(found.iterations) if iteration is None else [iteration])
        from metaloom.flows.references.verify import verify as verify_reference
        from metaloom.flows.views.parts import as_text

        outcome = verify_reference(
            path,
            iteration,
            backend=backend,
            on_progress=lambda now, last: STATUS.far(f"iteration {now} of those up to {last}"),
        )
    answer(as_json, outcome.as_dict, lambda: as_text(outcome))
    return 0 if outcome.identical else 1


@reference.command
def extract(name: Name, /, *, run: str | None = None, folder: From = None, as_json: AsJson = False) -> int:
    """Make a run of a reference, for replay, report, compare, fork and all other commands.

    Example: `metaloom reference extract dense-maml-ppo-seed-1 --run copied`

    Args:
        run: Name or path of the run; that of the reference in the runs folder by default.
    """
    place, found, iteration = _named(name, folder)
    if iteration is not None:
        raise UsageError(f"{name}: found an iteration; required a reference, all of which is extracted")
    from metaloom.flows.references.archive import extract as extract_reference
    from metaloom.flows.runs import run_folder

    path = run_folder(found.name if run is None else run)
    path.parent.mkdir(parents=True, exist_ok=True)
    extract_reference(place, found, path)
    answer(as_json, lambda: {"run": str(path)}, lambda: f"{path} is {found.name} as a run")
    return 0


@reference.command
def add(
    run: RunArgument, /, *, name: str | None = None, to: Path | None = None, learners: int = 20, as_json: AsJson = False
) -> int:
    """Make a reference of a complete run, which stays as it is, and add it to a folder of references.

    Example: `metaloom reference add first --name dense-promp-seed-6 --to references`

    Args:
        name: Name of the reference; that of the run by default.
        to: Folder of the references; that of the checkout by default.
        learners: Iterations from one stored learner to the next: fewer learners make a smaller archive, and `verify`
            computes up to so many iterations.
    """
    from metaloom.flows.formatting import size
    from metaloom.flows.references.archive import add as add_reference
    from metaloom.flows.references.index import INDEX, shipped
    from metaloom.flows.references.tables import reference_rows
    from metaloom.flows.runs import run_folder

    if to is None and not (shipped() / INDEX).exists():
        raise UsageError("found no checkout, whose references it would be among; required a folder: --to FOLDER")
    place = _folder(to)
    made = add_reference(run_folder(run), place, name, learners=learners)
    answer(as_json, lambda: reference_rows([made])[0], lambda: f"{place / made.archive}: {size(made.size)}")
    return 0


def _folder(given: Path | None) -> Path:
    from metaloom.flows.references.index import shipped

    return shipped() if given is None else given


def _named(text: str, given: Path | None) -> "tuple[Path, Reference, int | None]":
    """The folder of references, the one that is named, and an iteration of it."""
    from metaloom.flows.references.index import find

    folder = _folder(given)
    name, at, iteration = text.partition("@")
    if at and not re.fullmatch("[0-9]{1,8}", iteration):
        raise UsageError(f"{text}: found {iteration!r} after the @; required an iteration such as {name}@12")
    found = find(folder, name)
    if at and int(iteration) >= found.iterations:
        raise UsageError(f"{text}: found no such iteration; required one of {name}@0 to {name}@{found.iterations - 1}")
    return folder, found, int(iteration) if at else None
