"""Counterfactuals: stored stages recomputed with different settings, on the same batches.

Nothing is sampled or stored. Processing is recomputed, minibatches of off-policy runs are drawn again, and baselines
are refitted to the stored episodes, so the settings for all three affect the update.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.commands.replay import require_known
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.changes import warn_changed_sources
from metaloom.flows.graph.faults import run_checked
from metaloom.flows.graph.run_stages import config_of, require_stored_outputs, stages_of
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import graph_of
from metaloom.flows.results.counterfactual import Counterfactual, Outcome
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import learner_after
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import plugin_sources
from metaloom.pipeline.estimation.processing import baseline_parameters
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Params, Update
from metaloom.storage import Run, StageRef

CHANGEABLE = ("algorithm", "baseline", "processing", "seed")  # settings that do not affect which batches are sampled


def optimize(
    path: Path, iteration: int, settings: Iterable[str] = (), *, stage: str | None = None, step: int = 0
) -> Counterfactual:
    """Recompute a stage of a stored iteration with changed settings, without sampling; return the comparison."""
    return next(sweep(path, iteration, {}, settings, stage=stage, step=step))


def sweep(
    path: Path,
    iteration: int,
    grid: Mapping[str, Sequence[str]],
    settings: Iterable[str] = (),
    *,
    stage: str | None = None,
    step: int = 0,
) -> Iterator[Counterfactual]:
    """Yield the result of `optimize` for each combination of values in a grid; all settings are checked first."""
    run = storage.open_run(path)
    config = config_of(run, run.last_ref(iteration))
    settings, variants = tuple(settings), list[tuple[tuple[str, ...], RunConfig]]()
    for point in itertools.product(*grid.values()):
        words = (*settings, *(f"{key}={value}" for key, value in zip(grid, point, strict=True)))
        variants.append((words, changed_config(config, words)))
    with stages_of(config, Backend(workers=0)) as stages:
        require_stored_outputs(run, stages.graph)
        stage = stage or run.stages.last
        require_known(stages.order(iteration), stage, step)
        if stages.graph[stage].samples:
            raise UsageError(f"the stage {stage} samples; choose a --stage that does not sample")
        again = _Again(run, stages, StageRef(iteration, stage, step))
        for words, changed in variants:
            again.check(changed, words)
        if run.contains(again.ref):
            warn_changed_sources(run, again.ref, plugin_sources(config))
        stored = again.outcome(config, ())
        for words, changed in variants:
            yield Counterfactual(again.ref, stored, again.outcome(changed, words), again.start())


def changed_config(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return a run's configuration with changed settings; raise UsageError if they would affect its stored batches."""
    before = config.model_dump(mode="json")
    # The algorithm determines processing.name, so it must not be kept if the algorithm changes.
    kept = {**before, "processing": {name: v for name, v in before["processing"].items() if name != "name"}}
    names = [change.partition("=")[2] for change in settings if change.startswith("algorithm.name=")]
    if names and names[-1] != config.algorithm.name:
        kept["algorithm"] = {}
    after = build_config(override(kept, settings))
    if graph_of(after) is not graph_of(config):
        raise UsageError(
            f"algorithm.name={after.algorithm.name} must have the same stages as "
            f"the run's algorithm, {config.algorithm.name}. `metaloom train` collects new episodes"
        )
    changed = after.model_dump(mode="json")
    refused = [name for name in changed if name not in CHANGEABLE and changed[name] != before[name]]
    if after.algorithm.name == config.algorithm.name:
        of_episodes = config.algorithm.decides_episodes
        refused += [f"algorithm.{n}" for n in of_episodes if changed["algorithm"][n] != before["algorithm"][n]]
    if config.algorithm.trial is not None and after.processing.scale_rewards != config.processing.scale_rewards:
        refused.append("processing.scale_rewards")  # a policy with memory observes rewards
    if refused:
        raise UsageError(
            f"changes to {', '.join(refused)} affect sampling; only "
            f"{', '.join(CHANGEABLE)} can change without affecting stored batches. `metaloom train` collects new "
            "episodes"
        )
    return after


