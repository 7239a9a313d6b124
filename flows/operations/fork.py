"""`fork`: starts a new run from the iterations of an existing one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Iteration, Overrides, ParentArgument, PythonOnly, Trust, agree, changes
from metaloom.flows.runs import RunAt, run_folder
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.opened import Run


@checked
def fork(
    parent: ParentArgument,
    iteration: Iteration,
    new_run: Annotated[str | Path, Parameter(name="--run")],
    *,
    overrides: Overrides = (),
    trust: Trust = False,
    account: Annotated[Callable[[storage.Fork], None] | None, PythonOnly] = None,
    **settings: Any,
) -> "Run":
    """Fork a run to continue it with different settings.

    The new run begins with its parent's iterations, and `metaloom resume` continues it. It shares files with its
    parent, which can still be thinned or deleted.

    Example: `metaloom fork first@10 --run second --set algorithm.clip_eps=0.1`

    Args:
        parent: Run to fork.
        iteration: Number of iterations that the new run takes over from its parent; all if None.
        new_run: Name of the new run under the runs folder, or a path.
        overrides: Settings to change, as KEY=VALUE.
        trust: Allow importing the modules that the parent's settings name, now and later.
        account: Called with a summary of shared and copied files.
        **settings: Settings to change; see `train`.
    """
    at = RunAt.of(parent, iteration, learner=True)
    agree(at.path, trust)
    far = STATUS.counted("outputs")
    made = late.fork_run(at.path, at.iteration, run_folder(new_run), changes(overrides, settings), on_progress=far)
    if account is not None:
        account(made)
    return late.Run.open(made.path)
