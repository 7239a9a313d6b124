"""Environments of users, in a module without tests: processes that play them import nothing else."""

from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import Component, Fact, MetaEnv, TaskField
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.envs.task_classes import nearest

LINK = '<a href="https://example.org/x">{}</a>'


class Reach(MetaEnv):
    """One axis; tells a flag of steps, an optional number of steps, and a number of the episode."""

    observation_space = Box(-10, 10, (1,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)
    task_set = ((),)
    facts = (Fact("success", "flag"), Fact("force", unit="N", optional=True), Fact("moves", per="episode"))

    def __init__(self, wrong: str = ""):
        self.wrong = wrong

    def sample_tasks(self, num_tasks, rng):
        return np.zeros((num_tasks, 0))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1), {}

    def told(self):
        facts = {"success": self.t == 2, "force": np.nan if self.t < 3 else 7.0, "moves": self.t}
        wrong = {
            "missing": lambda: facts.pop("moves"),
            "undeclared": lambda: facts.update(height=1.0),
            "nan": lambda: facts.update(moves=np.nan),
            "shape": lambda: facts.update(force=np.zeros(2)),
            "flag": lambda: facts.update(success=0.5),
            "infinite": lambda: facts.update(force=np.inf),
        }
        if self.t == 2 and self.wrong:
            wrong[self.wrong]()
        return facts

    def step(self, action):
        self.t += 1
        return np.zeros(1), 0.0, self.t == 4, False, {"reward_terms": {"none": 0.0}, "facts": self.told()}


class Gym(gymnasium.Env):
    """A plain environment that tells success its own way."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"is_success": np.float32(1), "far": 0.25, "facts": "other"}


class Bells(MetaEnv):
    """Ring the one bell of four that pays; all that is seen is the bell that was rung last."""

    task_fields = (TaskField("bell", "1", "the bell that pays"),)
    task_set = ((0.0,), (1.0,), (2.0,), (3.0,))
    observation_space = Box(0, 1, (4,), np.float64)
    action_space = Discrete(4)

    def sample_tasks(self, num_tasks, rng):
        return rng.integers(4, size=(num_tasks, 1)).astype(np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4), {}

    def step(self, action):
        return np.eye(4)[int(action)], float(action == self.task[0]), False, False, {}


class Noting(Bells):
    taken: ClassVar[set[int]] = set()

    def step(self, action):
        self.taken.add(int(action))
        return super().step(action)


class Tank(gymnasium.Env):
    """A user's environment, which knows nothing of us."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)
    observation_components = (("level", "m"), ("inflow", "m3/s"))
    action_components = (("valve", "1"),)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.array([action[0], 0.5], np.float32), float(action[0]), False, False, {}


class Short(Tank):
    observation_components = (("level", "m"),)


class Twice(Tank):
    observation_components = (("level", "m"), ("level", "m"))


class Legacy(gymnasium.Env):
    """Seeds itself as older simulators do."""

    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.random = np.random.RandomState(seed)
        return self.random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        return self.random.uniform(-1, 1, 1).astype(np.float32), 0.0, False, False, {}


class Unlimited(Legacy):
    action_space = Box(0, 512, (1,), np.float32)


class Linked(PointCorner):
    """Names everything that charts show as a link to another host."""

    task_classes = nearest(("goal_x", "goal_y"), {LINK.format("left"): (-2, 0), LINK.format("right"): (2, 0)})
    observation_components = (Component("x", LINK.format("m")), Component("y", "m"))
