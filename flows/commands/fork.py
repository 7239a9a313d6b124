"""Forking a run, to continue it with changed settings."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metaloom import storage
from metaloom.flows.commands.train import environment
from metaloom.flows.estimate import check_sizes
from metaloom.flows.graph.changes import warn_changed_sources
from metaloom.flows.graph.faults import describe_error
from metaloom.flows.graph.recomputed import Recomputed
from metaloom.flows.graph.rehearsal import rehearse
from metaloom.flows.graph.run_stages import config_of, require_stored_outputs, stages_of, stages_of_run
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import updates_at
from metaloom.flows.trust import trust_run
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.dataflow.graph import WITNESS
from metaloom.pipeline.envs import REPRODUCED
from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.spaces import observation_dtype
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.types import Evaluation, LearnerState, Update
from metaloom.storage import Fork, Run
from metaloom.storage.format.codec import flatten
from metaloom.storage.progress import Progress, unseen

log: logging.Logger = logging.getLogger(__name__)


def fork(
    path: Path, iteration: int | None, new_path: Path, overrides: Sequence[str] = (), *, on_progress: Progress = unseen
) -> Fork:
    """Create a run that shares another run's iterations before `iteration`; `resume` continues it."""
    run = storage.open_run(path)
    iteration = updates_at(run, iteration)
    if iteration:
        run.select(iteration - 1)
    old = config_of(run)
    new = build_config(override(old.model_dump(mode="json"), overrides))
    env, notes = settled(new.env, new.max_episode_steps)  # a changed environment may have unresolved settings
    for note in notes:
        log.warning("%s", note)
    new = new.model_copy(update={"env": env})
    if new.iterations < iteration:
        raise ConfigError(f"iterations must be at least {iteration}, where the fork begins, got {new.iterations}")
    with stages_of(new, Backend(workers=0), partial(check_sizes, new)) as stages:
        require_stored_outputs(run, stages.graph)
        problem, new_metrics = next(_misfits(run, iteration, old, stages), None), False
        if not problem and iteration and _of_updates(config_of(run, run.last_ref(iteration - 1))) != _of_updates(new):
            problem, new_metrics = _changed_update(run, iteration, stages)
        facts = environment(stages)
        if problem:
            raise ConfigError(f"{problem.rstrip('.')}. A fork continues its parent's iterations; train a new run")
        if overrides:
            rehearse(stages)
    warn_changed_sources(run, run.learner_ref(iteration), facts.get("plugins", {}))
    made = storage.fork_run(
        run,
        iteration,
        new_path,
        config=new.model_dump(mode="json"),
        config_digest=new.digest(),
        capacity=new.iterations,
        environment=facts,
        new_metrics=new_metrics,
        progress=on_progress,
    )
    trust_run(made.path)
    return made


def _misfits(run: Run, iteration: int, old: RunConfig, stages: Runner) -> Iterator[str]:
    """Yield the reasons why the parent's iterations cannot be continued under the new settings."""
    new = stages.config
    coming = range(iteration, iteration + (new.evaluation.every or 1))
    computed = (ref.stage for i in coming for ref in stages.graph.order(new, i))
    added = dict.fromkeys(name for name in computed if name not in run.stages)
    if added:
        yield f"algorithm: the parent has no stage {', '.join(added)}, which the graph {stages.graph.name} requires"
    # Without iterations there is only a learner, from which training with any sizes can continue.
    if iteration:
        sizes = ("num_tasks", "episodes_per_task", "max_episode_steps")
        pairs = {name: (getattr(old, name), getattr(new, name)) for name in sizes}
        pairs["adaptation steps"] = (old.algorithm.adaptation_steps, new.algorithm.adaptation_steps)
        for name in old.algorithm.sizes:
            pairs[f"algorithm.{name}"] = (getattr(old.algorithm, name), getattr(new.algorithm, name, None))
        for name, (before, after) in pairs.items():
            if before != after:
                yield f"{name} cannot change from {before} to {after}: array shapes are fixed within a run"
    if old.env != new.env:
        before, after = _interface(old.env), _interface(new.env)
        for name in before:
            if before[name] != after[name]:
                change = f"from {before[name]} to {after[name]}"
                yield f"env: {name} cannot change {change}: array formats are fixed within a run"
        if iteration and stages.graph.remembers_by_task and make_env(old.env).task_set != stages.env.task_set:
            yield (
                f"env: {new.env.name} has different training tasks than {old.env.name}, whose episodes the replay "
                "buffers hold"
            )
    fresh = _expect(stages.run(stages.graph.learner_ref(0), {}))
    stored = _expect(run.load(run.learner_ref(iteration)))
    yield from _differences("the learner", _forms(stored.learner), _forms(fresh.learner))
    if iteration and new.stop is not None:
        new.stop.met([run[iteration - 1].metrics()])  # raises ConfigError for a metric that the parent lacks
    if new.evaluation.every is not None:
        yield from _changed_evaluation(run, iteration, stages)


