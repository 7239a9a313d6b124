"""`reference`: the commands for reference runs, which anyone can recompute."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import InProcess, Positive, PythonOnly, RunArgument
from metaloom.flows.results.run_rows import Facts
from metaloom.flows.rollouts.backend import IN_PROCESS
from metaloom.flows.runs import folder_of, require_iteration, run_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import Run, open_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from metaloom.flows.references.index import Added, Extracted, Reference, References
    from metaloom.flows.references.verify import Verified

From = Annotated[
    Path | str | None,
    Parameter(name="--from", show_default=False, help="References folder; by default, the one in the checkout."),
]
Name = Annotated[str, Parameter(help="Name of a reference; `metaloom reference ls` lists them.")]
NameAt = Annotated[str, Parameter(help="NAME of a reference, or NAME@ITERATION for one iteration.")]


@checked
def ls(*, folder: From = None) -> "References":
    """List the references, each with its number of iterations and the average return of the last one.

    Example: `metaloom reference ls`

    Args:
        folder: References folder; by default, the one in the checkout.
    """
    return late.References(late.reference_rows(late.read_index(_folder(folder))), folder)


@checked
def show(name: NameAt, /, *, folder: From = None) -> Facts:
    """Show a reference as `metaloom show` shows a run: settings, metrics, returns by class, records with digests.

    Example: `metaloom reference show dense-maml-ppo-seed-1@37`

    Args:
        name: A reference, or NAME@ITERATION.
        folder: References folder; by default, the one in the checkout.
    """
    with found(name, folder) as (data, _):
        return Facts(data())


@contextmanager
def found(name: str, folder: Path | str | None) -> "Iterator[tuple[Callable[[], Any], Callable[[], RenderableType]]]":
    """Open a reference and yield two functions: one returns it (or one iteration) as data, the other renders it."""
    place, about, iteration = _named(name, folder)
    with late.opened_reference(place, about) as path:
        run = open_run(path)
        if iteration is None:
            lies = str(place / about.archive)
            yield lambda: late.run_info(run) | {"path": lies}, lambda: late.run_view(run, path=lies, everything=True)
        else:
            require_iteration(run, iteration)
            yield lambda: late.iteration_info(run, iteration), lambda: late.iteration_view(run, iteration)


@checked
def verify(
    name: NameAt,
    /,
    *,
    folder: From = None,
    backend: InProcess = IN_PROCESS,
    prepared: Annotated[Callable[[Run, Collection[int]], None] | None, PythonOnly] = None,
) -> "Verified":
    """Recompute one iteration of a reference, or all, and compare each output with its record.

    Computation starts from the nearest stored learner. The command uses the CPU code paths of BLAS, torch and NumPy
    that the run records, if the processor supports them; in Python, the process keeps its own. Exit code 0 if all
    outputs are identical to the recorded ones; otherwise 1, and the output shows what has changed and both returns.

    Example: `metaloom reference verify dense-maml-ppo-seed-1@37`

    Args:
        name: A reference, or NAME@ITERATION.
        folder: References folder; by default, the one in the checkout.
        backend: Rollout backend.
        prepared: Called with the opened reference and the iterations before they are computed.
    """
    place, found, iteration = _named(name, folder)
    with late.opened_reference(place, found) as path:
        if prepared is not None:
            prepared(open_run(path), range(found.iterations) if iteration is None else [iteration])
        return late.verify_reference(
            path,
            iteration,
            backend=backend,
            on_progress=lambda now, last: STATUS.far(f"iteration {now}, up to {last}"),
        )


@checked
def extract(name: Name, /, *, run: str | Path | None = None, folder: From = None) -> "Extracted":
    """Extract a reference as a run, for replay, report, compare, fork and all other commands.

    Example: `metaloom reference extract dense-maml-ppo-seed-1 --run copied`

    Args:
        name: A reference.
        run: Name or path of the run; by default the reference's name, in the runs folder.
        folder: References folder; by default, the one in the checkout.
    """
    place, found, iteration = _named(name, folder)
    if iteration is not None:
        raise UsageError(f"{name} names an iteration; pass the name of a reference")
    path = run_folder(found.name if run is None else run)
    path.parent.mkdir(parents=True, exist_ok=True)
    late.extract_reference(place, found, path)
    return late.Extracted(path, found.name)


@checked
def add(
    run: RunArgument, /, *, name: str | None = None, to: Path | str | None = None, learners: Positive = 20
) -> "Added":
    """Make a reference from a complete run and add it to a references folder; the run is not changed.

    Example: `metaloom reference add first --name dense-promp-seed-6 --to references`

    Args:
        run: Run to make the reference from.
        name: Name of the reference; the run's name by default.
        to: References folder; by default, the one in the checkout.
        learners: Number of iterations between stored learners. A larger number makes the archive smaller, and `verify`
            recomputes up to this many iterations.
    """
    if to is None and not (late.shipped() / late.INDEX).exists():
        raise UsageError("there is no checkout to add the reference to; pass a folder with --to FOLDER")
    place = _folder(to)
    return late.Added(late.add_reference(folder_of(run), place, name, learners=learners), place)


def _folder(given: Path | str | None) -> Path:
    return late.shipped() if given is None else Path(given)


def _named(text: str, given: Path | str | None) -> "tuple[Path, Reference, int | None]":
    """Parse NAME or NAME@ITERATION; return the references folder, the reference, and the iteration or None."""
    folder = _folder(given)
    name, at, iteration = text.partition("@")
    if at and not re.fullmatch("[0-9]{1,8}", iteration):
        raise UsageError(f"{text}: got {iteration!r} after the @; expected an iteration, as in {name}@12")
    found = late.find_reference(folder, name)
    if at and int(iteration) >= found.iterations:
        raise UsageError(f"{text}: no such iteration; use one from {name}@0 to {name}@{found.iterations - 1}")
    return folder, found, int(iteration) if at else None