@dataclass(frozen=True)
class _Again:
    """A stored stage that is recomputed with different settings."""

    run: Run
    stages: Runner
    ref: StageRef

    def outcome(self, config: RunConfig, settings: tuple[str, ...]) -> Outcome:
        stages = self.stages.under(config)
        altered = _Altered(self.run, stages, self.ref.iteration)
        inputs = stages.load_inputs(self.ref, altered)
        began = time.perf_counter()
        value = run_checked(stages, self.ref, inputs)
        seconds = time.perf_counter() - began
        digest = storage.output_digest(storage.digest(value))
        identical = self.run.contains(self.ref) and digest == self.run.record(self.ref).digest
        return Outcome(settings, config, value, seconds, identical, {**altered.digests, self.ref: digest})

    def check(self, config: RunConfig, settings: tuple[str, ...]) -> None:
        """Raise UsageError if the settings need episodes or a learner that are not stored."""
        stages, asked = self.stages.under(config), " ".join(settings) or "the settings of the run"
        for ref in stages.upstream(self.ref):
            if stages.graph[ref.stage].samples and not self.run.contains(ref):
                if ref in self.stages.order(ref.iteration):
                    self.run.record(ref)  # raises StageMissing
                raise UsageError(
                    f"{asked}: {self.ref} reads the episodes of inner step {ref.step}, which are not stored; "
                    f"use at most {self.stages.config.algorithm.adaptation_steps} inner steps, as in the run"
                )
        if self.run.learner_ref(self.ref.iteration) in stages.inputs(self.ref):
            _fitted(learner_after(self.run, self.ref.iteration), _own_learner(stages), asked)

    def start(self) -> dict[str, Array]:
        """Return the parameters before the update; empty for a stage that does not end an iteration."""
        if not self.stages.graph[self.ref.stage].ends_iteration:
            return {}
        stored, seed = learner_after(self.run, self.ref.iteration), self.stages.config.seed
        return dict(self.stages.learner.at_start(stored, run_seed=seed).params)


class _Altered:
    """Outputs of an iteration under changed settings; sampled ones and other iterations' outputs are read as stored."""

    def __init__(self, run: Run, stages: Runner, iteration: int) -> None:
        self._run, self._stages, self._iteration = run, stages, iteration
        self._stored = stages.graph.sampled_from(stages.config, iteration)
        self._known: dict[StageRef, Any] = {}
        self.digests: dict[StageRef, str] = {}

    def load(self, ref: StageRef) -> Any:
        if ref in self._known:
            return self._known[ref]
        if ref.iteration == self._iteration and ref not in self._stored:
            value: Any = run_checked(self._stages, ref, self._stages.load_inputs(ref, self))
            self.digests[ref] = storage.output_digest(storage.digest(value))
        else:
            value = self._run.load(ref)
            if isinstance(value, Update):
                value = Update(_fitted(value.learner, _own_learner(self._stages), "this algorithm"), value.metrics)
        # The replay buffer caches the batches of other iterations itself.
        if ref.iteration == self._iteration or not self._stages.graph[ref.stage].samples:
            self._known[ref] = value
        return value

    def lengths(self, ref: StageRef) -> Array:
        return self._run.lengths(ref)

    def experience(self, ref: StageRef) -> EpisodeBatch:
        return self._run.experience(ref)


def _own_learner(stages: Runner) -> LearnerState:
    """Return a newly initialized learner, which has the array names and shapes that the algorithm requires."""
    value = stages.run(stages.graph.learner_ref(0), {})
    assert isinstance(value, Update)
    return value.learner


def _fitted(stored: LearnerState, wanted: LearnerState, asked: str) -> LearnerState:
    """Return the arrays of a stored learner that the algorithm needs; raise UsageError if any is missing."""
    parts = {}
    for name in ("params", "optimizer", "extra"):
        have, need = getattr(stored, name), getattr(wanted, name)
        for entry, value in need.items():
            if entry not in have or (have[entry].shape, have[entry].dtype) != (value.shape, value.dtype):
                found = f"{have[entry].dtype}{list(have[entry].shape)}" if entry in have else "nothing"
                raise UsageError(
                    f"{asked}: the stored learner has {found} under {name}.{entry}; the algorithm "
                    f"requires {value.dtype}{list(value.shape)}. Choose settings that are compatible with the "
                    "stored learner"
                )
        parts[name] = {entry: value for entry, value in have.items() if entry in need}
    return LearnerState(**parts)


def fitted_baselines(run: Run, iteration: int, step: int = 0) -> dict[str, Params]:
    """Return the per-task baseline parameters that `process_samples` fitted in an inner step, [B, ...] each.

    They are keyed by baseline, then by parameter name.

    Raises:
        UsageError: the run's algorithm has no baseline.
        storage.StoreError: the episodes are not stored, or were thinned.
    """
    ref = StageRef(iteration, "collect_rollouts", step)
    config, episodes = config_of(run, ref), run.load(ref)
    assert isinstance(episodes, EpisodeBatch)
    seed = seed_for(config.seed, "baseline", iteration, step)
    fitted = baseline_parameters(episodes, config.baseline.build(), config.processing, seed=seed)
    if not any(fitted.values()):
        raise UsageError(f"{run.path.name}: the run's baseline, {config.baseline.name}, has no parameters")
    return fitted
