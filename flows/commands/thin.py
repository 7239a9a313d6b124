"""Thinning stored runs, and restoring thinned outputs."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.graph.recomputed import Recomputed
from metaloom.flows.graph.run_stages import changed_since, stages_of_run
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import Retention, StageRef, Thinned
from metaloom.storage.format.codec import Value
from metaloom.storage.progress import Progress, unseen


def thin(
    path: Path, retention: Retention, *, dry_run: bool = False, anyway: bool = False, on_progress: Progress = unseen
) -> Thinned:
    """Remove recomputable arrays (`storage.THINNABLE`) from complete iterations that the retention does not keep."""
    if not retention.thins:
        raise UsageError("pass --keep-every, --keep-last or both")
    run = storage.open_run(path)
    iterations = run.iterations  # read once, since it lists a folder
    chosen = [i for i in iterations if not retention.keeps(i, len(iterations))]
    goes = (ref for ref in run.thinnable({*chosen}) if not run.is_thinned(ref))
    refs = [*goes] if dry_run else goes
    if not anyway:
        try:
            changed = changed_since(run, refs)
        except ConfigError as problem:
            raise UsageError(
                f"{run.location}: its settings can no longer be loaded ({problem}), so removed batches could "
                "not be recomputed. Fix that first, or pass --anyway to remove them regardless"
            ) from None
        if changed:
            iterations = set[int]().union(*changed.values())
            raise UsageError(
                f"{run.location}: {'; '.join(changed)}; {plural(len(iterations), 'iteration')}, starting at "
                f"{min(iterations)}, could not be recomputed. Restore the original sources, or pass "
                "--anyway to remove the batches regardless"
            )
    if dry_run:
        return Thinned.of([run.record(ref) for ref in refs], run.files.files_of)
    with storage.open_writer(path) as writer:
        return writer.thin(chosen, on_progress)


def materialise(
    path: Path, iteration: int | None = None, *, backend: Backend = Backend(workers=0)
) -> Iterator[StageRef]:
    """Recompute the thinned outputs of one iteration or of all, store them if digests match, and yield their stages."""
    run = storage.open_run(path)
    if iteration is not None:
        require_iteration(run, iteration)
    iterations = run.thinned_iterations() if iteration is None else [iteration]
    with storage.open_writer(path) as writer, stages_of_run(run, backend) as stages:
        for _, refs in groupby(run.refs_of(iterations), key=lambda ref: ref.iteration):
            thinned = [ref for ref in refs if run.is_thinned(ref)]
            outputs = Recomputed(run, stages)
            values: dict[StageRef, Value] = {ref: outputs.load(ref) for ref in thinned}
            if values:
                writer.restore(values)
            yield from thinned
