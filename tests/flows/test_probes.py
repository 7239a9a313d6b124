"""Tiny environments whose values and best actions are known, each of which can fail for one reason only."""

import sys
from types import ModuleType

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import LocalWorkers, SamplerSpec
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.types import TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.storage.format.stages import ON_POLICY

PLACES = Box(-1, 1, (1,), np.float32)
DISCOUNT = 0.5


class Probe(gymnasium.Env):
    """One step, observation 0, reward 1, whatever is done: only the critic's output can be wrong."""

    observation_space = PLACES
    num_steps = 1

    def __init__(self, choices: bool = True) -> None:
        self.choices = choices
        self.action_space = Discrete(2) if choices else Box(-2, 2, (1,), np.float32)

    def start(self) -> float:
        return 0.0

    def reward(self, place: float, action: float) -> float:
        return 1.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.start(), 0
        return np.array([self.place], np.float32), {}

    def step(self, action):
        # Choice 1 stands for 1 and choice 0 for -1.
        reward = self.reward(self.place, 2.0 * action - 1 if self.choices else float(action[0]))
        self.steps += 1
        self.place = 1.0 if self.num_steps > 1 else self.place
        return np.array([self.place], np.float32), reward, self.steps == self.num_steps, False, {}


class Constant(Probe):
    """See Probe."""


class Observed(Probe):
    """The reward is the observation: the critic has to look."""

    def start(self):
        return float(self.np_random.choice([-1.0, 1.0]))

    def reward(self, place, action):
        return place


class Discounted(Probe):
    """Two steps, a reward at the second: the critic has to look ahead."""

    num_steps = 2

    def reward(self, place, action):
        return float(self.steps == 1)


class Acted(Probe):
    """The reward is best for action 1: the policy has to find it."""

    def reward(self, place, action):
        return 1.0 - (action - 1.0) ** 2


class Both(Observed):
    """The best action is the observation: the policy has to look."""

    def reward(self, place, action):
        return 1.0 - (action - place) ** 2


ALGORITHMS = {
    "a2c": {"name": "a2c", "learning_rate": 2e-3},
    "ppo": {"name": "ppo", "learning_rate": 1e-2, "critic_learning_rate": 1e-2, "clip_eps": 0.3},
    "ppo2": {"name": "ppo2", "learning_rate": 5e-3, "clip_eps": 0.3},
    "svpg": {
        "name": "svpg",
        "particle": {"name": "a2c", "learning_rate": 2e-3},
        "num_particles": 2,
        "temperature": 0.01,
    },
}


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = ModuleType("probes")
    module.__dict__.update({c.__name__: c for c in (Constant, Observed, Discounted, Acted, Both)})
    monkeypatch.setitem(sys.modules, "probes", module)


class Stored(dict):
    """Outputs that are kept in memory."""

    load = dict.__getitem__


@pytest.fixture
def solve():
    """Trains for a number of iterations, keeping nothing; returns the stages, the learner and the last episodes."""

    def run(env, algorithm, choices, iterations):
        config = build_config(
            {
                "env": {"name": f"probes:{env}", "options": {"choices": choices}},
                "algorithm": ALGORITHMS[algorithm],
                "policy": {"hidden_sizes": [8]} if choices else {"hidden_sizes": [8], "init_std": 0.5},
                "processing": {"discount": DISCOUNT},
                "episodes_per_task": 64,
                "max_episode_steps": 2,
            }
        )
        stages = Runner.build(config, LocalWorkers(SamplerSpec.of(config, 1)), map)
        stored = Stored()
        for iteration in range(iterations):
            for ref in stages.order(iteration):
                stored[ref] = stages.compute(ref, stored)
        return stages, stored[ON_POLICY.learner_ref(iterations)].learner

    return run


def values_of(stages, learner, place):
    """The value of a place to every critic."""
    algorithm, inputs = stages.learner, np.array([[place]], np.float32)
    return [algorithm.steps(part).values(inputs).item() for part in algorithm.split(learner)]


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("env", "values"),
    [
        pytest.param("Constant", {0: 1}, marks=pytest.mark.sweep),
        ("Observed", {-1: -1, 1: 1}),
        ("Discounted", {0: DISCOUNT, 1: 1}),
    ],
)
def test_critics_learn_values_that_are_known(solve, env, values, algorithm):
    stages, learner = solve(env, algorithm, choices=True, iterations=60)
    for place, value in values.items():
        assert values_of(stages, learner, place) == pytest.approx(
            [value] * len(values_of(stages, learner, place)), abs=0.1
        )


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("choices", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("env", [pytest.param("Acted", marks=pytest.mark.sweep), "Both"])
def test_policies_learn_actions_that_are_known(solve, env, algorithm, choices):
    stages, learner = solve(env, algorithm, choices, iterations=80)
    params: TaskParams = stages.learner.acting_params(learner, stages.config.num_tasks)
    tasks = stages.compute(stages.order(1)[0], Stored())
    episodes = stages.rollouts.collect(params, tasks, RolloutPosition(1, 1000, 0))
    wanted = episodes.observations[:, :, 0, 0] if env == "Both" else 1.0
    if choices:
        chosen = 2.0 * episodes.actions[:, :, 0] - 1
        assert (chosen == wanted).mean() > 0.9
    else:
        assert np.abs(episodes.behavior["mean"][:, :, 0, 0] - wanted).mean() < 0.3
