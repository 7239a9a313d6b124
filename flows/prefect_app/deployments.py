"""Prefect flows `meta-train`, `meta-train-custom`, `replay` and `evaluate`.

Prefect only displays state. Outputs are in the run's store, and a restarted flow run continues at the first missing
stage.

This module must not import annotations from __future__, because Prefect builds a deployment's form from the annotation
objects.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from types import FrameType
from typing import Annotated, Any, cast
from uuid import UUID

from prefect import Flow, Task, flow, get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from metaloom import storage
from metaloom.flows.commands.train import recorded, resume, train
from metaloom.flows.formatting import plural
from metaloom.flows.graph.loop import StageCall
from metaloom.flows.graph.run_stages import config_of
from metaloom.flows.graph.tables import stage_names
from metaloom.flows.graph.warm_start import as_pinned
from metaloom.flows.loggers import MODULES
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.observer import Observer
from metaloom.flows.operations import operations
from metaloom.flows.prefect_app.artifacts import TrainingPage, publish_evaluation, publish_replay
from metaloom.flows.prefect_app.flow_runs import STAGE_SECONDS
from metaloom.flows.prefect_app.generated import QUIET, make_flow
from metaloom.flows.recipes import RECIPES, load_settings
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.flows.results.replay import Replay
from metaloom.flows.rollouts.backend import DEFAULT_RETRIES, DEFAULT_STEP_TIMEOUT_SECONDS, DEFAULT_WORKERS, Backend
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.runs import RunAt, run_folder
from metaloom.flows.streams import quiet
from metaloom.flows.trust import names_in, names_of_run, trust_run
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.storage import StageRef
from metaloom.storage.format.settings import changed

# The form's defaults train a small run that shows adaptation. For an existing run, they mean "as stored".
DEFAULT_RECIPE, DEFAULT_SEED = "first-steps", 1

RecipeName = Annotated[str, Field(json_schema_extra={"enum": [*RECIPES]})]
StageName = Annotated[str, Field(json_schema_extra={"enum": [*stage_names()]})]
Natural = Annotated[int, Field(ge=0)]
Loggers = list[Annotated[str, Field(pattern=f"^({'|'.join(MODULES)})$|:")]]
Seconds = Annotated[float, Field(gt=0)]


@contextmanager
def finishing_the_stage() -> Iterator[tuple[Event, Any]]:
    """Within the block, intercept SIGTERM from Prefect; yield an event that the signal sets, and Prefect's own handler.

    If the current stage then takes too long, the signal is passed to Prefect's handler, which aborts the stage.
    """
    asked, is_late, before = Event(), Event(), signal.getsignal(signal.SIGTERM)
    if current_thread() is not main_thread():  # a flow called from a thread; its caller handles signals
        yield asked, before
        return

    def heard(number: int, frame: FrameType | None) -> None:
        if is_late.is_set():
            cast(Any, before)(number, frame)
        elif not asked.is_set():
            asked.set()
            timer.start()

    def break_off() -> None:
        is_late.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = Timer(STAGE_SECONDS, break_off)
    timer.daemon = True
    signal.signal(signal.SIGTERM, heard)
    try:
        yield asked, before
    finally:
        timer.cancel()
        # After a request, keep Prefect's handler off: it would treat a second signal as a crash.
        if not asked.is_set():
            signal.signal(signal.SIGTERM, before)


def _ended(break_off: Any, done: str) -> State:
    """Return the state of a flow run that has stopped after a stage because it was cancelled.

    If the flow run was not cancelled, for example because its worker or the machine shuts down, the signal is passed to
    Prefect. The flow run then becomes Crashed and continues elsewhere.
    """
    state = None
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run.get_id())).state
    except Exception:  # a cancelled flow run is not restarted
        get_run_logger().warning("Prefect's server does not report whether this flow run is cancelled")
    if state is None or not (state.is_cancelling() or state.is_cancelled()):
        break_off(signal.SIGTERM, None)
    return Cancelled(message=f"cancelled after {done}")


def run_name() -> str:
    """Return the name of the run that the current flow run trains; it is also the name of the flow run.

    The default name contains the flow run's id, so that a retry finds the same run.
    """
    parameters = flow_run.get_parameters()
    if parameters.get("run"):
        return str(parameters["run"])
    what = "config" if parameters.get("config") else parameters.get("recipe") or DEFAULT_RECIPE
    return f"{what}-{str(flow_run.get_id())[:8]}"


@flow(name="meta-train", flow_run_name=run_name)
def meta_train(
    recipe: RecipeName = DEFAULT_RECIPE,
    iterations: Natural = 0,
    seed: Natural = DEFAULT_SEED,
    run: str = "",
    workers: Natural = DEFAULT_WORKERS,
    scheduler: str = "",
    log: Loggers = [],  # noqa: B006  each run gets its own copy of the form's defaults
    trust: bool = False,
    overrides: list[str] = [],  # noqa: B006
) -> State:
    """Meta-train a policy with a named recipe, or continue an existing run.

    Args:
        recipe: Recipe, usually with the settings of a paper; first-steps takes a minute. An existing run keeps its own.
        iterations: Number of meta-updates; 0 uses the number in the recipe or in the existing run. A larger number
            extends an existing run.
        seed: Random seed. An existing run keeps its own.
        run: Name in the runs folder, or a path; if empty, derived from the recipe and the flow run. An existing run
            continues where it stopped.
        workers: Number of Dask worker processes for rollouts on this machine; 0 samples in the flow's own process, as a
            run with one task always does.
        scheduler: Address of a running Dask scheduler, tcp://host:port, used instead of starting workers.
        log: Additional loggers: tensorboard, wandb (offline) or mlflow, each of which needs Metaloom's extra of that
            name; or module:function, called after each iteration.
        trust: Import the modules named in an existing run's settings, now and later.
        overrides: Other settings to change, as KEY=VALUE, for example algorithm.inner_lr=0.05.
    """
    asked = RunRequest(
        recipe=None if recipe == DEFAULT_RECIPE else recipe,
        seed=None if seed == DEFAULT_SEED else seed,
        iterations=iterations or None,
        overrides=tuple(overrides),
    )
    return _train(asked, run, backend_of(workers, scheduler), log, trust=trust)


@flow(name="meta-train-custom", flow_run_name=run_name)
def meta_train_custom(
    config: RunConfig,
    run: str = "",
    workers: Natural = DEFAULT_WORKERS,
    scheduler: str = "",
    step_timeout: Seconds = DEFAULT_STEP_TIMEOUT_SECONDS,
    retries: Natural = DEFAULT_RETRIES,
    log: Loggers = [],  # noqa: B006
    film_every: Natural = 0,
    trust: bool = False,
) -> State:
    """Meta-train a policy with custom settings, or continue an existing run with the same settings.

    Args:
        config: All settings. An omitted setting has its default value.
        run: Name in the runs folder, or a path; if empty, derived from the flow run. An existing run continues where it
            stopped.
        workers: Number of Dask worker processes for rollouts on this machine; 0 samples in the flow's own process, as a
            run with one task always does.
        scheduler: Address of a running Dask scheduler, tcp://host:port, used instead of starting workers.
        step_timeout: Timeout in seconds for a single environment call.
        retries: Maximum number of retries for work whose worker process died.
        log: Additional loggers: tensorboard, wandb (offline) or mlflow, each of which needs Metaloom's extra of that
            name; or module:function, called after each iteration.
        film_every: Log a video of every N-th iteration; 0 for only the last.
        trust: Import the modules named in an existing run's settings, now and later.
    """
    backend = backend_of(workers, scheduler, step_timeout, retries)
    return _train(RunRequest(config=config), run, backend, log, film_every=film_every or None, trust=trust)


@dataclass(frozen=True)
class RunRequest:
    """Settings requested by a flow run; None stands for the value in the recipe or the stored run."""

    recipe: str | None = None
    config: RunConfig | None = None
    seed: int | None = None
    iterations: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def named(self) -> Mapping[str, Any]:
        """Requested settings; the user trusts all modules that they name."""
        if self.config is not None:
            return self.config.model_dump(mode="json")
        return override(load_settings(self.recipe) if self.recipe else {}, self.overrides)


def backend_of(
    workers: int, scheduler: str, step_timeout: float = DEFAULT_STEP_TIMEOUT_SECONDS, retries: int = DEFAULT_RETRIES
) -> Backend:
    """Return the rollout backend, which uses the scheduler if one is given.

    Values equal to the form's defaults count as unset. A single-task run can then collect episodes in this process,
    and `workers=0` is not rejected for a timeout or retries that the user never set.
    """
    return Backend(
        workers=None if scheduler or workers == DEFAULT_WORKERS else workers,
        scheduler=scheduler or None,
        step_timeout_seconds=None if step_timeout == DEFAULT_STEP_TIMEOUT_SECONDS else step_timeout,
        retries=None if retries == DEFAULT_RETRIES else retries,
    )


def _train(
    asked: RunRequest, run: str, backend: Backend, loggers: Sequence[str], *, film_every: int | None = None, trust: bool
) -> State:
    folder = run_folder(run or run_name())
    exists = storage.run_exists(folder)
    stored = stored_config(storage.open_run(folder), asked.named, trust=trust) if exists else None
    settings = settings_for(folder, stored, asked)
    page = TrainingPage(folder)
    page.open(partial(_tag_flow_run, settings))
    with quiet(*QUIET), finishing_the_stage() as (asked_to_end, break_off):
        shown = Observer(iteration_done=page.iteration_done, should_stop=asked_to_end.is_set)
        with logging_to(loggers, folder, shown, film_every=film_every) as observer:
            how: dict[str, Any] = {"backend": backend, "call": stage_tasks(), "observer": observer}
            if stored is None:
                result = train(settings, folder, **how)
            else:
                result = resume(folder, iterations=settings.iterations, **how)
    # Only after the block, which cancels the stage's deadline, since Prefect may take longer to answer.
    if result.stopped and asked_to_end.is_set():
        return _ended(break_off, plural(result.iterations_done, "iteration"))
    page.close()
    if result.stopped:
        return Cancelled(message=f"stopped by `metaloom cancel` after {plural(result.iterations_done, 'iteration')}")
    return Completed(message=f"{plural(result.iterations_done, 'iteration')} in {result.path}")


def _replayed(run: str, outcomes: Replay) -> State:
    folder = RunAt.parse(run).path
    publish_replay(folder, outcomes)
    if not outcomes.identical:
        different = sum(not outcome.identical for outcome in outcomes)
        return Failed(message=f"{different} of {len(outcomes)} stages differ from what is stored in {folder}")
    return Completed(message=f"{plural(len(outcomes), 'stage')} replayed: all {outcomes[-1].proved}")


replay: Flow[..., Any] = make_flow(operations()["replay"], _replayed, stage=StageName | None)


def _evaluated(run: str, outcome: EvaluationOutcome) -> State:
    publish_evaluation(RunAt.parse(run, learner=True).path, outcome)
    return Completed(message=f"{plural(len(outcome.tasks), 'task')}, learner after {plural(outcome.updates, 'update')}")


evaluate: Flow[..., Any] = make_flow(operations()["evaluate"], _evaluated)


def stage_tasks() -> StageCall:
    """Return a function that runs each stage as a Prefect task, linked to the tasks that computed its inputs."""
    # Prefect finds task results by object identity. Keep all of them, since another object could get the same address.
    done: dict[StageRef, object] = {}

    def call(ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
        # Inputs that another flow run stored have no task here.
        upstream = [done[i] for i in inputs if i in done]
        done[ref] = _stage_task(ref.stage)(f"{ref.stage} i={ref.iteration} k={ref.step}", upstream, compute)
        return ref

    return call


def stored_config(run: storage.Run, parameters: Mapping[str, Any], *, trust: bool) -> RunConfig:
    """Return the configuration of a run that is about to continue, and trust the modules that it names if allowed.

    Modules are trusted if `trust` is True or if the flow run's `parameters` name them too, so that a retry on another
    machine can continue the run.
    """
    if trust or {*names_of_run(run)} <= {*names_in(parameters)}:
        trust_run(run)
    return config_of(run)


def settings_for(folder: Path, stored: RunConfig | None, asked: RunRequest) -> RunConfig:
    """Return the configuration to train with; raise ConfigError if it changes any stored setting but `iterations`."""
    config = asked.config
    if config is None:
        named = asked.recipe is not None or stored is None
        config = build_config(load_settings(asked.recipe or DEFAULT_RECIPE)) if named else stored
    assert config is not None
    env = config.env if stored is None else config.env.as_in(stored.env.model_dump())
    config = config.model_copy(update={"env": settled(env, config.max_episode_steps).config})
    changes = {"seed": asked.seed, "iterations": asked.iterations}
    changed_settings = {**config.model_dump(mode="json"), **{name: n for name, n in changes.items() if n is not None}}
    wanted = build_config(override(changed_settings, asked.overrides))
    if stored is None:
        return wanted
    # A stored run lists all environment options explicitly and has a pinned warm start.
    stored, wanted = recorded(stored), recorded(as_pinned(wanted, stored))
    before, after = (c.model_dump(mode="json", exclude={"iterations"}) for c in (stored, wanted))
    if not (differing := changed(before, after).items()):
        return wanted
    told = (f"{name} is {was!r} in the stored run, but {now!r} was requested" for name, (was, now) in differing)
    raise ConfigError(
        f"{folder} was trained with other settings: {'; '.join(told)}. Choose another name for a new run, or keep the "
        "form's default recipe and seed to continue this one"
    )


@cache
def _stage_task(stage: str) -> Task[..., object]:
    # The store already caches and keeps results; doing so in Prefect as well costs time.
    @task(name=stage, task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
    def execute(name: str, inputs: list[object], compute: Callable[[], StageRef]) -> object:
        del name, inputs  # only Prefect uses them, for the task run's name and links
        compute()
        return object()

    return execute


def _tag_flow_run(config: RunConfig) -> None:
    tags = dict.fromkeys([*flow_run.get_tags(), config.env.name, config.algorithm.name])
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.get_id()), tags=[*tags])
