"""Compute an iteration of a reference again and compare everything on the way with its records."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.as_recorded import Arithmetic, arithmetic_of
from metaloom.flows.commands.replay import replay_from_learner
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_returns, number, plural, stage_name
from metaloom.flows.references.claims import TableCheck, false_facts, false_records
from metaloom.flows.results.replay import StageReplay
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.types import Update
from metaloom.storage import StageRef
from metaloom.storage.errors import damaged
from metaloom.storage.progress import Progress, unseen


@dataclass(frozen=True)
class Verified:
    """Result of computing an iteration again from the nearest stored learner.

    Attributes:
        name: Name of the reference.
        iteration: Computed iteration.
        start: Iteration whose learner was stored, where it began.
        stages: Number of compared stages, of all iterations from `start` to `iteration`.
        proved: What equality proves, in words; the class that the run's device can claim.
        first_difference: First stage whose output has other bits.
        differs: Versions and facts of the processor that have changed, a few words each.
        returns: Average return of the iteration, after adaptation if there is any: recorded, and computed now.
        false_tables: Tables that differ from the computed values, or lack some. A table of an output with other
            bits is false only where its columns or units are.
        false_records: Contradictions between records and the stages that compute their outputs, in a few words: inputs,
            positions in the random streams, outputs that are missing although the settings ask for them.
        false_facts: Recorded facts of the environment that it declares otherwise today: `task_classes`, by which
            returns are grouped, names and units of `components`, `facts`, `env.options.radius` and the like.
        arithmetic: Machine code that computed, and why it is not the recorded code, if so.
    """

    name: str
    iteration: int
    start: int
    stages: int
    proved: str
    first_difference: StageRef | None = None
    differs: tuple[str, ...] = ()
    returns: tuple[float, float] | None = None
    false_tables: tuple[str, ...] = ()
    false_facts: tuple[str, ...] = ()
    false_records: tuple[str, ...] = ()
    arithmetic: Arithmetic | None = None

    @property
    def identical(self) -> bool:
        """True if every output has the recorded bits, and the run's claims about them hold."""
        return self.first_difference is None and not (self.false_tables or self.false_facts or self.false_records)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON data."""
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        """Summarize the outcome: the class of equality that it shows, and the machine code that computed it."""
        return f"{self._outcome()}\n{self.arithmetic}" if self.arithmetic else self._outcome()

    def _outcome(self) -> str:
        about = f"{self.name}@{self.iteration}: {plural(self.stages, 'stage')} recomputed from learner {self.start}"
        # There may be hundreds.
        records, more = [*self.false_records[:3]], len(self.false_records) - 3
        records += [f"and {more} more"] if more > 0 else []
        places = [
            f"in {where} {', '.join(names)}"
            for where, names in (
                ("its tables of", self.false_tables),
                ("what it records of its environment:", self.false_facts),
                ("its records:", records),
            )
            if names
        ]
        if self.first_difference is None and places:
            return (
                f"{about}: all {self.proved}, but NOT what the run says of them, {' and '.join(places)}: `show`, "
                "`report` and `compare` show something else than was computed"
            )
        if self.first_difference is None:
            earned = f"; the average return of iteration {self.iteration} is "
            return f"{about}: all {self.proved}" + (f"{earned}{number(self.returns[1])}" if self.returns else "")
        where = f"iteration {self.first_difference.iteration}, {stage_name(self.first_difference)}"
        far = ""
        if self.returns is not None:
            then, now = self.returns
            far = f"; the average return of iteration {self.iteration} is {now:.8g}, recorded {then:.8g}"
        false = f". Whatever the bits, the run is wrong {' and '.join(places)}" if places else ""
        if not self.differs:
            return (
                f"{about}: NOT identical from {where} on{far}. Versions and processor match the record, so this "
                f"is an error: of this machine, of the reference, or of Metaloom{false}"
            )
        return (
            f"{about}: not the same bits from {where} on, which are promised for the same versions and kind of "
            f"processor only{far}. Other than then: {'; '.join(self.differs)}{false}"
        )


def verify(
    path: Path, iteration: int | None, *, backend: Backend = Backend(workers=0), on_progress: Progress = unseen
) -> Verified:
    """Compute an iteration of a reference, or all, from the nearest stored learner; compare all outputs on the way."""
    run = storage.open_run(path)
    if iteration is None:
        # Files that computing it again does not read count too.
        for damage in storage.verify_run(path):
            raise damaged(path / damage.file, damage.problem)
    first, iteration = (0, max(len(run.iterations) - 1, 0)) if iteration is None else (None, iteration)
    require_iteration(run, iteration)
    if iteration not in run.iterations:
        raise UsageError(
            f"{run.location}: found iteration {iteration} under way; required one that is complete, of which there are "
            f"{len(run.iterations)}: what was not computed cannot be compared"
        )
    tables, outcomes = TableCheck(run), list[StageReplay]()
    metrics: Mapping[str, float] = {}
    false_tables: dict[str, None] = {}
    for outcome, value in replay_from_learner(path, iteration, first=first, backend=backend):
        outcomes.append(outcome)
        metrics = value.metrics if isinstance(value, Update) else metrics
        on_progress(outcome.ref.iteration, iteration)
        false_tables |= dict.fromkeys(tables.see(outcome.ref, value, identical=outcome.identical))
    assert outcomes, f"iteration {iteration} has no stage"
    start, different = outcomes[0].ref.iteration, next((each for each in outcomes if not each.identical), None)
    recorded, now = adaptation_returns(run[iteration].metrics()), adaptation_returns(metrics)
    return Verified(
        name=run.name,
        iteration=iteration,
        start=start,
        stages=len(outcomes),
        proved=outcomes[-1].proved,
        first_difference=different.ref if different else None,
        differs=different.changed if different else (),
        returns=(recorded[-1], now[-1]) if recorded and now else None,
        false_tables=tuple(false_tables),
        false_facts=tuple(false_facts(run)),
        false_records=tuple(false_records(run, range(start, iteration + 1))),
        arithmetic=arithmetic_of(run, range(start, iteration + 1)),
    )
