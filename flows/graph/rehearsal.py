"""The rehearsal of a run with plug-ins: small iterations in memory, before the run has a folder."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

from metaloom.flows.errors import WorkersError
from metaloom.flows.graph.faults import FAULTS, require_repeatable, run_checked
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import SamplerSpec, close_samplers
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import plugin_paths
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.plugin_files import acting_paths, own_paths
from metaloom.pipeline.tasks.evaluation import evaluation_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Update
from metaloom.stages.counters import no_steps
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.storage import StageRef

ITERATIONS, SECONDS = 2, 2.0
"""Number of iterations (in the second, a learner may have state), and a limit of processor time, or of a tenth of the
elapsed time, after which no stage begins."""
_EVALUATED = {"evaluation.every": 1}
_SMALL = {
    **_EVALUATED,
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
"""Settings that decide the duration of an iteration, with their maximum in a rehearsal."""
_OPEN = ("evaluation.num_tasks", "algorithm.num_init_memory_steps", "algorithm.num_updates_per_step")
"""Settings whose null means a large number."""


def rehearse(stages: Runner, should_stop: Callable[[], bool]) -> None:
    """Reject plug-ins that fail in small iterations and at the run's own sizes.

    Faults of environments are left to the training, which quarantines them.

    Raises:
        Exception: the error that training would raise.
    """
    config = stages.config
    if {*own_paths(plugin_paths(config))} <= {*acting_paths(config.env, config.policy)}:
        return
    used, elapsed = time.process_time() + SECONDS, time.monotonic() + 10 * SECONDS

    def is_over() -> bool:
        return time.process_time() > used or time.monotonic() > elapsed or should_stop()

    small = _at_most(stages, {**_SMALL, "episodes_per_task": config.algorithm.trial or 2})
    if found := _first_fault(stages, small, is_over):
        # The small sizes may be the cause, for example of an average over more steps than there are.
        found = _first_fault(stages, _at_most(stages, _EVALUATED), should_stop, last=found[0])
    close_samplers()  # caused by sizes that the run does not have
    if found is None:
        return
    ref, error = found
    if isinstance(error, FAULTS):
        raise type(error)(f"before the run: {error}") from error
    error.add_note(f"before the run: in {ref.where}")
    raise error


class _Memory(dict[StageRef, Any]):
    """Outputs of the iterations so far; see `metaloom.pipeline.dataflow.outputs.Outputs`."""

    def load(self, ref: StageRef) -> Any:
        return self[ref]

    def lengths(self, ref: StageRef) -> Array:
        return self[ref].lengths

    def experience(self, ref: StageRef) -> EpisodeBatch:
        return self[ref]


def _at_most(stages: Runner, sizes: Mapping[str, int]) -> RunConfig:
    """Return the configuration with reduced sizes, as far as settings and plug-ins accept them."""
    config, env = stages.config, stages.context.env
    for name, size in sizes.items():
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


def _first_fault(
    stages: Runner, config: RunConfig, should_stop: Callable[[], bool], last: StageRef | None = None
) -> tuple[StageRef, Exception] | None:
    """Return the first stage that fails, up to `last`, with its error; None if none fails."""
    workers, memory = stages.context.rollouts, _Memory()
    workers = replace(workers, spec=SamplerSpec.of(config, workers.spec.threads))
    runner = Runner.build(config, workers, stages.context.parallel)
    with closing(runner.context.env):
        for ref in (ref for i in range(min(ITERATIONS, config.iterations)) for ref in runner.order(i)):
            if should_stop():
                return None
            try:
                memory[ref] = run_checked(runner, ref, runner.load_inputs(ref, memory, witness=False))
                require_repeatable(runner, ref, memory, memory[ref])
                if runner.graph[ref.stage].ends_iteration:
                    _require_counters(ref, memory[ref])
            except (RolloutError, EnvError, WorkersError):
                return None
            except Exception as error:
                return ref, error
            if ref == last:
                return None
    return None


def _require_counters(ref: StageRef, update: Update) -> None:
    for name in no_steps():
        if name not in update.metrics or name not in update.learner.extra:
            raise StageFault(
                f"{ref.where}: the stage lost the counter {name}; required it in the metrics and in learner.extra, "
                "as metaloom.stages.counters.updated returns them"
            )
