"""Faults that stop a rollout, with the data to reproduce them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from metaloom.pipeline.envs.answers import RowFault, last_line, own_traceback
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import Array, TaskBatch
from metaloom.stages.faults import StageFault


class RolloutError(StageFault):
    """Raised when an environment fails or returns unusable values.

    `about` contains stage, iteration, step, env, run_seed, call, env_step, problem, traceback, and one episode's task
    (with task_id, task_params), episode and seed. If a batched environment did not report the row, the seeds of all
    rows replace the episode's. `arrays` contains `task` [P] and `actions` [t, A] of the episode up to the fault, or
    `tasks` [N, P] and `actions` [t, N, A]. `metaloom.stages.rollouts.reproduce.reproduce` replays the fault.
    """


@dataclass(frozen=True)
class RolloutPosition:
    """Position of a rollout in its run, which determines its random streams."""

    run_seed: int
    iteration: int
    step: int  # inner step k
    first_task: int = 0  # index of a shard's first task in the meta-batch
    first_episode: int = 0  # index of the first episode within its task

    def reset_seed(self, task: int, episode: int, bits: int) -> int:
        """Return the reset seed, an integer of `bits` bits, for one episode of one of the shard's tasks."""
        return seed_for(self.run_seed, "resets", *self.of_episode(task, episode)) % 2**bits

    def of_episode(self, b: int, e: int) -> tuple[int, ...]:
        """Return (iteration, step, task, episode) for episode `e` of the shard's task `b`."""
        return (self.iteration, self.step, self.first_task + b, self.first_episode + e)

    def of_task(self, b: int) -> tuple[int, ...]:
        """Return the position that seeds the actions of the shard's task `b`."""
        place = (self.iteration, self.step, self.first_task + b)
        return (*place, self.first_episode) if self.first_episode else place


@dataclass(frozen=True)
class Circumstances:
    """Rollout data used to describe a fault in any episode of a shard of `tasks`, which starts at `position`."""

    env: EnvConfig
    tasks: TaskBatch
    position: RolloutPosition
    episodes_per_task: int

    def fault(
        self, problem: str, call: str, trace: str, row: int | None, *, env_step: int | None, actions: Array
    ) -> RolloutError:
        """Return the error that describes a problem.

        Args:
            problem: Actual and expected behavior.
            call: Phase: "make", "set_task", "reset", "step", or "act" (checking the policy's action).
            trace: Traceback within the environment; empty if there is none.
            row: Row of the episode among the shard's B * E; None if unknown.
            env_step: Step of the episode, from 0; None before the first.
            actions: Actions, [T, N, A]; only the ones up to the fault are kept.
        """
        taken = (0 if env_step is None else env_step + 1, slice(None) if row is None else row)
        about: dict[str, Any] = {
            "stage": "collect_rollouts",
            "iteration": self.position.iteration,
            "step": self.position.step,
            "env": self.env.model_dump(mode="json"),
            "run_seed": self.position.run_seed,
            "call": call,
            "env_step": env_step,
            "problem": problem,
            "traceback": trace,
        }
        kept = {"actions": np.array(actions[: taken[0], taken[1]], np.float32)}
        at, E, bits = self.position, self.episodes_per_task, self.env.seed_bits
        if row is None:
            about |= {
                "task": None,
                "episode": None,
                "tasks": [at.first_task, at.first_task + len(self.tasks)],
                "episodes_per_task": E,
                "seeds": [at.reset_seed(b, e, bits) for b, e in np.ndindex(len(self.tasks), E)],
            }
            kept["tasks"] = np.repeat(self.tasks.params, E, axis=0)
        else:
            b, e = divmod(row, E)
            about |= {
                "task": at.first_task + b,
                "task_id": int(self.tasks.ids[b]),
                "task_params": dict(zip(self.tasks.names, self.tasks.params[b].tolist(), strict=True)),
                "episode": at.first_episode + e,
                "seed": at.reset_seed(b, e, bits),
            }
            kept["task"] = self.tasks.params[b].copy()
        return RolloutError(describe(about), about, kept)


def problem_of(error: BaseException, env_step: int | None) -> tuple[str, str, str, int | None]:
    """Return an environment error's description, the failed call, the environment's traceback, and the row if known."""
    if isinstance(error, RowFault):
        return str(error), error.call, own_traceback(error.__cause__), error.row
    call = "reset" if env_step is None else "step"
    return f"{call} raised {last_line(error)}", call, own_traceback(error), None


def not_finite(name: str) -> str:
    return f"{name} are not finite; the environment and the policy must return finite float32 numbers"


def describe(about: Mapping[str, Any]) -> str:
    """Return the message of a RolloutError: circumstances, what happened, and the environment's traceback."""
    if "evaluation" in about:
        stage = f"evaluate, {about['evaluation']}"
    elif "adaptation" in about:
        stage = f"adapt, step {about['adaptation']}"
    else:
        stage = f"iteration {about['iteration']}, collect_rollouts k={about['step']}"
    if about["task"] is None:
        first, stop = about["tasks"]
        whose = f"one of tasks {first} to {stop - 1}"
    else:
        params = ", ".join(f"{name}={value:g}" for name, value in about["task_params"].items())
        whose = f"task {about['task']}{f' ({params})' if params else ''}"
        whose += f", episode {about['episode']} (reset seed {about['seed']})"
    when = {"make": "when it was made", "set_task": "in set_task"}.get(about["call"], "in reset")
    if about["env_step"] is not None:
        when = f"step {about['env_step']}"
    trace = f"\nIts own traceback:\n{about['traceback'].rstrip()}" if about["traceback"] else ""
    return f"{stage}: {about['env']['name']}, {whose}, {when}: {about['problem']}{trace}"
