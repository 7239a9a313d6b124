"""Rehearsal of an environment, which checks that episodes do not depend on earlier ones.

It runs as a separate program, since an environment may crash or hang its process.
"""

import faulthandler
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.answers import check_facts, declared_facts, last_line
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchEnv, EnvError, Fact
from metaloom.pipeline.envs.facts import component_facts
from metaloom.pipeline.envs.outer_wrappers import STATISTICS
from metaloom.pipeline.envs.registry import make_batch_env, make_env, require_env
from metaloom.pipeline.envs.wrappers import is_bounded
from metaloom.pipeline.global_random import Draw, GlobalRandomWatch
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.types import Array

ROUNDS, LEAST_ROUNDS, ROWS, STEPS, SECONDS = 8, 4, 2, 125, 2.0
"""Number of batches, minimum number of batches, episodes per batch, maximum steps per episode, and processor time.
Episodes are shortened so that the minimum number of batches fits into the time; no batch begins after that time. Many
short episodes reveal more than one long episode."""

_ALTERNATIVES = 4


def refusal(who: str, draw: Draw | None = None) -> str:
    """Return the error message for an environment that gave different results for the same seed and actions.

    `who` is the subject of the sentence. `draw` is the draw from a global generator that causes the difference, if
    known. Training also rejects such draws, except in an installed package.
    """
    why = draw or "Draw only from self.np_random and restore all state in reset"
    remedy = "" if draw and not draw.installed else "; to train on it anyway: --set env.copies=kept"
    return (
        f"{who} gave different results for the same task, seed and actions; they must be identical, or no run could "
        f"be resumed or replayed. {why}{remedy}"
    )


class Answer(NamedTuple):
    """An array that an environment returned at a step; step -1 is the reset."""

    step: int
    name: str
    values: Array


