"""Rehearsal of a run with plug-ins: small iterations in memory, before the run's folder is created."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

from metaloom.flows.copied import result_in_copy
from metaloom.flows.errors import WorkersError
from metaloom.flows.graph.faults import FAULTS, require_sound, reworded, run_checked
from metaloom.flows.graph.runner import Runner
from metaloom.flows.graph.tables import table_of
from metaloom.flows.rollouts.workers import LocalWorkers, SamplerSpec, close_samplers
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import acting_paths
from metaloom.pipeline.dataflow.outputs import Outputs
from metaloom.pipeline.envs.answers import last_line
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.rehearsal import SECONDS, stopwatch
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.tasks.evaluation import evaluation_tasks
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.storage import StageRef
from metaloom.storage.format.codec import encode

log: logging.Logger = logging.getLogger(__name__)

_Fault = tuple[StageRef, Exception]
ITERATIONS = 2  # number of rehearsed iterations: two, since a learner may only have state from the second one on
_OWN_SECONDS = 5 * SECONDS
_SMALL = {
    "evaluation.every": 1,
    "num_tasks": 2,
    "min_rollouts": 1,
    "min_steps": 1,
    "max_episode_steps": 20,
    "evaluation.num_tasks": 2,
    "evaluation.episodes": 2,
    "evaluation.test_episodes": 2,
    "algorithm.num_init_memory_steps": 40,
    "algorithm.num_updates_per_step": 2,
    "algorithm.num_initial_steps": 40,
    "algorithm.num_updates": 2,
}
"""Settings that determine how long an iteration takes, with their maxima in a rehearsal."""
_OPEN = ("evaluation.num_tasks", "algorithm.num_init_memory_steps", "algorithm.num_updates_per_step")
"""Settings for which null stands for a large number."""


def rehearse(stages: Runner, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Raise the error of a plug-in that fails in small iterations and again in iterations with the run's own sizes.

    Environment faults are ignored, since the run itself quarantines them.
    """
    config = stages.config
    # Building a policy tries its networks on the CPU.
    tried = config.policy if config.device == "cpu" else PolicyConfig()
    if {*stages.own} <= {*acting_paths(config.env, tried)}:
        return
    local = LocalWorkers(stages.rollouts.spec)
    alone = replace(stages, rollouts=local, parallel=map)
    # A copy cannot use this process's GPU. A failure is repeated here, where the error keeps its class and traceback.
    try:
        if config.device == "cpu":
            outputs = result_in_copy(lambda: _outputs(alone), 20 * _OWN_SECONDS, should_stop)
            if outputs is not None:
                if problem := result_in_copy(lambda: _hidden_state(alone, outputs), 20 * _OWN_SECONDS, should_stop):
                    raise StageFault(f"before the run: {problem}")
                return
    except ChildProcessError as ended:
        raise StageFault(
            f"before the run: the process of {', '.join(stages.own)} ended ({ended}); return results or raise an error"
        ) from None
    if should_stop() or (found := _fault(stages, should_stop)) is None:
        return
    ref, error = found
    if isinstance(error, FAULTS):
        raise reworded(error, f"before the run: {error}") from error
    error.add_note(f"before the run: in {ref.where}")
    raise error


def _outputs(stages: Runner) -> "_Memory | None":
    """Return the outputs of the small iterations, or None if a stage fails in both small and full-size iterations."""
    outputs = _Memory()
    return None if _fault(stages, outputs=outputs) else outputs


def _hidden_state(stages: Runner, outputs: "_Memory") -> str:
    """Recompute the stages in reverse order; return the error of the first that depends on what ran before it, or "".

    This process has computed no stage, so it lacks what earlier stages and iterations may have left in a module.
    """
    stages = replace(stages, parallel=_from_last_to_first)
    runner, spent = _runner(stages, _small(stages)), stopwatch()
    with closing(runner.env):
        for ref in reversed(outputs):
            if spent() > SECONDS:
                break
            try:
                require_sound(runner, ref, outputs, outputs[ref])
            except (RolloutError, EnvError, WorkersError):
                break
            except Exception as error:
                told = str(error) if isinstance(error, FAULTS) else f"{ref.where}: {last_line(error)}"
                return f"without the stages and tasks before it, {told}"
    return ""


