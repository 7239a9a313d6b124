"""`metaloom fork`."""

from metaloom.flows.cli.options import Overrides, ParentArgument, Trust, agree
from metaloom.flows.cli.output import console
from metaloom.flows.runs import RunAt, run_folder
from metaloom.flows.views.status import STATUS


def fork(parent: ParentArgument, *, run: str, overrides: Overrides = (), trust: Trust = False) -> int:
    """Branch off from a run, with other settings.

    The new run begins with the iterations of its parent.

    `metaloom resume` then continues it. Files are shared with the parent, which may be thinned or deleted.

    Example: `metaloom fork first@10 --run second --set algorithm.clip_eps=0.1`

    Args:
        run: Name of the new run under the runs folder, or a path.
    """
    at = RunAt.parse(parent, learner=True)
    agree(at.path, trust)
    from metaloom.flows.commands.fork import fork as fork_run
    from metaloom.flows.views.tables import fork_view

    made = fork_run(at.path, at.iteration, run_folder(run), overrides, on_progress=STATUS.counted("outputs"))
    console().print(fork_view(made, at.path))
    return 0
