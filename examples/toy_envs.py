"""Three toy environments with tasks: discrete states and actions, facts, and classes of tasks.

usage: metaloom train promp --set env=toy_envs:Oven, in this folder
"""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import Fact, MetaEnv, TaskField
from metaloom.pipeline.envs.task_classes import nearest


class Cards(MetaEnv):
    """Twelve cards; the right key pays 1 nine times out of ten and otherwise costs 1, the wrong one the reverse."""

    task_fields = (TaskField("red", "1", "key of red cards"), TaskField("black", "1", "key of black cards"))
    task_set = ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
    task_classes = nearest(("red", "black"), {"both 0": (0, 0), "red 0": (0, 1), "red 1": (1, 0), "both 1": (1, 1)})
    observation_space = Discrete(2)  # the card
    action_space = Discrete(2)  # the key
    facts = (Fact("success", "flag", per="episode"),)

    def sample_tasks(self, num_tasks, rng):
        return rng.integers(0, 2, (num_tasks, 2)).astype(float)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown, self.right = 0, 0
        self.card = int(self.np_random.integers(2))
        return self.card, {}

    def step(self, action):
        right = int(action) == int(self.task[self.card])
        pays = right == bool(self.np_random.random() < 0.9)
        self.shown, self.right = self.shown + 1, self.right + right
        self.card = int(self.np_random.integers(2))
        facts = {"success": self.right >= 10}
        return self.card, 1.0 if pays else -1.0, self.shown == 12, False, {"facts": facts}


class Oven(MetaEnv):
    """Heat an oven to a temperature that only the reward reveals."""

    task_fields = (TaskField("target", "°C", "temperature to reach"),)
    observation_space = Box(-50, 50, (1,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)
    facts = (
        Fact("success", "flag"),  # per step; true in any step is success of the episode
        Fact("error", "number", unit="K"),
        Fact("heated", "number", per="episode", unit="K"),  # only of the episode's last step
    )

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(1, 5, (num_tasks, 1))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.temperature = self.began = self.np_random.uniform(-1, 1)
        return np.array([self.temperature]), {}

    def step(self, action):
        self.temperature = float(np.clip(self.temperature + float(action[0]), -50, 50))
        error = abs(self.temperature - float(self.task[0]))
        facts = {"success": error < 0.5, "error": error, "heated": self.temperature - self.began}
        return np.array([self.temperature]), -error, False, False, {"facts": facts}


class Room(MetaEnv):
    """Heat or cool a room to a temperature that only the reward reveals."""

    task_fields = (TaskField("target", "°C", "temperature to hold"),)
    task_classes = nearest("target", {"cool": 10, "warm": 25})
    observation_space = Box(-50, 50, (1,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(5, 30, (num_tasks, 1))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.temperature = self.np_random.uniform(5, 30, 1)
        return self.temperature.copy(), {}

    def step(self, action):
        self.temperature = np.clip(self.temperature + action, -50, 50)
        comfort = -abs(float(self.temperature[0] - self.task[0]))
        return self.temperature.copy(), comfort, False, False, {"reward_terms": {"comfort": comfort}}