def _changed_evaluation(run: Run, iteration: int, stages: Runner) -> Iterator[str]:
    evaluations = [stage.name for stage in stages.graph.stages if stage.output is Evaluation]
    shared = [ref for ref in run.refs() if ref.stage in evaluations and ref.iteration < iteration]
    if not shared:
        return
    stored, plan = run[shared[-1].iteration].evaluation(), EvaluationPlan.of(stages.config)
    pairs = {
        "tasks": (len(stored.tasks), len(evaluation_tasks(stages.config, stages.env, iteration + 1))),
        "adaptation steps": (stored.adaptation_returns.shape[1], plan.adaptation_steps),
        "episodes": (stored.adaptation_returns.shape[2], plan.episodes if plan.adaptation_steps else 0),
        "test episodes": (stored.test_returns.shape[2], plan.test_episodes),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            yield f"evaluation: {name} cannot change from {before} to {after}: array shapes are fixed within a run"


def _interface(config: EnvConfig) -> dict[str, Any]:
    env = make_env(config)
    try:
        env.reset(seed=0)
        info = env.step(np.zeros(env.action_space.shape or (), env.action_space.dtype))[4]
        return {
            "the size of an observation": env.observation_space.shape,
            "the type of observations": str(observation_dtype(env.observation_space, config)),
            "the size of an action": env.action_space.shape,
            "the task fields": [(field.name, field.unit) for field in env.task_fields],
            "the reward terms": sorted(info.get("reward_terms", {"reward": None})),
            "the facts": declared_facts(env),
        }
    finally:
        env.close()


def _of_updates(config: RunConfig) -> tuple[object, ...]:
    """Return the settings that determine which arrays and metrics an update has."""
    return config.algorithm, config.baseline, config.processing, config.metrics, config.env.witness


def _changed_update(run: Run, iteration: int, stages: Runner) -> tuple[str | None, bool]:
    """Recompute the last shared update with the new settings; return a misfit, and whether its metrics have changed."""
    ref = run.last_ref(iteration - 1)
    try:
        with stages_of_run(run, Backend(workers=0)) as parents:  # its batches may have been thinned
            inputs = stages.load_inputs(ref, Recomputed(run, parents), witness=False)
            update = _expect(stages.run(ref, inputs))
    except storage.StoreError:
        raise
    except (ValueError, LookupError, ArithmeticError) as error:
        return f"algorithm: cannot update from the batches of iteration {iteration - 1}: {describe_error(error)}", False
    names, stored = {*update.metrics}, _expect(run.load(ref))
    if WITNESS[0] in stages.graph.inputs(stages.config, ref):
        names.add(REPRODUCED)
    misfit = next(_differences("the learner", _forms(stored.learner), _forms(update.learner)), None)
    return misfit, names != {*stored.metrics}


def _expect(value: object) -> Update:
    assert isinstance(value, Update)
    return value


def _forms(learner: LearnerState) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in flatten(learner).items()}


def _differences(what: str, stored: dict[str, str], fresh: dict[str, str]) -> Iterator[str]:
    gone, extra = sorted(stored.keys() - fresh.keys()), sorted(fresh.keys() - stored.keys())
    if gone or extra:
        yield f"{what} of the parent would lose {_list(gone)} and gain {_list(extra)} under these settings"
    for name in sorted(stored.keys() & fresh.keys()):
        if stored[name] != fresh[name]:
            yield f"{what}: {name} is {stored[name]} in the parent and {fresh[name]} under these settings"


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "nothing"
