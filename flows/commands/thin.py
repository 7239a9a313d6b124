"""Thinning of a stored run, and restoring what was removed."""

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
    """Remove the arrays (`storage.THINNABLE`) of complete iterations that are not kept; they can be recomputed."""
    if not retention.thins:
        raise UsageError("required --keep-every N, --keep-last N or both: which iterations stay whole")
    run = storage.open_run(path)
    iterations = run.iterations  # which lists a folder
    chosen = [i for i in iterations if not retention.keeps(i, len(iterations))]
    goes = (ref for ref in run.thinnable({*chosen}) if not run.is_thinned(ref))
    refs = [*goes] if dry_run else goes
    if not anyway:
        try:
            changed = changed_since(run, refs)
        except ConfigError as problem:
            raise UsageError(
                f"{run.location}: found settings that cannot be built today, so that what is removed could not be "
                f"computed again ({problem}); fix that first, or remove it anyway: --anyway"
            ) from None
        if changed:
            iterations = set[int]().union(*changed.values())
            raise UsageError(
                f"{run.location}: found that {'; '.join(changed)}, so that {plural(len(iterations), 'iteration')}, the "
                f"first {min(iterations)}, could not be computed again; required the sources as they were. Restore "
                "them, or remove the batches anyway: --anyway"
            )
    if dry_run:
        return Thinned.of([run.record(ref) for ref in refs], run.files.files_of)
    with storage.open_writer(path) as writer:
        return writer.thin(chosen, on_progress)


def materialise(
    path: Path, iteration: int | None = None, *, backend: Backend = Backend(workers=0)
) -> Iterator[StageRef]:
    """Recompute thinned outputs of an iteration, or of all if None, and store them if their digests agree."""
    run = storage.open_run(path)
    if iteration is not None:
        require_iteration(run, iteration)
    iterations = run.thinned_iterations() if iteration is None else [iteration]
    with storage.open_writer(path) as writer, stages_of_run(run, backend) as stages:
        stored = groupby(run.refs_of(iterations), key=lambda ref: ref.iteration)
        for _, refs in stored:
            thinned = [ref for ref in refs if run.is_thinned(ref)]
            outputs = Recomputed(run, stages)
            values: dict[StageRef, Value] = {ref: outputs.load(ref) for ref in thinned}
            if values:
                writer.restore(values)
            yield from thinned
