"""Collection of complete episodes from the environments."""

from dataclasses import replace
from functools import partial

import numpy as np

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import EACH_STEP, ITERATION, At, Stage
from metaloom.pipeline.envs.answers import as_integers, check_facts, is_ctrl_c
from metaloom.pipeline.envs.contract import BatchStep, EnvError
from metaloom.pipeline.policies.acting import check_actor_params, make_actor
from metaloom.pipeline.policies.actors import Actor, ActorSetup
from metaloom.pipeline.policies.remembering import Memory
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams, Update
from metaloom.stages.adapt import ROUND
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.rollouts.faults import Circumstances, RolloutPosition, not_finite, problem_of
from metaloom.stages.rollouts.sampler import (
    UNWATCHED,
    RolloutWatch,
    Sampler,
    collect_until,
    episodes_together,
    tasks_together,
)
from metaloom.stages.tools import Rollouts, acting_params


def collect_rollouts(
    learner: AnyLearner, rollouts: Rollouts, at: At, *, params: Update | TaskParams, tasks: TaskBatch
) -> EpisodeBatch:
    """Collect complete episodes for each task, using its adapted parameters after the first inner step."""
    position = RolloutPosition(at.run_seed, at.iteration, at.step)
    return rollouts.collect(acting_params(learner, params, at, len(tasks)), tasks, position)


def collect_round(
    learner: AnyLearner,
    config: RunConfig,
    rollouts: Rollouts,
    at: At,
    *,
    state: Update,
    tasks: TaskBatch,
    posterior: TaskParams | None = None,
) -> EpisodeBatch:
    """Collect episodes with latents drawn from the prior, or from each task's posterior given its previous episodes."""
    params = acting_params(learner, state, at, len(tasks))
    if posterior is not None:
        params = TaskParams({**params.params, **posterior.params})
    of_round = rollouts.sampling(plan_of(config).rounds[at.step].episodes, deterministic=False)
    return of_round.collect(params, tasks, RolloutPosition(at.run_seed, at.iteration, at.step))


COLLECT_ROLLOUTS = Stage(
    collect_rollouts,
    EACH_STEP,
    reads={"params": "acting", "tasks": "tasks"},
    group="rollouts_{step}",
    samples=True,
    thinnable=True,
)
COLLECT_TRANSITIONS = replace(
    COLLECT_ROLLOUTS, per=ITERATION, reads={"params": "learner", "tasks": "tasks"}, thinnable=False
)
COLLECT_ROUND = replace(
    COLLECT_TRANSITIONS,
    run=collect_round,
    per=ROUND,
    reads={"state": "learner", "tasks": "tasks", "posterior": "posterior"},
)


@np.errstate(over="ignore", invalid="ignore")  # checked at the end, with a better message than NumPy's
def play_episodes(
    sampler: Sampler,
    params: TaskParams,
    tasks: TaskBatch,
    *,
    position: RolloutPosition,
    watch: RolloutWatch = UNWATCHED,
) -> EpisodeBatch:
    """Collect complete episodes for each task with its parameters: exactly E per task, or until `enough` is reached.

    An episode depends bit for bit only on its task, parameters and position, not on shards, threads or the lengths of
    other episodes.

    Raises:
        RolloutError: the environment failed, or an observation, action or reward is not finite.
        EnvError, ValueError: the environment cannot be created, or the parameters are incompatible with it.
    """
    if sampler.enough is None:
        # The first episode of every trial, then the second, and so on: longer trials only append episodes.
        blocks, memory = list[EpisodeBatch](), None
        for _ in range(sampler.episodes_per_trial):
            at = replace(position, first_episode=position.first_episode + len(blocks) * sampler.episodes_at_once)
            rollout = _Rollout(sampler, params, tasks, at, watch, memory)
            blocks.append(rollout.run())
            memory = rollout.actor.memory
        return blocks[0] if len(blocks) == 1 else episodes_together(blocks)

    def block(b: int, first_episode: int) -> EpisodeBatch:
        at = replace(position, first_task=position.first_task + b, first_episode=first_episode)
        return _Rollout(sampler, params.slice(b, b + 1), tasks.slice(b, b + 1), at, watch).run()

    # Task by task, since the number of blocks differs between tasks.
    return tasks_together([collect_until(sampler.enough, partial(block, b)) for b in range(len(tasks))])


