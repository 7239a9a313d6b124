"""Collection of episodes in a custom environment, in sequence, since there may be only one robot."""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from metaloom.flows.trained.blueprint import Blueprint
from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.loop_batch import LoopBatch
from metaloom.pipeline.envs.spaces import observation_dtype, spaces_of
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.rollouts.faults import RolloutError, describe
from metaloom.stages.rollouts.sampler import UNWATCHED, RolloutWatch, episodes_together


def collect_in(
    robot: gymnasium.Env[Any, Any],
    blueprint: Blueprint,
    params: TaskParams,
    position: RolloutPosition,
    *,
    episodes: int,
    max_episode_steps: int,
) -> EpisodeBatch:
    """Collect complete episodes [1, E, T] with the policy's exploration noise.

    Raises:
        TypeError, ValueError: the robot does not match the run's environment.
        RolloutError: the environment failed, or an observation, action or reward is not finite.
    """
    # A policy with a memory uses it across episodes.
    in_trial = episodes if blueprint.config.algorithm.trial is not None else 1
    sampler = _InOneEnv(robot, blueprint, max_episode_steps, in_trial)
    env = sampler.wrapped
    names, units = zip(*((f.name, f.unit) for f in env.task_fields), strict=True) if env.task_fields else ((), ())
    task = np.array(env.task, np.float64) if env.task_fields else np.zeros(0)
    tasks = TaskBatch(task[None], np.array([-1], np.int64), names, units)

    try:
        return episodes_together(
            [
                play_episodes(sampler, params, tasks, position=replace(position, first_episode=episode))
                for episode in range(0, episodes, in_trial)
            ]
        )
    except RolloutError as fault:
        # Its position does not belong to a run.
        about = {**fault.about, "adaptation": position.step}
        raise RolloutError(describe(about), about, fault.arrays) from fault


class _InOneEnv(Sampler):
    """Sampler that uses the user's environment object."""

    def __init__(
        self, robot: gymnasium.Env[Any, Any], blueprint: Blueprint, max_episode_steps: int, in_trial: int
    ) -> None:
        config = blueprint.config
        self._wrap = lambda: blueprint.wrap(robot)
        self.wrapped = env = self._wrap()
        super().__init__(
            # Name for messages about faults.
            config.env.model_copy(update={"name": type(env.unwrapped).__name__, "options": {}}),
            config.policy,
            episodes_per_task=in_trial,
            episodes_per_trial=in_trial,
            max_episode_steps=max_episode_steps,
            actor=config.algorithm.actor,
        )
        self._env = LoopBatch(lambda: env, 1)
        self.spaces = spaces_of(env)
        self.observation_dtype = observation_dtype(env.observation_space, config.env)
        self.facts = declared_facts(env)

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> LoopBatch:
        if self.env.copies == "fresh":
            # There is a single robot.
            self._env = LoopBatch(self._wrap, 1)
        self._env.watch_row = watch.row
        return self._env
