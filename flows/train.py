"""Train a run from its first missing stage to its last: a fresh run and a resumed one are the same loop."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from threadpoolctl import threadpool_limits

import storage
from flows.on_policy import OnPolicyStages
from flows.run_info import planned_iterations
from flows.workers import Backend, code_digest, rollout_workers, usable_cores
from pipeline.config import ConfigError, RunConfig, build_config
from pipeline.envs import with_all_options
from pipeline.types import EpisodeBatch, Evaluation, Update
from storage import Run, RunWriter, StageRef


class StageCall(Protocol):
    """Runs one stage; Prefect's wraps it into a task named after the ref."""

    def __call__(self, ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
        """Call `compute` and return what it returns; `inputs` are the stages whose outputs it reads."""
        ...


@dataclass(frozen=True)
class IterationReport:
    """What just happened, for progress displays.

    Attributes:
        iteration: the iteration that was completed, counted from 0.
        iterations: how many the run will have.
        metrics: the iteration's metrics, as stored.
        stage_seconds: wall seconds by stage, for example collect_rollouts.1; empty stages were already stored.
        elapsed_seconds: wall seconds since this process began to train.
        steps_per_second: environment steps sampled for the iteration over the wall seconds since the one before; None
            when its rollouts were stored already.
        evaluation_returns: mean test return after every number of adaptation steps, if an evaluation was made now.
    """

    iteration: int
    iterations: int
    metrics: Mapping[str, float]
    stage_seconds: Mapping[str, float]
    elapsed_seconds: float
    steps_per_second: float | None
    evaluation_returns: Sequence[float] = ()


@dataclass(frozen=True)
class Observer:
    """What a caller is told while a run trains; the default listens to nothing and never stops it."""

    stage_started: Callable[[StageRef], None] = lambda ref: None
    iteration_done: Callable[[IterationReport], None] = lambda report: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands after training: `stopped` tells that it was asked to stop before its last iteration."""

    path: Path
    iterations_done: int
    stopped: bool


def direct(ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
    """Run a stage in this process, without an orchestrator."""
    del ref, inputs
    return compute()


def train(
    config: RunConfig,
    path: Path,
    *,
    backend: Backend = Backend(),
    call: StageCall = direct,
    observer: Observer = Observer(),
) -> TrainResult:
    """Train a new run that is kept at `path`.

    Raises:
        storage.RunExists: something is already stored there.
    """
    # Folder, environment and workers first: what is wrong with them is known before anything is created on disk.
    storage.check_new_run(path)
    # Written out, so that the run says what it observed even if defaults change.
    recorded = config.model_copy(update={"env": with_all_options(config.env)})
    with (
        stages_of(config, backend) as stages,
        storage.create_run(
            path,
            config=recorded.model_dump(mode="json"),
            config_digest=recorded.digest(),
            capacity=config.iterations,
            environment=environment(),
        ) as writer,
    ):
        return _train(stages, writer, call, observer)


def resume(
    path: Path,
    *,
    iterations: int | None = None,
    take_over: bool = False,
    repair: bool = False,
    backend: Backend = Backend(),
    call: StageCall = direct,
    observer: Observer = Observer(),
) -> TrainResult:
    """Train a stored run from its first missing stage on.

    Args:
        path: the run's folder.
        iterations: how many iterations the run shall have; as configured when None.
        take_over: seize the lock of a writer that can no longer release it, such as one on a host that died.
        repair: drop outputs that `verify` finds damaged, and compute them again.
        backend: where rollouts run.
        call: how a stage is run.
        observer: is told of progress and may ask to stop.
    """
    run = storage.open_run(path)
    config = config_of(run)
    if iterations is not None:
        if iterations < len(run.iterations):
            raise ConfigError(
                f"{path}: found --iterations {iterations}, but {len(run.iterations)} are stored already; required at "
                "least that many"
            )
        config = build_config({**config.model_dump(), "iterations": iterations})
    # The lock first: a run that somebody else is writing is refused before workers start.
    with (
        storage.open_writer(path, capacity=config.iterations, take_over=take_over, repair=repair) as writer,
        stages_of(config, backend) as stages,
    ):
        return _train(stages, writer, call, observer)


@contextmanager
def stages_of(config: RunConfig, backend: Backend) -> Iterator[OnPolicyStages]:
    """The stages of a run with their workers, for as long as the context lasts.

    One BLAS and one torch thread per Python thread: more would make bits depend on the number of cores.
    """
    torch.set_num_threads(1)
    with (
        threadpool_limits(1),
        ThreadPoolExecutor(usable_cores(), thread_name_prefix="metaloom-math") as pool,
        rollout_workers(config, backend) as workers,
    ):
        yield OnPolicyStages.build(config, workers, pool.map)


def config_of(run: Run) -> RunConfig:
    """A stored run's configuration, with the iterations that it was last given."""
    return build_config({**run.config, "iterations": planned_iterations(run)})


def environment() -> dict[str, str]:
    """What decides the numbers besides the configuration, and is not known to the store: the code itself."""
    return {"code": code_digest()}


def _train(stages: OnPolicyStages, writer: RunWriter, call: StageCall, observer: Observer) -> TrainResult:
    path, iterations = writer.run.path, stages.config.iterations
    began = time.perf_counter()
    for iteration in range(iterations):
        # Not only the iterations behind the last complete one: whatever was lost is computed again.
        missing = [ref for ref in stages.order(iteration) if not writer.contains(ref)]
        if not missing:
            continue
        seconds: dict[str, float] = {}
        iteration_began = time.perf_counter()
        for ref in missing:
            if observer.should_stop():
                return TrainResult(path, iteration, stopped=True)
            observer.stage_started(ref)
            call(ref, stages.inputs(ref), partial(run_once, stages, writer, ref, seconds))
        update, steps = writer.load(StageRef(iteration, "meta_optimize")), _num_steps(writer, missing)
        assert isinstance(update, Update)
        now = time.perf_counter()
        observer.iteration_done(
            IterationReport(
                iteration=iteration,
                iterations=iterations,
                metrics=update.metrics,
                stage_seconds=seconds,
                elapsed_seconds=now - began,
                steps_per_second=steps / (now - iteration_began - seconds.get("evaluate.0", 0.0)) if steps else None,
                evaluation_returns=_evaluation_returns(writer, missing),
            )
        )
    return TrainResult(path, iterations, stopped=False)


def run_once(stages: OnPolicyStages, writer: RunWriter, ref: StageRef, seconds: dict[str, float]) -> StageRef:
    """Compute and store a stage unless it is stored already."""
    if not writer.contains(ref):
        started, began = time.time(), time.perf_counter()
        value = stages.compute(ref, writer.load)
        took = time.perf_counter() - began
        seconds[f"{ref.stage}.{ref.step}"] = took
        writer.put(
            ref,
            value,
            inputs=stages.inputs(ref),
            seed_position=stages.seed_position(ref),
            started=started,
            seconds=took,
        )
    return ref


def _evaluation_returns(writer: RunWriter, refs: Iterable[StageRef]) -> list[float]:
    """Mean test return by number of adaptation steps, of the evaluation among some stages."""
    made = [writer.load(ref) for ref in refs if ref.stage == "evaluate"]
    return [r for e in made if isinstance(e, Evaluation) for r in e.test_returns.mean(axis=(0, 2)).tolist()]


def _num_steps(writer: RunWriter, refs: Iterable[StageRef]) -> int:
    """Environment steps in the rollouts among some stages."""
    batches = (writer.load(ref) for ref in refs if ref.stage == "collect_rollouts")
    return sum(batch.num_steps for batch in batches if isinstance(batch, EpisodeBatch))