class _Rollout:
    """One rollout of parallel episodes, starting from the given actor memory, and its buffers.

    Buffers have the shape [T, N, ...] with N = B * E. Time comes first so that a step writes one contiguous block.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: TaskParams,
        tasks: TaskBatch,
        position: RolloutPosition,
        watch: RolloutWatch,
        memory: Memory | None = None,
    ) -> None:
        self.env = env = sampler.batch(len(tasks), watch)
        watch.idle()  # building an actor may import torch; keep that out of the environment's time
        check_actor_params(sampler.actor, sampler.policy, params.params, sampler.spaces)
        B, E, T = len(tasks), sampler.episodes_at_once, sampler.max_episode_steps
        self.B, self.E, self.T, self.N = B, E, T, B * E
        self.tasks, self.watch = tasks, watch
        self.circumstances = Circumstances(sampler.env, tasks, position, E)
        self.seeds = [position.reset_seed(b, e, sampler.env.seed_bits) for b in range(B) for e in range(E)]
        self.observations = np.zeros((T + 1, B * E, env.observation_size), sampler.observation_dtype)
        self.taken = watch.actions((T, B * E, env.action_size), position)
        drawing = () if sampler.deterministic else range(B)
        setup = ActorSetup(
            sampler.policy,
            params,
            self.taken,
            num_rows=E,
            spaces=sampler.spaces,
            rngs=[generator(position.run_seed, "actions", *position.of_task(b)) for b in drawing] or None,
            belief_rng=lambda b, e: generator(position.run_seed, "beliefs", *position.of_episode(b, e)),
            memory=memory,
        )
        self.actor: Actor = make_actor(sampler.actor, setup)
        self.rewards = np.zeros((T, B * E), np.float32)
        self.terms: dict[str, Array] = {}
        self.declared = sampler.facts
        self.facts = {
            fact.name: np.zeros((T, B * E)[fact.per == "episode" :], np.bool_ if fact.kind == "flag" else np.float32)
            for fact in self.declared
        }
        self.lengths = np.zeros(B * E, np.int32)
        self.terminated = np.zeros(B * E, np.bool_)
        self.env_step: int | None = None

    def run(self) -> EpisodeBatch:
        try:
            initial_state = self._act_in_all()
        # BaseException: an environment that calls sys.exit must not end the worker.
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            found = problem_of(error, self.env_step)
            raise self.circumstances.fault(*found, env_step=self.env_step, actions=self.taken) from error
        self._check_finite()
        return self._episodes(initial_state)

    def _act_in_all(self) -> Array:
        """Run every episode from reset to end and return the simulators' states right after reset."""
        self.watch.entered(None)
        first = self.env.reset(np.repeat(self.tasks.params, self.E, axis=0), np.array(self.seeds, np.uint64))
        self.watch.left()
        _require_shape("reset: observations", first, self.observations[0].shape)
        self.observations[0] = self._kept(first)
        initial_state = self.env.state
        rows = np.arange(self.N)
        for t in range(self.T):
            self.env_step = t
            actions = self.actor.act(t, self.observations[t], rows)
            self.watch.entered(t)
            result = self.env.step(actions, rows)
            self.watch.left()
            self._record(t, rows, result)
            ended = result.terminated | result.truncated
            self.actor.learn_of(rows, self.rewards[t, rows], ended | (t == self.T - 1))
            if ended.any():
                rows = rows[~ended]
                if not len(rows):
                    break
        return initial_state

    def _record(self, t: int, rows: Array, result: BatchStep) -> None:
        at: Array | slice = slice(None) if len(rows) == self.N else rows
        _require_shape("step: observations", result.observations, (len(rows), self.observations.shape[2]))
        if t == 0:
            self.terms = {name: np.zeros((self.T, self.N), np.float32) for name in result.reward_terms}
        self.observations[t + 1, at] = self._kept(result.observations)
        self.rewards[t, at] = sum(result.reward_terms.values())
        for name, term in result.reward_terms.items():
            self.terms[name][t, at] = term
        if self.declared or result.facts:
            check_facts(result.facts, self.declared, rows)
        for fact in self.declared:
            kept = self.facts[fact.name]
            # A per-episode fact keeps the value of the last step, which is not known in advance.
            (kept[t] if fact.per == "step" else kept)[at] = result.facts[fact.name]
        self.lengths[at] += 1
        self.terminated[at] = result.terminated

    def _kept(self, observations: Array) -> Array:
        """Convert observations to the storage dtype if that is an integer dtype."""
        dtype = self.observations.dtype
        return observations if dtype.kind == "f" else as_integers(observations, dtype)

    def _episodes(self, initial_state: Array) -> EpisodeBatch:
        terminated = self.terminated.reshape(self.B, self.E)
        return EpisodeBatch(
            observations=self._by_task(self.observations),
            actions=self._by_task(self.actor.actions),
            rewards=self._by_task(self.rewards),
            terminated=terminated,
            # Every episode is complete, so one that did not terminate reached the time limit.
            truncated=~terminated,
            lengths=self.lengths.reshape(self.B, self.E),
            behavior={name: self._by_task(value) for name, value in self.actor.behavior_by_step.items()}
            | self.actor.behavior_by_task,
            reward_terms={name: self._by_task(term) for name, term in self.terms.items()},
            initial_state=initial_state.reshape(self.B, self.E, -1),
            facts={
                name: self._by_task(values) if values.ndim == 2 else values.reshape(self.B, self.E)
                for name, values in self.facts.items()
            },
        )

    def _check_finite(self) -> None:
        """Raise RolloutError if any value is not finite. Batched environments are not checked at every step."""
        for name, array in (("observations", self.observations), ("actions", self.taken), ("rewards", self.rewards)):
            finite = np.isfinite(array)
            if not finite.all():
                t, row, *_ = np.argwhere(~finite)[0].tolist()
                # Each observation is stored with the step that produced it.
                env_step = t - 1 if name == "observations" else t
                call = "act" if name == "actions" else "step" if env_step >= 0 else "reset"
                raise self.circumstances.fault(
                    not_finite(name), call, "", row, env_step=env_step if env_step >= 0 else None, actions=self.taken
                )

    def _by_task(self, values: Array) -> Array:
        """Rearrange values [T, N, ...] into an array [B, E, T, ...]."""
        split = values.reshape(len(values), self.B, self.E, *values.shape[2:])
        # Always copy: with one row the layout is already right, but the actions belong to the watch.
        return np.array(np.moveaxis(split, 0, 2), order="C")


def _require_shape(name: str, found: Array, required: tuple[int, ...]) -> None:
    # NumPy would broadcast a smaller array over the rows.
    if found.shape != required:
        raise EnvError(f"{name}: got shape {found.shape}; expected {required}")
