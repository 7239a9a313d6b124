"""ES-MAML: a start from which tasks adapt well, by evolution strategies. Song et al. 2020, arXiv:1910.01215.

Every task starts from the meta-parameters with noise of its own and adapts by a gradient step. The meta-parameters move
towards the noise of the tasks that end well; no derivative of the adaptation is taken. docs/dataflows.md explains it.
"""

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, Learner
from metaloom.pipeline.dataflow.edges import last_step, this_step
from metaloom.pipeline.dataflow.stage import ITERATION, Stage
from metaloom.pipeline.estimation.diagnostics import step_metrics
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.seeding import own_generator
from metaloom.pipeline.types import LearnerState, Step, TaskBatch, TaskParams, Update
from metaloom.stages.counters import updated
from metaloom.stages.graphs.on_policy import ON_POLICY


class ESMAML(AlgorithmSettings):
    graph = "es_maml:GRAPH"
    learner = "es_maml:ESMAMLLearner"

    inner_lr: float = 0.1
    inner_steps: int = 1
    outer_lr: float = 0.05
    sigma: float = 0.1

    @property
    def adaptation_steps(self):
        return self.inner_steps


class ESMAMLLearner(Learner):
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
        perturbed, returns = experience
        fitness = np.float32((returns - returns.mean()) / (returns.std() + 1e-8))
        noise = {name: perturbed.params[name] - value for name, value in state.params.items()}  # sigma * epsilon
        rate = np.float32(self.settings.outer_lr / (self.settings.sigma**2 * len(fitness)))
        moved = {name: value + rate * np.tensordot(fitness, noise[name], 1) for name, value in state.params.items()}
        return LearnerState(moved, {}, {}), {"fitness_std": float(returns.std())}


def perturb(config, at, *, learner: Update, tasks: TaskBatch) -> TaskParams:
    rng, sigma = at.generator("perturb"), np.float32(config.algorithm.sigma)
    start, started = learner.learner.params, {}
    for name, value in start.items():
        noise = rng.standard_normal((len(tasks), *value.shape), np.float32)
        noise[1::2] = -noise[: len(tasks) // 2 * 2 : 2]  # opposite in every second task
        started[name] = value + sigma * noise
    return TaskParams(started)


def evolve(learner, at, *, state: Update, perturbed: TaskParams, episodes: tuple, samples: tuple) -> Update:
    returns, metrics = episodes[-1].episode_returns.mean(axis=1), {}
    for k, (batch, of_batch) in enumerate(zip(episodes, samples, strict=True)):
        metrics |= step_metrics(Step(batch, of_batch, k))
    experience = (perturbed, returns)
    return updated(learner, at, map, state=state, experience=experience, rounds=episodes, metrics=metrics)


READS = {"state": "learner", "perturbed": "perturbed", "episodes": "all_rollouts", "samples": "all_samples"}
EVOLVE = Stage(evolve, ITERATION, reads=READS, group="learner", ends_iteration=True)
GRAPH = ON_POLICY.named("es_maml").insert(Stage(perturb, ITERATION), after="sample_tasks")
GRAPH = GRAPH.edge(perturbed=this_step("perturb"), acting=last_step("adapt", first="perturbed"))
GRAPH = GRAPH.replace("meta_optimize", EVOLVE)
