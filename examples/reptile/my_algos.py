"""Reptile: moves the parameters towards those that the tasks adapted to. Nichol et al. 2018, arXiv:1803.02999."""

import torch

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.seeding import own_generator
from metaloom.pipeline.types import LearnerState, TaskParams


class Reptile(AlgorithmSettings):
    graph = "on_policy"
    learner = "my_algos:ReptileLearner"

    inner_lr: float = 0.1
    inner_steps: int = 2
    outer_lr: float = 0.5

    @property
    def adaptation_steps(self):
        return self.inner_steps


class ReptileLearner(Learner):
    def __init__(self, settings, setup):
        self.settings, self.setup, self.policy = settings, setup, build_policy(setup.policy, setup)

    def initialize(self, *, run_seed):
        return LearnerState(self.policy.initialize(own_generator(run_seed, "initialize")), {}, {})

    def process(self, state, episodes, *, seed, parallel=map):
        return process_samples(episodes, self.setup.baseline.build(), self.setup.processing, seed=seed)

    def adapt(self, state, params, evidence, *, parallel=map):  # one step up the policy gradient of every task
        theta = {name: torch.tensor(value, requires_grad=True) for name, value in params.params.items()}
        arrays = (evidence.episodes.observations[:, :, :-1], evidence.episodes.actions, evidence.samples.advantages)
        observations, actions, advantages = (torch.tensor(array).flatten(1, 2) for array in arrays)
        gain = (self.policy.distribution(theta, observations).log_prob(actions) * advantages).mean(1).sum()
        moves = zip(params.params.items(), torch.autograd.grad(gain, list(theta.values())), strict=True)
        return TaskParams({name: value + self.settings.inner_lr * move.numpy() for (name, value), move in moves})

    def update(self, state, experience, *, run_seed, iteration, parallel=map):
        adapted = self.acting_params(state, len(experience[0].episodes.lengths))
        for step in experience[:-1]:
            adapted = self.adapt(state, adapted, step)
        ways = {name: value.mean(0) - state.params[name] for name, value in adapted.params.items()}
        moved = {name: state.params[name] + self.settings.outer_lr * way for name, way in ways.items()}
        return LearnerState(moved, {}, {}), {"step_length": float(sum((way**2).sum() for way in ways.values()) ** 0.5)}


def reptile_point_corner():
    """Find one of four corners, from the best place to start."""
    return RunConfig.model_validate({"env": "point-corner", "algorithm": {"name": "my_algos:Reptile"}})
