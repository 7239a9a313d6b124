"""Training of new runs, and resuming of stored ones; `flows/graph/loop.py` has the loop."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, ParamSpec

from metaloom import storage
from metaloom.flows.estimate import check_sizes
from metaloom.flows.formatting import plural
from metaloom.flows.graph.changes import warn_changed_sources
from metaloom.flows.graph.loop import StageCall, Training, TrainResult, direct, run_iterations
from metaloom.flows.graph.recomputed import require_resumable
from metaloom.flows.graph.rehearsal import rehearse
from metaloom.flows.graph.run_stages import changed_since, config_of, stages_of, stages_of_run
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import table_of
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.observer import Observer
from metaloom.flows.rollouts.workers import Backend, code_digest
from metaloom.flows.run_log import kept_log
from metaloom.flows.trust import require_trust, trust_run
from metaloom.flows.usage import kept_usage
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import plugin_sources
from metaloom.pipeline.envs.answers import declared_facts, described_facts
from metaloom.pipeline.envs.facts import component_facts, env_facts
from metaloom.pipeline.envs.registry import with_all_options
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.estimation.diagnostics import names_of_metrics
from metaloom.pipeline.nn.device import arithmetic_facts, device_facts
from metaloom.pipeline.nn.spec import is_image
from metaloom.pipeline.numerics import unusual_numerics
from metaloom.pipeline.policies.build import check_std
from metaloom.pipeline.types import Samples
from metaloom.storage import Retention

log: logging.Logger = logging.getLogger(__name__)
P = ParamSpec("P")


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
                return (yield from run_iterations(config, stages.order, lambda ref: stages, writer, call, watching))


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
                    result = yield from run_iterations(config, stages.order, stages.of, writer, call, watching)
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
