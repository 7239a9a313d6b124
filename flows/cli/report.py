"""`metaloom report`."""

from pathlib import Path
from typing import TYPE_CHECKING

from metaloom.flows.cli.options import RunArgument
from metaloom.flows.cli.output import console
from metaloom.flows.runs import report_folder, run_folder
from metaloom.storage import Run, open_run
from metaloom.storage.errors import system_errors

if TYPE_CHECKING:
    from metaloom.flows.views.report import ReportFiles


def report(run: RunArgument, *, out: Path | None = None) -> int:
    """Write the learning curve as PNG and a self-contained HTML page.

    Example: `metaloom report first`

    Args:
        out: Folder for the files; reports/NAME in the runs folder by default.
    """
    opened = open_run(run_folder(run))
    files = write(opened, out if out is not None else report_folder(opened.path))
    console().print(f"learning curve  {files.png}\nreport page     {files.html}")
    return 0


def write(run: Run, folder: Path) -> "ReportFiles":
    """Write the report of a run to a folder.

    Raises:
        StorageFailed: the system does not let us write there.
    """
    from metaloom.flows.views.report import write_report

    with system_errors(
        folder,
        required="a folder to write the report to",
        action=f"Free space, or choose another: `metaloom report {run.path} --out FOLDER`",
    ):
        return write_report(run, folder)