class Rehearsal:
    """Plays episodes with fixed tasks, seeds and actions, on reused copies and on new ones.

    Episodes have at most `max_steps` steps. The process exits if an episode takes longer than `timeout_seconds`.
    """

    def __init__(self, config: EnvConfig, max_steps: int, timeout_seconds: float | None = None) -> None:
        self.config: EnvConfig = config
        self.steps: int = min(max_steps, STEPS)
        self.timeout_seconds: float | None = timeout_seconds
        env = make_env(config)
        self.space: gymnasium.Space[Any] = env.action_space
        self.facts: tuple[Fact, ...] = declared_facts(env)
        self.tasks: Array = np.asarray(env.sample_tasks(ROUNDS * ROWS, generator(0, "tasks", 0)), np.float64)
        seeds = [seed_for(0, "resets", 0, 0, n, 0) % 2**config.seed_bits for n in range(ROUNDS * ROWS)]
        self.seeds: Array = np.array(seeds, np.uint64)
        env.close()
        self.hurries = False
        self.pid: int = os.getpid()
        self.making: list[float] = []
        self.playing: list[float] = []

    def alone(self, n: int, *, task: int | None = None, seed: int | None = None) -> list[Answer]:
        """Play episode n on a new copy, optionally with the task or seed of another episode."""
        began = time.perf_counter()
        batch = make_batch_env(self.config, 1)
        self.making.append(time.perf_counter() - began)
        (answers,) = self.play(batch, [n], task=task, seed=seed)
        batch.close()
        self.playing.append(time.perf_counter() - began)
        return answers

    def play(
        self, batch: BatchEnv, episodes: Sequence[int], *, task: int | None = None, seed: int | None = None
    ) -> list[list[Answer]]:
        """Play episodes in parallel. A single episode may use the task or seed of another one."""
        if self.timeout_seconds is not None:
            faulthandler.dump_traceback_later(self.timeout_seconds, exit=True)
        rngs = [np.random.default_rng(n) for n in episodes]
        tasks = self.tasks[[*episodes] if task is None else [task]]
        seeds = self.seeds[[*episodes] if seed is None else [seed]]
        answers = [[Answer(-1, "observations", row)] for row in batch.reset(tasks, seeds).copy()]
        self._end_copies()
        rows = np.arange(len(episodes))
        spent = stopwatch()
        for t in range(self.steps):
            # Act like a new policy: discrete actions are equally likely, and continuous actions may exceed the box.
            if isinstance(self.space, Discrete):
                actions = np.array([rng.integers(self.space.n) for rng in rngs])
            else:
                shape = self.space.shape or ()
                actions = np.stack([rng.normal(0, 3, shape).astype(np.float32) for rng in rngs])
            step = batch.step(actions[rows], rows)
            self._end_copies()
            check_facts(step.facts, self.facts, rows)
            arrays = {"observations": step.observations, **step.reward_terms, **step.facts}
            arrays |= {"terminated": step.terminated, "truncated": step.truncated}
            for i, row in enumerate(rows.tolist()):
                answers[row] += [Answer(t, name, np.array(values[i])) for name, values in arrays.items()]
            rows = rows[~(step.terminated | step.truncated)]
            if not len(rows):
                break
            if t == 0:
                spent = stopwatch()  # exclude one-time costs up to the first step
            elif self.hurries and spent() > SECONDS / LEAST_ROUNDS / 2:
                self.steps: int = t + 1
                break
        faulthandler.cancel_dump_traceback_later()
        return answers

    def _end_copies(self) -> None:
        """Exit if this process is a fork that the environment made, since each fork would fork again."""
        if os.getpid() != self.pid:
            os._exit(0)

    def find(self) -> dict[str, Any]:
        """Return the required `copies` setting, `notes` for the user, and the first episodes' digests and length.

        Returns only a `refusal` if results are not reproducible. Episodes are shortened if steps are slow.
        """
        self.hurries: bool = True
        used = make_batch_env(self.config, ROWS)
        alone: list[list[Answer]] = []
        past, spent = "", stopwatch()
        for number in range(ROUNDS):
            episodes = range(number * ROWS, (number + 1) * ROWS)
            for n, answers in zip(episodes, self.play(used, episodes), strict=True):
                new = self.alone(n)
                alone.append(new)
                where = first_difference(new, answers[: len(new)])
                if where and not past:
                    if again := first_difference(new, self.alone(n)):
                        return {"refusal": refusal(f"two new copies ({again} of episode {n})", self._draw(n))}
                    if number == 0:
                        who = f"a copy stepped with another one, and one stepped alone ({where} of episode {n}),"
                        return {"refusal": refusal(who, self._draw(n))}
                    past = f"{where} of episode {n}"
            if past or (number + 1 >= LEAST_ROUNDS and spent() > SECONDS):
                break
        used.close()
        return {
            "copies": "fresh" if past else "kept",
            "notes": [*self._notes(past)],
            "alone": [digest(answer for answer in new if answer.step < self.steps) for new in alone[:ROWS]],
            "steps": self.steps,
        }

    def _draw(self, n: int) -> Draw | None:
        """Return the first draw from a global generator in episode n, or None."""
        self.alone((n + 1) % len(self.seeds))  # else, an environment that reseeds it in episode n would not change it
        return GlobalRandomWatch().draw_of(lambda: self.alone(n), "the rehearsal")[1]

    def _notes(self, past: str) -> Iterator[str]:
        if past:
            making, playing = 1000 * np.mean(self.making), 1000 * np.mean(self.playing)
            yield (
                f"an episode depends on earlier episodes of its copy ({past}), so every episode is played on a new "
                f"copy (env.copies=fresh), which takes {making:.3g} of {playing:.3g} ms for {self.steps} steps"
            )
        first = self.alone(0)
        others = range(1, _ALTERNATIVES)
        if not any(first_difference(first, self.alone(0, seed=n)) for n in others):
            yield (
                f"{_ALTERNATIVES} reset seeds gave the same {self.steps} steps with the same actions; if the "
                "environment should be random, it must use the seed passed to reset"
            )
        others = [n for n in range(1, len(self.tasks)) if (self.tasks[n] != self.tasks[0]).any()][: len(others)]
        if others and not any(first_difference(first, self.alone(0, task=n)) for n in others):
            yield (
                f"{1 + len(others)} tasks gave the same {self.steps} steps with the same actions; if tasks should "
                "affect the steps, set_task or reset must apply them"
            )


