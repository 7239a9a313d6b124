"""`verify`: checks every stored file against its record."""

from metaloom.flows.arguments import checked
from metaloom.flows.operations.options import RunArgument
from metaloom.flows.results.checks import Verification
from metaloom.flows.runs import folder_of
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_run, verify_run


@checked
def verify(run: RunArgument) -> Verification:
    """Check every stored file against its record.

    Exit code 0 if all files are intact, 1 if any is damaged, missing or unexpected. `metaloom resume RUN --repair`
    repairs or recomputes damaged and missing files; it does not remove files that do not belong to the run.

    Example: `metaloom verify first`

    Args:
        run: Run to check.
    """
    folder = folder_of(run)
    damages = verify_run(folder, STATUS.counted("outputs"))
    return Verification(folder, tuple(damages), sealed=bool(damages) or open_run(folder).is_sealed)
