"""What sizes cannot be read from settings: the forms of arrays, seen in an episode of one step and in a learner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metaloom.flows.graph.context import build_learner
from metaloom.flows.graph.tables import graph_of
from metaloom.flows.rollouts.workers import SamplerSpec
from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import BatchEnv, BatchStep, Fact, MetaEnv
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.tasks.evaluation import evaluation_tasks
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Minibatches,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.stages.collect_rollouts import UNWATCHED, RolloutPosition, RolloutWatch, Sampler, collect_rollouts
from metaloom.stages.sample_tasks import sample_tasks
from metaloom.storage.format.chunks import encode_chunk
from metaloom.storage.format.codec import Value, flatten

_MEASURED_STEPS = 4000


@dataclass(frozen=True)
class Forms:
    """What sizes cannot be read from settings.

    Attributes:
        outputs: type of an output -> its arrays, of one task, one episode, one step and so on.
        kept: name of an array of steps -> what compression leaves of it.
        learner_bytes: of the learner.
        start_bytes: of the learner that has learned nothing, whose zeros compress to nothing.
        row_bytes: what torch keeps for the gradient of one row: what a policy's layers gave.
        spaces: of the environment.
        train_tasks: of a fixed set, 0 without one.
        test_tasks: of a fixed set, 0 without one.
        evaluated_classes: of tasks, of each of which an evaluation has one; 0 where others say how many it has.
    """

    outputs: Mapping[type[Value], Mapping[str, Array]]
    kept: Mapping[str, float]
    learner_bytes: int
    start_bytes: int
    row_bytes: int
    spaces: Spaces
    train_tasks: int
    test_tasks: int
    evaluated_classes: int

    @classmethod
    def of(cls, config: RunConfig, *, act: bool = False) -> "Forms":
        """Build the environment and the learner of a run, and look at them.

        Args:
            config: of the run.
            act: take steps in the environment, which show its state, the terms of its reward, and how far what is
                stored of them can be compressed.

        Raises:
            ConfigError, EnvError: settings and environment do not fit each other, or the learner is too large.
        """
        setup, learner, env = build_learner(config)
        try:
            state = learner.at_start(learner.initialize(run_seed=config.seed), run_seed=config.seed)
            acting = learner.acting_params(state, 1)
            tasks = sample_tasks(env, num_tasks=1, run_seed=config.seed, iteration=0)
            episode = _episodes(config, acting, tasks, Sampler if act else _StandIn, number=1, steps=1)
            return cls(
                _outputs(config, episode, tasks, state, acting),
                _kept_by_compression(config, learner, state, env) if act else {},
                sum(array.nbytes for array in flatten(state).values()),
                sum(array.nbytes for array in flatten(state).values() if array.any()),
                _row_bytes(learner, state, setup),
                setup,
                len(env.task_set or ()),
                len(env.test_task_set or ()),
                _evaluated_classes(config, env),
            )
        finally:
            env.close()


def _evaluated_classes(config: RunConfig, env: MetaEnv) -> int:
    if config.evaluation.evenly_by is None or config.evaluation.num_tasks is not None:
        return 0
    # The first evaluation has no draws of training to avoid, and as many tasks as any other.
    return len(evaluation_tasks(config, env, 0))


def _outputs(
    config: RunConfig, episode: EpisodeBatch, tasks: TaskBatch, state: LearnerState, acting: TaskParams
) -> dict[type[Value], dict[str, Array]]:
    """The arrays of every type of output, with one of each thing."""
    of_step = np.zeros((1, 1, 1), np.float32)
    # What adapts is what the learner does not hold, such as a posterior; else all of it does.
    adapted = {name: value for name, value in acting.params.items() if name not in state.params} or acting.params
    rows = np.zeros((1, 1, 1), np.int64)
    found = {f"{kind}_{name}": np.zeros((1, 1, 1), dtype) for kind in ("test", "adaptation")
             for name, dtype in (("returns", np.float64), ("lengths", np.int32), ("terminated", np.bool_))}  # fmt: skip
    for name, value in episode.episode_facts.items():
        found |= {f"{kind}_facts.{name}": np.zeros((1, 1, 1), value.dtype) for kind in ("test", "adaptation")}
    values: tuple[Value, ...] = (
        tasks,
        episode,
        Samples(of_step, of_step, of_step, of_step, of_step if config.processing.name == "dice" else None),
        TaskParams(adapted),
        Minibatches(rows, rows[0], rows if config.algorithm.graph == "task_inference" else None),
        Update(state, {}),
    )
    return {type(value): flatten(value) for value in values} | {
        Evaluation: {"task_params": tasks.params, "task_ids": tasks.ids, **found}
    }


def _episodes(
    config: RunConfig, acting: TaskParams, tasks: TaskBatch, kind: type[Sampler], *, number: int, steps: int
) -> EpisodeBatch:
    """Episodes of one task by the algorithm's actor."""
    spec = SamplerSpec.of(config, 1)
    sampler = kind(spec.env, spec.policy, episodes_per_task=number, max_episode_steps=steps, actor=spec.actor)
    try:
        return collect_rollouts(sampler, acting, tasks, position=RolloutPosition(config.seed, 0, 0))
    finally:
        sampler.close()


