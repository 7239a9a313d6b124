"""`view`: serves a page of curves, stages, batches and videos."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Port, PythonOnly, complete_runs
from metaloom.flows.runs import run_folder, runs_root
from metaloom.storage import url_of

RunsArgument = Annotated[
    str | Path | None,
    Parameter(
        help="A folder of runs, or one run: a name under the runs folder, a path, or a URL such as s3://bucket/runs. "
        "The runs folder by default.",
        completer=complete_runs,
    ),
]


@checked
def view(
    runs: RunsArgument = None, /, *, port: Port = 0, opened: Annotated[Callable[[str], None], PythonOnly] = print
) -> None:
    """Serve a page of curves, stages, batches and videos.

    The page is available on this machine until Ctrl-C. It follows training runs, changes nothing, and sends no requests
    to other hosts. It opens only at the printed address.

    Example: `metaloom view first --port 8080`

    Args:
        runs: Folder of runs, or one run; the runs folder if None.
        port: Port on 127.0.0.1; 0 for any free port.
        opened: Called with the address of the page.
    """
    place = runs_root() if runs is None else run_folder(runs)
    if runs is not None and url_of(place) is None and not place.exists() and Path(runs).is_dir():
        place = Path(runs)  # a relative path to a folder of runs outside the runs folder, or to the runs folder itself
    if url_of(place) is None and not place.is_dir():
        raise UsageError(f"{place}: no such folder; pass a run or a folder of runs. `metaloom ls` lists runs")
    late.serve_viewer(place, port, opened)
