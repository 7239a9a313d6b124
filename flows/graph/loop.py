"""The training loop: runs an iteration's stages in order and skips those whose outputs are stored."""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from metaloom import storage
from metaloom.flows.formatting import plural
from metaloom.flows.graph.faults import explained, require_sound, run_checked
from metaloom.flows.graph.runner import Runner
from metaloom.flows.interrupt import StageAbandoned, abandonable
from metaloom.flows.observer import IterationReport, Observer, mean_test_returns
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.config import gymnasium_limit
from metaloom.pipeline.estimation.statistics import ClassReturns
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, Metrics, TaskBatch, Update
from metaloom.storage import RunWriter, StageRef

log: logging.Logger = logging.getLogger(__name__)

StageCall = Callable[[StageRef, Sequence[StageRef], Callable[[], StageRef]], StageRef]
"""Function that runs a stage, given its inputs and its computation. With Prefect, it runs the stage as a task."""


@dataclass(frozen=True)
class TrainResult:
    """State of a run after training."""

    path: Path
    iterations_done: int
    stopped: bool  # True if a request stopped it before its last iteration
    computed: int = 0  # number of outputs computed and stored
    repaired: Sequence[str] = ()  # one line for each damaged file that was repaired before training
    damage: Sequence[storage.Damage] | None = None  # damage left after a repair; None without repair, or if stopped
    enough: Sequence[str] = ()  # `stop` criteria that ended it before its last iteration


Training = Generator[IterationReport, None, TrainResult]
"""Generator that trains a run, yields after each iteration, and returns the result."""


