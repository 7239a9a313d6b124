"""Wrappers of a user's, sound and not."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple


class Shifted(gymnasium.ObservationWrapper):
    """Adds a number to every observation."""

    def __init__(self, env, by=1.0):
        super().__init__(env)
        self.by = by

    def observation(self, observation):
        return observation + np.float32(self.by)


class Remembers(Shifted):
    """Adds the number of episodes that it has seen."""

    episodes = 0

    def reset(self, **about):
        self.episodes += 1
        self.by = self.episodes
        return super().reset(**about)


class Misfit(Shifted):
    """Promises another shape than it gives."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = Box(-1, 1, (7,), np.float32)


class Halved(gymnasium.RewardWrapper):
    """Halves rewards, but not the terms that the environment reports of them."""

    def reward(self, reward):
        return reward / 2


class Parts(gymnasium.Env):
    """Shows several things at once, as MiniGrid does, and takes a choice of several things at once."""

    observation_space = Dict(
        {
            "heading": Discrete(4, start=1),
            "keys": MultiBinary(2),
            "near": Tuple((Box(-1, 1, (2,), np.float64), MultiDiscrete([2, 3]))),
        }
    )
    action_space = MultiDiscrete([2, 3], start=[0, 5])
    wrong = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.near = self.np_random.uniform(-1, 1, 2)
        return self.seen(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.near = 0.9 * self.near
        return self.seen(), float(action[1] - 5 - action[0]), False, False, {"took": action}

    def seen(self):
        seen = {"heading": 2, "keys": np.array([0, 1], np.int8), "near": (self.near, np.array([1, 0]))}
        return {**seen, **(self.wrong or {})}


class Shows(Parts):
    """Shows one of the parts alone, or all."""

    def __init__(self, part=None):
        self.part = part
        if part is not None:
            self.observation_space = Parts.observation_space[part]

    def seen(self):
        return super().seen() if self.part is None else super().seen()[self.part]


class Spoken(Parts):
    """Also says a sentence, which no array can hold."""

    observation_space = Dict({**Parts.observation_space.spaces, "mission": Text(20)})
    action_space = Discrete(2)

    def step(self, action):
        return self.seen(), 0.0, False, False, {}

    def seen(self):
        return {**super().seen(), "mission": "go to the door"}


class OnlySpoken(Spoken):
    observation_space = Text(20)

    def seen(self):
        return "go to the door"


class Switches(Parts):
    """Throws any of nine switches at once."""

    observation_space = Box(0, 255, (9,), np.uint8)
    action_space = MultiBinary(9)

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.seen(), float(action.sum()), False, False, {}

    def seen(self):
        return np.full(9, 7, np.uint8)


class ManySwitches(Switches):
    action_space = MultiBinary(13)


class Camera(Switches):
    observation_space = Box(0, 255, (8, 8, 3), np.uint8)
    action_space = Box(-1, 1, (1,), np.float32)

    def step(self, action):
        return self.seen(), 0.0, False, False, {}

    def seen(self):
        return self.np_random.integers(0, 256, (8, 8, 3), np.uint8)


class Grasps(Camera):
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(0, 3, (2, 2), np.int64)

    def seen(self):
        return np.zeros(2, np.float32)


class Unbounded(Grasps):
    action_space = Box(-np.inf, np.inf, (1,), np.float32)
