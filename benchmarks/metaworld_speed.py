"""Steps per second of each class of ML10: rules for rows, the package's vector environment, and the physics alone.

    python benchmarks/metaworld_speed.py [--rows 20] [--steps 100] [--blocks 3] [--classes reach push]

Rules for rows are an environment batch of this project with `rows` episodes of one class, as sampling steps it; the
package's are `metaworld.make_ml_envs` in one process, with five environments, because its time per step does not depend
on their number; physics alone is MuJoCo's batch of the same rows with the same actions, of which nothing is read.
Actions are uniform. The three take turns in blocks of `steps` steps from the starts of episodes on; processor time on
one thread, the fastest block of each. Resets are timed apart.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.metaworld.batch import Computation
from metaloom.pipeline.envs.metaworld.names import BENCHMARKS
from metaloom.pipeline.envs.metaworld.oracle import MAX_STEPS, OfficialClass, RowPhysics
from metaloom.pipeline.envs.metaworld.package import official_classes
from metaloom.pipeline.envs.mujoco_robot import stop_profiling_timer
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import Array

OFFICIAL_ROWS = 5
KINDS = ("rules", "official", "physics")


def main() -> None:
    """Print a table, and what all classes together take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20, help="episodes side by side, at most 50")
    parser.add_argument("--steps", type=int, default=100, help="in a block, at most 500")
    parser.add_argument("--blocks", type=int, default=3, help="of each kind")
    parser.add_argument("--classes", nargs="+", default=[*BENCHMARKS["ml10"].train, *BENCHMARKS["ml10"].test])
    args = parser.parse_args()
    print(f"{'class':22}{'rules':>9}{'official':>9}{'physics':>9}   steps per second; gain, part of physics")
    times = np.array([_class(name, args.rows, args.steps, args.blocks) for name in args.classes])
    gain, part = times[:, 1].sum() / times[:, 0].sum(), times[:, 2].sum() / times[:, 0].sum()
    print(f"{'all':22}{_speeds(times.mean(axis=0))}   {gain:4.1f}  {part:.2f}")
    print(
        f"a first reset takes {1000 * times[:, 3].mean():.1f} ms per row, later ones {1000 * times[:, 4].mean():.2f} ms"
    )


def _class(name: str, rows: int, steps: int, blocks: int) -> tuple[float, ...]:
    """Seconds per step of one row of KINDS, then of a first and of a later reset."""
    actions = np.random.default_rng(0).uniform(-1, 1, (min(steps, MAX_STEPS), rows, 4)).astype(np.float32)
    resets: list[float] = []
    work = {
        "rules": _rules(name, actions, resets, "auto"),
        "official": _official(name, actions[:, :OFFICIAL_ROWS]),
        "physics": _physics(name, actions),
    }
    turns = [[work[kind]() for kind in KINDS] for _ in range(blocks)]
    seconds = dict(zip(KINDS, np.min(turns, axis=0).tolist(), strict=True))
    found = (*(seconds[kind] for kind in KINDS), resets[0], min(resets[1:], default=resets[0]))
    gain, part = found[1] / found[0], found[2] / found[0]
    print(f"{name:22}{_speeds(np.array(found))}   {gain:4.1f}  {part:.2f}", flush=True)
    return found


def _speeds(seconds: Array) -> str:
    return "".join(f"{1 / each:9,.0f}" for each in seconds[: len(KINDS)])


def _rules(name: str, actions: Array, resets: list[float], computation: Computation) -> Callable[[], float]:
    env: Any = make_env(EnvConfig(name=f"metaworld-ml1-{name}", options={"computation": computation})).unwrapped
    num_rows = actions.shape[1]
    batch, tasks, rows = env.batch(num_rows, 1), np.array(env.task_set)[:num_rows], np.arange(num_rows)
    resets.append(_time(lambda: batch.reset(tasks, rows.astype(np.uint64))) / num_rows)

    def block() -> float:
        resets.append(_time(lambda: batch.reset(tasks, rows.astype(np.uint64))) / num_rows)
        return _time(lambda: [batch.step(action, rows) for action in actions]) / actions[..., 0].size

    return block


def _official(name: str, actions: Array) -> Callable[[], float]:
    import metaworld

    official_classes()  # fits the package to newer MuJoCo
    envs: Any = metaworld.make_ml_envs(
        f"{name}-v3", seed=0, meta_batch_size=OFFICIAL_ROWS, split="train", task_select="pseudorandom"
    )

    def block() -> float:
        envs.call("sample_tasks")
        envs.reset()
        return _time(lambda: [envs.step(action) for action in actions]) / actions[..., 0].size

    return block


def _physics(name: str, actions: Array) -> Callable[[], float]:
    official = OfficialClass(name, goal_visible=False, reward_version="v2")
    env: Any = make_env(EnvConfig(name=f"metaworld-ml1-{name}")).unwrapped
    goals = [official.goal_of(np.array(task[1:])) for task in env.task_set[: actions.shape[1]]]
    starts, rows = [official.start(goal) for goal in goals], np.arange(actions.shape[1])

    def block() -> float:
        physics = RowPhysics(official.env, starts, num_threads=1)
        stop_profiling_timer()
        return _time(lambda: [physics.step(action, rows) for action in actions]) / actions[..., 0].size

    return block


def _time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