def first_difference(one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """Return the name and step of the first array that differs between two episodes, or ""."""
    for a, b in zip(one, other, strict=False):
        if (a.step, a.name) != (b.step, b.name) or a.values.tobytes() != b.values.tobytes():
            return f"{a.name} {'after reset' if a.step < 0 else f'at step {a.step}'}"
    return "" if len(one) == len(other) else "the length"


def digest(answers: Iterable[Answer]) -> str:
    """Return a digest of an episode's arrays."""
    parts = (f"{answer.step} {answer.name}\0".encode() + answer.values.tobytes() for answer in answers)
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def stopwatch() -> Callable[[], float]:
    """Return a function that measures the processor time since now, or a tenth of the elapsed time if that is greater.

    The elapsed time matters if a simulator runs in another process.
    """
    processor, began = time.process_time(), time.monotonic()
    return lambda: max(time.process_time() - processor, (time.monotonic() - began) / 10)


def missed_box(space: gymnasium.Space[Any]) -> str:
    """Return a message that says how much of the action box a new Gaussian policy misses, or "" if it is little."""
    if not isinstance(space, Box) or not is_bounded(space):
        return ""
    low, high = space.low.astype(float), space.high.astype(float)
    beyond = max(NormalDist().cdf(float(low.max())), NormalDist().cdf(-float(high.min())))
    reached = np.clip(np.minimum(high, 3) - np.maximum(low, -3), 0, None) / np.where(high > low, high - low, 1)
    if beyond < 0.45 and reached.min() > 0.1:
        return ""
    return (
        f"actions lie in {space}. A new policy, with mean 0 and standard deviation 1, reaches "
        f"{100 * reached.min():.2g}% of it, and {100 * beyond:.2g}% of its actions are clipped to one bound; "
        "--set env.action_scale=3 maps them onto the whole box"
    )


def _statistics_wrapper(env: gymnasium.Env[Any, Any]) -> str:
    """Return the name of a gymnasium wrapper in `env` that normalizes with statistics over episodes, or ""."""
    inner: Any = env
    while isinstance(inner, gymnasium.Env) and not isinstance(inner, tuple(STATISTICS)):
        inner = getattr(inner, "env", None)
    return type(inner).__name__ if isinstance(inner, tuple(STATISTICS)) else ""


_NORMALIZES = (
    "%s normalizes by the statistics of all episodes that a copy has played, which no run stores. Remove it and "
    f"use {' or '.join(STATISTICS.values())}, which keep such "
    "statistics in the learner; to train with it anyway: --set env.copies=kept"
)


def _first_step_problem(config: EnvConfig) -> str:
    try:
        Rehearsal(config, 1).alone(0)
    except EnvError as problem:  # already names the environment
        return str(problem)
    except BaseException as problem:
        return last_line(problem)
    return ""


def main(steps: int, thorough: bool, timeout_seconds: float) -> dict[str, Any]:
    """Return findings about the environment whose settings are on standard input, as JSON data.

    With 0 steps, only the actions are examined. Unless `thorough`, only the digests of the first episodes are returned.
    """
    config = EnvConfig.model_validate_json(sys.stdin.read())
    try:
        require_env(config.name)
    except EnvError:
        return {"unknown": True}
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    try:
        env = make_env(config)
        component_facts(env)
    except EnvError:  # training will report it
        return {}
    if config.copies == "auto" and (wrapper := _statistics_wrapper(env)):
        return {"refusal": _NORMALIZES % wrapper}
    found: dict[str, Any] = {"discrete": isinstance(env.action_space, Discrete), "misses": missed_box(env.action_space)}
    env.close()
    bare = config.model_copy(update={"wrappers": ()})
    if config.wrappers and (problem := _first_step_problem(config)) and not _first_step_problem(bare):
        return {"refusal": f"env.wrappers: {problem}; without them the environment steps as it should"}
    if steps:
        try:
            rehearsal = Rehearsal(config, steps, timeout_seconds)
            found |= rehearsal.find() if thorough else {"alone": [digest(rehearsal.alone(n)) for n in range(ROWS)]}
        except BaseException as problem:
            found["notes"] = [f"the rehearsal failed ({last_line(problem)}); copies are reused across episodes"]
    return found


if __name__ == "__main__":
    # Environments may print, or close files that they did not open, so write the result to a separate descriptor.
    _answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _answer.write(json.dumps(main(int(sys.argv[1]), sys.argv[2] == "1", float(sys.argv[3]))))
    _answer.close()
    os._exit(0)
