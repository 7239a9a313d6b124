"""An environment that does one wrong thing, chosen by name. Worker processes import it as `hostile_envs`."""

import ctypes
import os
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import MetaEnv, TaskField

FLOAT64 = np.float64
SIZE = 2


class NotPicklable(Exception):
    def __init__(self, where: str, number: int) -> None:
        super().__init__("carries a lock")
        self.held = (where, number, threading.Lock())


class BadWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even its message can be read")


class Hostile(MetaEnv):
    """Its first number counts the steps of an episode; does `fault` in the step `at` (or in reset, set_task, ...)."""

    task_fields = (TaskField("gain", "1", "factor of the reward"),)
    observation_space = Box(-1e4, 1e7, (SIZE,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, fault: str = "none", at: int = 2, mark: str = "", only_if: str = "") -> None:
        self.fault, self.at, self.mark, self.only_if = fault, at, mark, only_if
        self.buffer = np.zeros(SIZE, np.float32)
        if fault == "raise_in_constructor":
            raise ValueError("the licence server is away")
        if fault == "hang_in_constructor":
            time.sleep(3600)
        if fault == "die_once_in_constructor" and not Path(mark).exists():
            Path(mark).touch()
            os._exit(3)

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> np.ndarray:
        if self.fault == "raise_in_sample_tasks":
            raise ValueError("no tasks today")
        return rng.uniform(1, 2, (num_tasks, 1))

    def set_task(self, task: np.ndarray) -> None:
        super().set_task(task)
        if self.fault == "raise_in_set_task":
            raise ValueError("unknown task")
        if self.fault == "new_space_per_task":
            self.observation_space = Box(-1, 1, (SIZE + 1,), np.float32)
        if self.fault == "changes_the_task":
            task[:] = 77

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.t, self.offset = 0, self.np_random.uniform()
        if self.fault == "raise_in_reset":
            raise ValueError("no start found")
        if self.fault == "nan_in_reset":
            return np.full(SIZE, np.nan, np.float32), {}
        if self.fault == "reset_without_info":
            return self.observation()
        return self.observation(), {}

    def observation(self) -> np.ndarray:
        return np.array([self.t, self.offset], np.float32)

    def step(self, action: np.ndarray):
        self.t += 1
        reward = float(self.task[0] * action[0])
        answer = (self.observation(), reward, False, False, {})
        do = getattr(self, f"do_{self.fault}", None)
        if self.only_if and not Path(self.only_if).exists():
            return answer
        if do is not None and (self.t > self.at or getattr(do, "always", False)):
            return do(action, *answer)
        return answer

    # What it does to its process.

    def do_raise(self, action: Any, *answer: Any):
        raise ValueError("my own bug")

    def do_raise_unpicklable(self, action: Any, *answer: Any):
        raise NotPicklable("here", 1)

    def do_raise_unreadable(self, action: Any, *answer: Any):
        raise BadWords

    def do_sys_exit(self, action: Any, *answer: Any):
        sys.exit(3)

    def do_exit(self, action: Any, *answer: Any):
        os._exit(3)

    def do_segfault(self, action: Any, *answer: Any):
        ctypes.string_at(0)

    def do_abort(self, action: Any, *answer: Any):
        os.abort()

    def do_hang_asleep(self, action: Any, *answer: Any):
        time.sleep(3600)

    def do_hang_busy(self, action: Any, *answer: Any):
        while True:
            pass

    def do_hang_with_the_gil(self, action: Any, *answer: Any):
        # PyDLL keeps the interpreter's lock: no other thread of Python runs any more.
        ctypes.PyDLL(None).sleep(3600)

    def do_raise_keyboard_interrupt(self, action: Any, *answer: Any):
        raise KeyboardInterrupt

    def do_stop_itself(self, action: Any, *answer: Any):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)  # any of its threads may be stopped first, and this one go on for a moment

    def do_fork(self, action: Any, *answer: Any):
        os.fork()  # and both go on
        return answer

    def do_fork_asleep(self, action: Any, *answer: Any):
        if os.fork() == 0:
            time.sleep(3600)
        return answer

    def do_fork_and_hang(self, action: Any, *answer: Any):
        os.fork()
        time.sleep(3600)

    def do_daemonise(self, action: Any, *answer: Any):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        return answer

    def do_become_a_daemon(self, action: Any, *answer: Any):
        if os.fork():
            os._exit(0)
        os.setsid()
        return answer

    def do_close_descriptors(self, action: Any, *answer: Any):
        os.closerange(3, 4096)
        return answer

    def do_close_sockets(self, action: Any, *answer: Any):
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)
        return answer

    def do_close_sockets_and_hang(self, action: Any, *answer: Any):
        self.do_close_sockets(action)
        time.sleep(3600)

    def do_shut_sockets_down(self, action: Any, *answer: Any):
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
                found.shutdown(socket.SHUT_RDWR)
        return answer

    def do_close_descriptors_and_hang(self, action: Any, *answer: Any):
        os.closerange(0, 4096)
        time.sleep(3600)

    def do_endless_threads(self, action: Any, *answer: Any):
        threading.Thread(target=time.sleep, args=(3600,)).start()
        return answer

    def do_alarm(self, action: Any, *answer: Any):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(3600)

    def do_ignore_signals(self, action: Any, *answer: Any):
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            ctypes.CDLL(None).signal(int(number), 1)  # SIG_IGN, which Python allows its main thread alone
        time.sleep(3600)

    def do_kill_its_parent(self, action: Any, *answer: Any):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)

    def do_die_once(self, action: Any, *answer: Any):
        mark = Path(self.mark)
        if not mark.exists():
            mark.touch()
            os._exit(3)
        return answer

    def do_print_in_python(self, action: Any, *answer: Any):
        print("an environment that talks", flush=True)  # noqa: T201
        return answer

    def do_print(self, action: Any, *answer: Any):
        print("an environment that talks")  # noqa: T201
        os.write(1, b"an environment that talks past Python\n")
        return answer

    # What it answers.

    def do_nan_observation(self, action: Any, observation: Any, *rest: Any):
        return observation * np.nan, *rest

    def do_inf_reward(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, np.inf, *rest

    def do_huge_observation(self, action: Any, observation: Any, *rest: Any):
        return observation.astype(np.float64) * 1e300, *rest

    def do_huge_reward(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, 1e300, *rest

    def do_wrong_shape(self, action: Any, observation: Any, *rest: Any):
        return observation[:, None], *rest

    def do_object_observation(self, action: Any, observation: Any, *rest: Any):
        return observation.astype(object), *rest

    def do_text_observation(self, action: Any, observation: Any, *rest: Any):
        return ["1", "2"], *rest

    def do_ragged_observation(self, action: Any, observation: Any, *rest: Any):
        return [[1.0], [1.0, 2.0]], *rest

    def do_array_reward(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, np.array([reward]), *rest

    def do_no_reward(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, None, *rest

    def do_text_flag(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, reward, "False", False, {}

    def do_old_gym(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, reward, False, {}

    def do_info_is_none(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, reward, False, False, None

    def do_ragged_terms(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, reward, False, False, {"reward_terms": {"reward": [reward, [1.0]]}}

    # What a rollout takes as it is.

    def do_float64(self, action: Any, observation: Any, *rest: Any):
        return observation.astype(FLOAT64), *rest

    def do_read_only(self, action: Any, observation: Any, *rest: Any):
        observation.flags.writeable = False
        return observation, *rest

    def do_not_contiguous(self, action: Any, observation: Any, *rest: Any):
        wide = np.full((SIZE, 3), 9, np.float32)
        wide[:, 1] = observation
        return wide[:, 1], *rest

    def do_reused_buffer(self, action: Any, observation: Any, *rest: Any):
        self.buffer[:] = observation
        return self.buffer, *rest

    def do_mutates_action(self, action: Any, *answer: Any):
        action[:] = 1e6
        return answer

    def do_strange_info(self, action: Any, observation: Any, reward: Any, *rest: Any):
        info = {"lambda": lambda: 0, "huge": np.zeros(10**6), "ragged": [[1], [1, 2]], 3: None, "file": sys.stdin}
        return observation, reward, False, False, info

    def do_ends_at_once(self, action: Any, observation: Any, reward: Any, *rest: Any):
        return observation, reward, True, False, {}

    def do_out_of_space(self, action: Any, observation: Any, *rest: Any):
        return observation - 1e5, *rest

    def do_random(self, action: Any, observation: Any, *rest: Any):
        observation[1] = np.random.default_rng().uniform()
        return observation, *rest

    do_ends_at_once.always = True
    do_mutates_action.always = True
    do_reused_buffer.always = True


class Plain(Hostile):
    """Hostile when it does nothing wrong."""


class Choices(Hostile):
    """Actions are choices and episodes short, the more so the later; those of one offset in ten do the wrong thing."""

    action_space = Discrete(3)

    def step(self, action: Any):
        kept, self.fault = self.fault, self.fault if self.offset > 0.9 else "none"
        observation, reward, _, *rest = super().step(np.array([action]))
        self.fault = kept
        return observation, reward, self.t >= 3 + 2 * self.offset, *rest
