"""`thin`: removes batches that can be recomputed."""

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Natural, Positive, RunArgument, Trust, agree
from metaloom.flows.results.disk import ThinnedRun
from metaloom.flows.runs import folder_of
from metaloom.flows.views.status import STATUS
from metaloom.storage import Retention


@checked
def thin(
    run: RunArgument,
    *,
    keep_every: Positive | None = None,
    keep_last: Natural | None = None,
    dry_run: bool = False,
    anyway: bool = False,
    trust: Trust = False,
) -> ThinnedRun:
    """Remove batches that can be recomputed.

    The episodes, samples and adapted parameters of iterations are removed; everything else is kept. An off-policy run
    also keeps its episodes, which are its replay buffer: only minibatches and adapted parameters are removed. `metaloom
    replay RUN@ITERATION --materialise` recomputes what was removed, bit for bit. Iterations that used a plug-in, such
    as a custom environment, are therefore refused if its source has since changed.

    Example: `metaloom thin first --keep-every 10 --keep-last 5 --dry-run`

    Args:
        run: Run to thin.
        keep_every: Keep iterations 0, N, 2N, ... in full.
        keep_last: Keep the N newest iterations in full.
        dry_run: Only show what would be removed.
        anyway: Also remove batches that a changed plug-in can no longer recompute.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    folder = folder_of(run)
    agree(folder, trust)
    kept, far = Retention(keep_last=keep_last, keep_every=keep_every), STATUS.counted("iterations")
    thinned = late.thin_run(folder, kept, dry_run=dry_run, anyway=anyway, on_progress=far)
    return ThinnedRun(**vars(thinned), dry_run=dry_run)