def _kept_by_compression(
    config: RunConfig, learner: Learner[Any, Any], state: LearnerState, env: MetaEnv
) -> dict[str, float]:
    """Compress what episodes of a few tasks would be stored as, by the steps that they have."""
    tasks = sample_tasks(env, num_tasks=min(config.num_tasks, 4), run_seed=config.seed, iteration=0)
    acting = learner.acting_params(state, len(tasks))
    steps = min(config.max_episode_steps, _MEASURED_STEPS)
    of_trial = config.algorithm.trial or 1
    number = of_trial * max(1, _MEASURED_STEPS // (steps * len(tasks) * of_trial))
    episodes = _episodes(config, acting, tasks, Sampler, number=number, steps=steps)
    arrays = flatten(episodes)
    if any(stage.output is Samples for stage in graph_of(config).stages):
        arrays |= flatten(learner.process(state, episodes, seed=0))
    real = episodes.mask > 0
    of_steps = {name: array[:, :, :steps][real] for name, array in arrays.items() if array.shape[2:3] >= (steps,)}
    return {name: _compressed(array) / array.nbytes for name, array in of_steps.items()}


def _compressed(array: Array) -> int:
    content, _ = encode_chunk(array, compressed=True)
    return sum(map(len, content))


class _StandIn(Sampler):
    """A sampler whose environment does nothing: a user's may take long, or the process with it."""

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> BatchEnv:
        del num_tasks, watch
        return _Nothing(self.spaces, self.facts)


class _Nothing:
    """One row of an environment that does nothing; see BatchEnv."""

    def __init__(self, spaces: Spaces, facts: Sequence[Fact]) -> None:
        self.num_rows = 1
        self.facts = {fact.name: np.zeros(1, np.bool_ if fact.kind == "flag" else np.float64) for fact in facts}
        self.observation_size = spaces.observation_size
        self.action_size = max(spaces.action_size, 1)
        self.state = np.zeros((1, 0))

    def reset(self, tasks: Array, seeds: Array) -> Array:
        del tasks, seeds
        return np.zeros((1, self.observation_size))

    def step(self, actions: Array, rows: Array) -> BatchStep:
        del actions, rows
        one = np.zeros(1)
        return BatchStep(np.zeros((1, self.observation_size)), {"reward": one}, one > 0, one > 0, self.facts)

    def close(self) -> None:
        pass


def _row_bytes(learner: Learner[Any, Any], state: LearnerState, spaces: Spaces) -> int:
    """What torch keeps of one observation for a gradient, as a policy of the learner's says, else by its biases."""
    policy = getattr(learner, "policy", None)
    if not isinstance(policy, Policy):
        return 4 * sum(len(a) for a in (state.params | state.extra).values() if a.ndim == 1)
    initial = policy.initialize(np.random.default_rng(0))
    params = {name: torch.from_numpy(value).requires_grad_() for name, value in initial.items()}
    parameters = {value.data_ptr() for value in params.values()}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        policy.distribution(params, torch.zeros(1, spaces.observation_size))
    return sum(kept.values())
