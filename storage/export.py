"""Creation of an export's folder, and the summary of an export."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import StageMissing, StoreError, system_errors
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.run import Iterations, Run
from metaloom.storage.unfinished import unfinished_folder

_WRITABLE = "free space and permission to write the export"


class ExportExists(StoreError, FileExistsError):
    """Raised if something already exists at the path of an export."""


@dataclass
class Export:
    """Summary of an export.

    `rows` counts rows, episodes or points, depending on the format. `skipped` lists the iterations whose batches are no
    longer stored, each with the reason. `progress` receives the number of iterations read and the total; it starts
    again at 0 if an export reads the iterations more than once.
    """

    path: Path
    iterations: int = 0
    rows: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    progress: Progress = field(default=unseen, repr=False)

    def as_dict(self) -> dict[str, Any]:
        skipped = [{"iteration": i, "reason": reason} for i, reason in self.skipped]
        return {"path": str(self.path), "iterations": self.iterations, "rows": self.rows, "skipped": skipped}

    def available(
        self, run: Run, iterations: Iterations, steps: Sequence[int] | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each iteration to export and its inner steps; add iterations without stored episodes to `skipped`."""
        inner_steps: dict[int, list[int]] = {}
        collects = run.stages.named("rollouts")
        for ref in run.refs():
            if ref.stage == collects and (steps is None or ref.step in steps):
                inner_steps.setdefault(ref.iteration, []).append(ref.step)
        chosen = run.select(iterations)
        for n, i in enumerate(chosen):
            self.progress(n, len(chosen))
            if i not in inner_steps:
                self.skipped.append((i, "no episodes of these inner steps are stored"))
                continue
            try:
                for k in inner_steps[i]:
                    run.files.read_arrays(run.record(StageRef(i, collects, k)), {"lengths"})
            except StageMissing as error:
                self.skipped.append((i, error.found))
                continue
            self.iterations += 1
            yield i, inner_steps[i]


@contextmanager
def export_folder(out: Path) -> Generator[Path, None, None]:
    """Yield a temporary folder that is renamed to `out` if the block succeeds, and removed otherwise.

    Raises ExportExists unless `out` is new or an empty folder. It also removes folders left behind by killed exports.
    """
    with system_errors(out, required=_WRITABLE, action="Free space, or choose another folder"):
        if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise ExportExists(
                out, found="the path already exists", required="a new or empty folder", action="Choose another --out"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(out.parent, out.name) as part:
            yield part
            part.rename(out)