def direct(ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
    """Run a stage in this process, without an orchestrator."""
    return compute()


def run_iterations(
    config: RunConfig,
    order: Callable[[int], list[StageRef]],
    stages_for: Callable[[StageRef], Runner],
    writer: RunWriter,
    call: StageCall,
    observer: Observer,
) -> Training:
    """Run the missing stages of all iterations in order, pausing after each iteration; skip stored outputs."""
    path, iterations, stop = writer.run.path, config.iterations, config.stop
    for line in (*config.algorithm.warnings(), *_idle_iterations(config, writer.run)):
        log.warning("%s", line)
    history, warned = list[Metrics](), set[str]()
    began, computed = time.perf_counter(), 0
    for iteration in range(iterations):
        if stop is not None and (reasons := stop.reasons(history)):
            return TrainResult(path, iteration, stopped=False, computed=computed, enough=reasons)
        if stop is None and writer.is_whole(iteration):
            continue
        # Check all iterations, since lost outputs are recomputed.
        missing = [ref for ref in order(iteration) if not writer.contains(ref)]
        if not missing:
            if stop is not None:
                history.append(_update(writer, iteration).metrics)
            continue
        seconds: dict[str, float] = {}
        steps, evaluations, returns, by_class = 0, list[StageRef](), list[Array](), list[ClassReturns]()
        iteration_began = time.perf_counter()
        for ref in missing:
            if observer.should_stop():
                return TrainResult(path, iteration, stopped=True, computed=computed)
            observer.stage_started(ref)
            stages = stages_for(ref)
            if stages.graph[ref.stage].ends_iteration:
                # Read now, since a complete iteration may be thinned at any time.
                returns, by_class = _returns_of_tasks(stages, writer, iteration)
            try:
                call(ref, stages.upstream(ref), partial(run_once, stages, writer, ref, seconds))
            except StageAbandoned:
                log.warning("iteration %d, %s k=%d: abandoned in order to stop in time", iteration, ref.stage, ref.step)
                return TrainResult(path, iteration, stopped=True, computed=computed)
            computed += 1
            # Read now, while it is in memory; a complete iteration may be thinned at any time.
            stage = stages.graph[ref.stage]
            if stage.samples and stage.output is EpisodeBatch:
                steps += cast(EpisodeBatch, writer.load(ref)).num_steps
            elif stage.output is Evaluation:
                evaluations.append(ref)
        if iteration == 0:
            _check_limit(config, (writer.load(ref) for ref in order(0)))
        update = _update(writer, iteration)
        history.append(update.metrics)
        # Averages of facts may be missing.
        facts = {f"average_{fact.name}" for fact in declared_facts(stages_for(missing[-1]).env)}
        for name, value in update.metrics.items():
            if math.isfinite(value) or name in warned or name.partition(".")[2] in facts:
                continue
            # No output depends on a metric, so training continues; a `stop` criterion on it counts as not met.
            log.warning("metrics: %s is %s, not a finite number; it is stored unchanged", name, value)
            warned.add(name)
        now, evaluating = time.perf_counter(), sum(seconds.get(f"{ref.stage}.{ref.step}", 0.0) for ref in evaluations)
        report = IterationReport(
            iteration=iteration,
            iterations=iterations,
            metrics=update.metrics,
            stage_seconds=seconds,
            elapsed_seconds=now - began,
            steps_per_second=steps / (now - iteration_began - evaluating) if steps else None,
            class_returns=by_class,
            task_returns=returns,
            evaluation_returns=mean_test_returns(writer.load(ref) for ref in evaluations),
            steps=steps,
            traffic=stages_for(missing[-1]).rollouts.traffic(),
        )
        if observer.reads:
            writer.flush()
        observer.iteration_done(report)
        yield report
    return TrainResult(path, iterations, stopped=False, computed=computed)


def run_once(stages: Runner, writer: RunWriter, ref: StageRef, seconds: dict[str, float]) -> StageRef:
    """Compute a stage and store its output, unless the output is already stored; return `ref`."""
    if not writer.contains(ref):
        started, began, position = time.time(), time.perf_counter(), stages.seed_position(ref)
        with explained(writer.run.path, ref, position), abandonable():
            value = run_checked(stages, ref, stages.load_inputs(ref, writer))
            took, start = time.perf_counter() - began, writer.run.learner_ref(ref.iteration)
            # Check the first two iterations under these settings, since a learner may first have state in the second.
            if ref.iteration <= 1 or writer.run.config_of(start) != writer.run.config_of(ref):
                require_sound(stages, ref, writer, value)
        seconds[f"{ref.stage}.{ref.step}"] = took
        writer.put(ref, value, inputs=stages.inputs(ref), seed_position=position, started=started, seconds=took)
    return ref


def _check_limit(config: RunConfig, outputs: Iterable[object]) -> None:
    """Warn if most episodes end at the default step limit, which neither the user nor gymnasium set."""
    name = config.env.name
    if "max_episode_steps" in config.model_fields_set or name in ENVS or gymnasium_limit(name) is not None:
        return
    lengths = np.concatenate([output.lengths.ravel() for output in outputs if isinstance(output, EpisodeBatch)])
    lengths = lengths[lengths > 0]
    at_limit = int((lengths == config.max_episode_steps).sum())
    if at_limit > len(lengths) / 2:
        log.warning(
            "%s: %d of %d episodes of iteration 0 ended at max_episode_steps=%d, the default; if the environment has a "
            "different time limit, or none, set it: --set max_episode_steps=N",
            name,
            at_limit,
            len(lengths),
            config.max_episode_steps,
        )


def _idle_iterations(config: RunConfig, run: storage.Run) -> Iterator[str]:
    """Yield a warning if the step sizes are zero in later iterations."""
    horizon, stored = getattr(config.algorithm, "lr_horizon", None), len(run.iterations)
    if horizon is None or config.iterations <= max(horizon, stored):
        return
    cure = f"algorithm.lr_horizon={config.iterations} lets all iterations learn"
    if stored:
        start = f"{run.location}@{min(stored, horizon)}"
        cure = f"`metaloom fork {start} --run NEW --set algorithm.lr_horizon={config.iterations}` lets them learn"
    first = max(horizon, stored)
    yield (
        f"algorithm.lr_horizon is {horizon}: step sizes are zero from iteration {horizon} on, so "
        f"nothing is learned in {config.iterations - first} of {plural(config.iterations, 'iteration')}; {cure}"
    )


def _update(writer: RunWriter, iteration: int) -> Update:
    update = writer.load(writer.run.last_ref(iteration))
    assert isinstance(update, Update)
    return update


def _returns_of_tasks(stages: Runner, writer: RunWriter, iteration: int) -> tuple[list[Array], list[ClassReturns]]:
    """Return the mean returns by task and by class for each inner step; empty if episodes were thinned."""
    classes, refs = stages.env.task_classes, stages.order(iteration)
    drawn = [ref for ref in refs if stages.graph[ref.stage].output is TaskBatch]
    rounds = [ref for ref in refs if ref.stage == writer.run.stages.named("rollouts")]
    if any(writer.run.is_thinned(ref) for ref in rounds if writer.run.contains(ref)):
        return [], []
    returns = [batch.mean_returns for batch in map(writer.load, rounds) if isinstance(batch, EpisodeBatch)]
    if classes is None or not drawn:
        return returns, []
    tasks = writer.load(drawn[0])
    assert isinstance(tasks, TaskBatch)
    of = classes.of(tasks.params, tasks.names)
    return returns, [classes.returns(values, of) for values in returns]
