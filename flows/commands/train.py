"""The training loop of new and resumed runs, from the first missing stage to the last."""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, cast

import numpy as np

from metaloom import storage
from metaloom.flows.estimate import check_sizes
from metaloom.flows.formatting import plural
from metaloom.flows.graph.changes import warn_changed_sources
from metaloom.flows.graph.faults import explained, require_sound, run_checked
from metaloom.flows.graph.recomputed import require_resumable
from metaloom.flows.graph.rehearsal import rehearse
from metaloom.flows.graph.run_stages import changed_since, config_of, stages_of, stages_of_run
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import table_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.interrupt import StageAbandoned, abandonable
from metaloom.flows.observer import IterationReport as IterationReport
from metaloom.flows.observer import Observer as Observer
from metaloom.flows.observer import mean_test_returns
from metaloom.flows.rollouts.workers import Backend, code_digest
from metaloom.flows.run_log import kept_log
from metaloom.flows.trust import require_trust, trust_run
from metaloom.flows.usage import kept_usage
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import plugin_sources
from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.answers import declared_facts, described_facts
from metaloom.pipeline.envs.config import gymnasium_limit
from metaloom.pipeline.envs.facts import component_facts, env_facts
from metaloom.pipeline.envs.registry import with_all_options
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.estimation.diagnostics import names_of_metrics
from metaloom.pipeline.estimation.statistics import ClassReturns
from metaloom.pipeline.nn.device import arithmetic_facts, device_facts
from metaloom.pipeline.nn.spec import is_image
from metaloom.pipeline.numerics import unusual_numerics
from metaloom.pipeline.policies.build import check_std
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, Metrics, Samples, TaskBatch, Update
from metaloom.storage import Retention, RunWriter, StageRef

log: logging.Logger = logging.getLogger(__name__)
P = ParamSpec("P")

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


