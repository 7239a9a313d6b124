"""Environments that keep something over an episode, and honest ones that look as if they did."""

import time
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs.contract import MetaEnv, TaskField


class Planted(MetaEnv):
    """A walk with noise, whose drift is the task; `kind` names what is special about it."""

    task_fields = (TaskField("drift", "m", "of every step"),)
    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, kind: str = "plain", file: str = "") -> None:
        self.kind, self.file = kind, Path(file)
        self.count, self.cache, self.made, self.mean = 0, {}, np.random.default_rng(7), 0.0
        self.speed, self.drift, self.simulator = 0.0, 0.0, None

    def sample_tasks(self, num_tasks, rng):
        return rng.uniform(1, 2, (num_tasks, 1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.count = 0, self.count + 1
        self.position = self.np_random.normal()
        if self.kind != "task applied late":
            self.drift = float(self.task[0])
        return getattr(self, f"reset_{self.kind.replace(' ', '_')}", self.seen)(), {}

    def step(self, action):
        self.t += 1
        noise = getattr(self, f"noise_{self.kind.replace(' ', '_')}", self.np_random.normal)()
        self.speed = (0.5 * self.speed if self.kind == "simulator built once" else 0) + float(action[0])
        self.position += self.drift + noise + self.speed
        ends = self.kind == "ends at random" and self.np_random.random() < 0.2
        return self.seen(), self.position, ends, False, {}

    def seen(self):
        return np.array([self.position])

    # What breaks the rule.

    def reset_counter(self):
        self.position += self.count
        return self.seen()

    def reset_late_counter(self):
        self.position += self.count > 9
        return self.seen()

    def noise_cache(self):
        return self.cache.setdefault(self.t, self.np_random.normal())

    def noise_generator_made_once(self):
        return self.made.normal()

    def reset_generator_made_once(self):
        self.position = 0.0
        return self.seen()

    def reset_global_generator(self):
        np.random.seed(self.np_random.integers(2**32))  # noqa: NPY002
        return self.seen()

    def noise_global_generator(self):
        return np.random.normal()  # noqa: NPY002

    def reset_task_applied_late(self):
        answer, self.drift = self.seen(), self.drift
        self.drift, self.waiting = getattr(self, "waiting", 0.0), float(self.task[0])
        return answer

    def noise_statistics(self):
        self.mean = 0.9 * self.mean + 0.1 * self.position
        return self.mean

    def noise_wall_clock(self):
        return time.perf_counter()

    def noise_hash_order(self):
        return hash("the order of a set") % 1000

    def noise_file_on_disk(self):
        with self.file.open("a") as lines:
            lines.write("x")
        return self.file.stat().st_size

    # What does not.

    def noise_no_noise(self):
        return 0.0

    def reset_own_generator(self):
        self.made = np.random.default_rng(self.np_random.integers(2**32))
        return self.seen()

    def noise_own_generator(self):
        return self.made.normal()

    def reset_simulator_built_late(self):
        self.simulator = self.simulator or object()
        return self.seen()

    def reset_cache_emptied(self):
        self.cache.clear()
        return self.seen()

    def noise_cache_emptied(self):
        return self.cache.setdefault(self.t % 3, self.np_random.normal())

    def noise_cache_of_what_is_always_so(self):
        return self.cache.setdefault(self.t, np.sin(self.t))

    def noise_statistics_not_shown(self):
        self.mean = 0.9 * self.mean + 0.1 * self.position
        return self.np_random.normal()

    def noise_file_read(self):
        return float(self.file.read_text()) if self.file.is_file() else 0.0