def _from_last_to_first(work: Callable[..., Any], *of: Iterable[Any]) -> Iterator[Any]:
    """Map like `map`, but call `work` for the last item first, as no result may depend on the order of tasks."""
    return reversed([work(*item) for item in reversed([*zip(*of, strict=False)])])


def _fault(
    stages: Runner, should_stop: Callable[[], bool] = lambda: False, outputs: "_Memory | None" = None
) -> _Fault | None:
    """Return the stage that fails in both small and full-size iterations, with its error; None if there is none.

    Outputs of the small iterations are added to `outputs`.
    """
    if found := _first_fault(stages, _small(stages), SECONDS, should_stop, outputs=outputs):
        # The small sizes may be the cause, for example if an average needs more steps than there are.
        ref, error = found
        found = _first_fault(stages, stages.config, _OWN_SECONDS, should_stop, last=ref)
        if found is None:
            failed = f"{ref.where} failed in a small iteration ({last_line(error)})"
            log.warning("rehearsal: %s, but not with the run's own sizes within %g s", failed, 10 * _OWN_SECONDS)
    close_samplers()  # their sizes differ from the run's
    return found


class _Memory(dict[StageRef, Any], Outputs):
    """In-memory outputs of the iterations so far."""

    def load(self, ref: StageRef) -> Any:
        return self[ref]


def _small(stages: Runner) -> RunConfig:
    """Return the configuration with sizes reduced wherever the settings and plug-ins accept smaller ones."""
    config, env = stages.config, stages.env
    for name, size in {**_SMALL, "episodes_per_task": config.algorithm.trial or 2}.items():
        with suppress(Exception):  # plug-ins may raise anything at other sizes
            found = attrgetter(name)(config)
            if not (name in _OPEN if found is None else found > size):
                continue
            smaller = build_config(override(config.model_dump(mode="json"), [f"{name}={size}"]))
            stages.graph.check(smaller, env)
            stages.under(smaller)
            if smaller.evaluation.every is not None:
                evaluation_tasks(smaller, env, 1)
            config = smaller
    return config


def _runner(stages: Runner, config: RunConfig) -> Runner:
    """Return a runner for other sizes, with the same workers."""
    workers = stages.rollouts
    return Runner.build(config, replace(workers, spec=SamplerSpec.of(config, workers.spec.threads)), stages.parallel)


def _first_fault(
    stages: Runner,
    config: RunConfig,
    seconds: float,
    should_stop: Callable[[], bool],
    last: StageRef | None = None,
    outputs: _Memory | None = None,
) -> _Fault | None:
    """Return the first stage that fails, with its error, or None if none does.

    No stage begins after `seconds` of processor time or ten times as much elapsed time. `last` is the last stage to
    compute, in its iteration or the first later one that has it; None computes ITERATIONS iterations.
    `outputs` receives the outputs.
    """
    memory, spent, runner = _Memory() if outputs is None else outputs, stopwatch(), _runner(stages, config)
    iterations = min(ITERATIONS, config.iterations) if last is None else config.iterations
    with closing(runner.env):
        for ref in (ref for i in range(iterations) for ref in runner.order(i)):
            if spent() > seconds or should_stop():
                return None
            try:
                value = run_checked(runner, ref, runner.load_inputs(ref, memory, witness=False))
                _ = encode(table_of(runner.graph), ref, value)
                require_sound(runner, ref, memory, value)
                memory[ref] = value
            except (RolloutError, EnvError, WorkersError):
                return None
            except Exception as error:
                return ref, error
            if last and ref.iteration >= last.iteration and (ref.stage, ref.step) == (last.stage, last.step):
                return None
    return None