def direct(ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
    """Run a stage in this process, without an orchestrator."""
    return compute()


Training = Generator[IterationReport, None, TrainResult]
"""Generator that trains a run, yields after each iteration, and returns the result."""


def training(
    config: RunConfig,
    path: Path,
    *,
    backend: Backend = Backend(),
    call: StageCall = direct,
    observer: Observer = Observer(),
) -> Training:
    """Train a new run in `path`, pausing after each iteration."""
    # Check folder, environment and workers before creating anything on disk.
    storage.check_new_run(path)
    config = pinned(config, step_timeout_seconds=backend.step_timeout_seconds)
    kept_config = recorded(config)
    with kept_log() as kept, stages_of(config, backend, partial(check_sizes, config)) as stages:
        stages.try_learner()
        _check_metrics(stages)
        _check_baselines(stages)
        if config.algorithm.trial is not None:
            # Other policies are checked when built. Runs of earlier versions must still resume.
            check_std(config.policy, stages.setup)
        rehearse(stages, observer.should_stop)
        with storage.create_run(
            path,
            config=kept_config.model_dump(mode="json"),
            config_digest=kept_config.digest(),
            capacity=config.iterations,
            environment=environment(stages),
            retention=Retention(**config.retention.model_dump()),
            stages=table_of(stages.graph),
        ) as writer:
            trust_run(writer.run)
            with (
                kept.of(writer, backend.for_tasks(config.num_tasks)),
                kept_usage(writer.run, config.iterations, kept.observing(observer, writer)) as watching,
            ):
                return (yield from _train(config, stages.order, lambda ref: stages, writer, call, watching))


def resuming(
    path: Path,
    *,
    iterations: int | None = None,
    take_over: bool = False,
    repair: bool = False,
    retention: Sequence[str] = (),
    backend: Backend = Backend(),
    call: StageCall = direct,
    observer: Observer = Observer(),
) -> Training:
    """Train a stored run from its first missing stage, pausing after each iteration."""
    with kept_log() as kept:
        repaired: Sequence[str] = ()
        if repair:
            with suppress(storage.DamagedRun, storage.NotARun):  # if unreadable, trust is checked after the repair
                require_trust(storage.open_run(path))
            # Repair first, since that may make the run readable.
            with storage.open_writer(path, take_over=take_over, repair=True) as writer:
                repaired = writer.repaired
        run = storage.open_run(path)
        for assignment in retention:
            if assignment.partition(".")[0] != "retention":
                raise ConfigError(
                    f"--set {assignment}: a stored run's settings cannot change, except retention.*; "
                    "`metaloom fork RUN --run NEW --set ...` continues it with changed settings"
                )
        config = build_config(override(config_of(run).model_dump(mode="json"), retention))
        if iterations is not None:
            if iterations < (stored := len(run.iterations)):
                raise ConfigError(
                    f"{run.path}: --iterations is {iterations}, but {stored} are already stored; use at least that many"
                )
            config = build_config({**config.model_dump(), "iterations": iterations})
        # Lock first: reject a run that another process is writing before workers start.
        with (
            storage.open_writer(
                path, capacity=config.iterations, take_over=take_over, retention=_retention_for(run, config)
            ) as writer,
            kept.of(writer, backend.for_tasks(config.num_tasks)),
            stages_of_run(run, backend, config, partial(check_sizes, config)) as stages,
        ):
            # Start workers before the first stage.
            facts = environment(stages.own())
            if refs := run.refs():
                warn_changed_sources(run, refs[-1], facts.get("plugins", {}))
            else:  # it was stopped during its rehearsal
                rehearse(stages.own(), observer.should_stop)
            writer.describe(facts)
            require_resumable(run, stages)
            with kept_usage(writer.run, config.iterations, kept.observing(observer, writer)) as watching:
                try:
                    result = yield from _train(config, stages.order, stages.of, writer, call, watching)
                except storage.StageThinned as error:
                    raise storage.StageThinned(
                        path,
                        found=f"an output of a thinned iteration is lost and its inputs are not stored ({error.found})",
                        required="all inputs of that output",
                        action=f"`metaloom resume {storage.argument(path)} --repair` recomputes the whole iteration",
                    ) from error
    damage = storage.verify_run(path) if repair and not result.stopped else None
    return replace(result, repaired=repaired, damage=damage)


def _to_the_end(begin: Callable[P, Training]) -> Callable[P, TrainResult]:
    """Return a function that runs the generator to its end and returns the generator's result."""

    @wraps(begin)
    def train(*args: P.args, **kwargs: P.kwargs) -> TrainResult:
        iterations = begin(*args, **kwargs)
        while True:
            try:
                next(iterations)
            except StopIteration as end:
                return end.value

    return train


train: Final = _to_the_end(training)
resume: Final = _to_the_end(resuming)


def _check_baselines(stages: Runner) -> None:
    """Raise ConfigError for a linear feature baseline on images: it would fit thousands of columns, clipped at 10."""
    config, spaces = stages.config, spaces_of(stages.env)
    processed = any(stage.output is Samples for stage in stages.graph.stages)
    if not processed or not is_image(spaces.observation_shape, spaces.observation_scale):
        return
    baselines = {"baseline": config.baseline, "processing.return_baseline": config.processing.return_baseline}
    for setting, baseline in baselines.items():
        if baseline is not None and baseline.name == "linear_feature":
            raise ConfigError(
                f"{setting} is linear_feature, but observations are images of shape {spaces.observation_shape}. It "
                f"would clip their {spaces.observation_size:,} bytes at 10, square them and refit for each task. Use "
                f"{setting}=linear_time, which uses only time, {setting}=value_network, or a custom baseline"
            )


def _check_metrics(stages: Runner) -> None:
    """Raise ConfigError for metrics with reserved names, or a stopping criterion on a metric that does not exist."""
    config, env, stop = stages.config, stages.env, stages.config.stop
    if config.metrics or (stop is not None and stop.metric is not None):
        processed = any(stage.output is Samples for stage in stages.graph.stages)
        facts = {fact.name: fact.kind == "flag" for fact in declared_facts(env)}
        names = names_of_metrics(stages.measures, spaces_of(env), facts, processed=processed)
        if stop is not None and names is not None:
            stop.require_metric(names)


def recorded(config: RunConfig) -> RunConfig:
    """Return a configuration with all defaults written out, as stored in the run."""
    return config.model_copy(update={"env": with_all_options(config.env)})


def _retention_for(run: storage.Run, config: RunConfig) -> Retention:
    """Return the configured retention, extended to keep iterations whose plug-ins have changed since."""
    retention = Retention(**config.retention.model_dump())
    if not retention.thins:
        return retention
    changed = changed_since(run, (ref for ref in run.thinnable(run.iterations) if not run.is_thinned(ref)))
    for change, iterations in changed.items():
        log.warning(
            "%s: %s; %s computed with it, starting at %d, will not be thinned: they could not be recomputed",
            run.location,
            change,
            plural(len(iterations), "iteration"),
            min(iterations),
        )
    return replace(retention, kept=frozenset[int]().union(*changed.values()))


def environment(stages: Runner) -> dict[str, Any]:
    """Return what affects results besides the configuration: code, plug-ins, arithmetic, device and environment."""
    config, env = stages.config, stages.env
    facts: dict[str, Any] = {
        "arithmetic": arithmetic_facts(),
        "code": code_digest(),
        "env": env_facts(config.env, env),
        "kernel": asdict(stages.learner.kernel),
        "numerics": unusual_numerics(),
        "components": component_facts(env),
        "facts": described_facts(env),
        "task_classes": env.task_classes and env.task_classes.facts(),
        "plugins": plugin_sources(config),
        "device": device_facts(config.device),
    }
    return {name: found for name, found in facts.items() if found}


def _train(
    config: RunConfig,
    order: Callable[[int], list[StageRef]],
    stages_for: Callable[[StageRef], Runner],
    writer: RunWriter,
    call: StageCall,
    observer: Observer,
) -> Training:
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
