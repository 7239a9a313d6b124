"""Reading stored outputs, with thinned ones recomputed."""

from typing import Any

from metaloom import storage
from metaloom.flows.graph.changes import machine_changes
from metaloom.flows.graph.faults import first_differing, run_checked
from metaloom.flows.graph.run_stages import RunStages
from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.stages.faults import StageFault
from metaloom.storage import Run, StageRef
from metaloom.storage.format.codec import Value, array_digests
from metaloom.storage.keep.thinner import changed_versions, require_same


class Recomputed:
    """Outputs of a run. Thinned ones are recomputed and must match their digests, but are not stored."""

    def __init__(self, run: Run, stages: RunStages) -> None:
        self._run = run
        self._stages = stages
        self._values: dict[StageRef, Value] = {}

    def load(self, ref: StageRef) -> Any:
        if ref in self._values:
            return self._values[ref]
        try:
            return self._run.load(ref)
        except storage.StageThinned:
            # Recompute the learners in order, since each needs the previous one.
            first = ref.iteration
            while (start := self._run.learner_ref(first)) not in self._values and self._run.is_thinned(start):
                first -= 1
            for i in range(first + 1, ref.iteration + 1):
                self.load(self._run.learner_ref(i))
            value = self._stages.of(ref).compute(ref, self)
        require_same(self._run.record(ref), value, changed=lambda: self.changes(ref))
        self.remember(ref, value)
        return value

    def lengths(self, ref: StageRef) -> Array:
        try:
            return self._run.lengths(ref)
        except storage.StageThinned:
            return self.load(ref).lengths

    def experience(self, ref: StageRef) -> EpisodeBatch:
        try:
            return self._run.experience(ref)
        except storage.StageThinned:
            return self.load(ref)

    def changes(self, ref: StageRef) -> list[str]:
        """Return the changes in plug-in sources and in the machine since an output was computed."""
        return [*self._stages.changes(ref), *machine_changes(self._run, ref)]

    def remember(self, ref: StageRef, value: Value) -> None:
        """Cache a recomputed output; drop outputs of other iterations, except the learner that this one starts from."""
        start = self._run.learner_ref(ref.iteration)
        self._values = {
            known: v for known, v in self._values.items() if known.iteration == ref.iteration or known == start
        }
        self._values[ref] = value


def require_resumable(run: Run, stages: RunStages) -> None:
    """Raise StageFault if plug-ins recompute the newest iteration differently although no source has changed.

    Such plug-ins keep state outside their outputs, which was lost when their process ended. Outputs whose inputs cannot
    be read are not compared.
    """
    for ref in (ref for i in run.iterations[-1:] for ref in stages.order(i) if run.contains(ref)):
        record = run.record(ref)
        if any((*changed_versions(record), *stages.changes(ref), *machine_changes(run, ref))):
            return
        if run.config_of(ref) != run.config or not (runner := stages.of(ref)).own or runner.config.device != "cpu":
            return
        if runner.graph[ref.stage].samples:
            continue
        try:
            # A witness reruns the environment and reports differences itself.
            inputs = runner.load_inputs(ref, run, witness=False)
        except storage.StoreError:
            continue
        if name := first_differing(record.arrays, array_digests(run_checked(runner, ref, inputs))):
            where = f"{run.location}: {ref.where}"
            raise StageFault(
                f"{where}: the output, recomputed to resume the run, differs from the stored one, first in {name}, "
                f"although no source has changed. Check {', '.join(runner.own)}: state kept in a "
                "learner, a class or a module is lost in a new process; keep it in LearnerState.extra. hash() of "
                "strings and the order of sets also differ between processes; use sorted()"
            )
    stages.renew_learners()


def nearest_learner(run: Run, iteration: int) -> int:
    """Return the last iteration up to `iteration` whose initial learner is stored."""
    while run.is_thinned(run.learner_ref(iteration)):
        iteration -= 1
    return iteration
