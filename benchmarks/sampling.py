"""Sampling speed against the physics alone: `python benchmarks/sampling.py --env half-cheetah-dir`.

Closed loop is `collect_rollouts` as training runs it: resets, noise, policy, physics, observations, rewards, batch.
Open loop is the same physics on the same cores: the closed loop's own actions from its own first states, in one call
into MuJoCo per round, with nothing read in between. Rounds of both alternate, so that a busy machine slows both.
For robots without MuJoCo the open loop is their batch stepped with those actions.
"""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import argparse
import os

# Before numpy loads its BLAS: what a worker has.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import cProfile
import json
import pstats
import time
from collections.abc import Callable, Iterator
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import Batch

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contact_batch import CONTACT_FORCES, PhysicsBatch
from metaloom.pipeline.envs.mujoco_robot import MujocoRobot, physics_batch, stop_profiling_timer
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.wrappers import PolicyActions
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Params, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes


def main() -> None:
    args = _arguments()
    config = EnvConfig(name=args.env)
    env = make_env(config)
    assert isinstance(env, PolicyActions)
    tasks = draw_tasks(env, num_tasks=args.tasks, run_seed=1, iteration=0)
    params = TaskParams.broadcast(policy_params(env.observation_space, env.action_space, args.hidden), args.tasks)
    results = [_compare(args, config, env, tasks, params, threads) for threads in args.threads]
    if args.json:
        print(json.dumps(results))
        return
    for result in results:
        speeds = [f"{result[f'{loop}_loop_steps_per_second']:,.0f}" for loop in ("open", "closed")]
        print(
            f"{args.env}, {result['threads']} thread(s): {speeds[0]} steps/s in open loop, {speeds[1]} in closed loop, "
            f"ratio {result['ratio']:.3f}"
        )
        shares = ", ".join(f"{name} {share:.1%}" for name, share in result["shares"].items())
        print(f"  shares of a profiled round: {shares}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="half-cheetah-dir")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _compare(
    args: argparse.Namespace, config: EnvConfig, env: PolicyActions, tasks: TaskBatch, params: TaskParams, threads: int
) -> dict[str, Any]:
    policy = PolicyConfig(hidden_sizes=(args.hidden, args.hidden))
    sampler = Sampler(
        config, policy, episodes_per_task=args.episodes, max_episode_steps=args.steps, num_threads=threads
    )

    def closed_loop() -> EpisodeBatch:
        return play_episodes(sampler, params, tasks, position=RolloutPosition(1, 0, 0))

    physics = open_loop(env, closed_loop(), tasks, threads)
    seconds = {"open": [], "closed": []}
    for _ in range(args.rounds):
        seconds["open"].append(_time(physics))
        seconds["closed"].append(_time(closed_loop))
    steps = closed_loop().num_steps
    # The best round of each is the one that other programs disturbed least.
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "env": args.env,
        "threads": threads,
        "open_loop_steps_per_second": steps / best["open"],
        "closed_loop_steps_per_second": steps / best["closed"],
        "ratio": best["open"] / best["closed"],
        "shares": _shares(closed_loop),
    }


def open_loop(env: PolicyActions, episodes: EpisodeBatch, tasks: TaskBatch, threads: int) -> Callable[[], object]:
    B, E, T = episodes.rewards.shape
    # [N, T, A]; MuJoCo's rows rest once their episode has ended, point robots go on with zero actions.
    actions = env.action_map(episodes.actions.reshape(B * E, T, -1))
    if isinstance(env.env, MujocoRobot):
        return _physics(env.env, actions, episodes, np.repeat(tasks.params, E, axis=0), threads)
    batch = env.env.batch(B * E, threads)
    if batch is None:
        raise SystemExit(f"{type(env.unwrapped).__name__} has no batch to compare with; it is a loop over copies")
    task_rows = np.repeat(tasks.params, E, axis=0)
    seeds = np.array([seed_for(1, "resets", 0, 0, b, e) for b in range(B) for e in range(E)], np.uint64)
    rows = np.arange(B * E)
    time_major = np.ascontiguousarray(np.moveaxis(actions, 1, 0))

    def steps() -> None:
        batch.reset(task_rows, seeds)
        for step in time_major:
            batch.step(step, rows)

    return steps


def _physics(
    robot: MujocoRobot, actions: Array, episodes: EpisodeBatch, tasks: Array, threads: int
) -> Callable[[], object]:
    batch = physics_batch(robot.model, len(actions), threads, contact_forces=CONTACT_FORCES in robot.derived)
    qpos, qvel = batch.bind("qpos"), batch.bind("qvel")
    if isinstance(batch, Batch):
        robot.write_models(batch, tasks)
    lengths = episodes.lengths.reshape(-1)
    parts = list(_parts(np.repeat(actions, robot.frame_skip, axis=1), lengths * robot.frame_skip))
    first = episodes.initial_state.reshape(len(actions), -1)
    nq = robot.model.nq

    def rollout() -> None:
        stop_profiling_timer()
        batch.reset(stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        qpos[:], qvel[:] = first[:, :nq], first[:, nq:]
        batch.forward()
        for rows, controls in parts:
            _advance(batch, robot.frame_skip, rows, controls)

    rollout()
    found = robot.observe(qpos, qvel).astype(np.float32)
    ends = episodes.observations.reshape(len(actions), -1, episodes.observations.shape[3])
    # Some robots observe more than joints; these columns come first.
    if not np.array_equal(found, ends[np.arange(len(ends)), lengths][:, : found.shape[1]]):
        raise SystemExit("open and closed loop end in different states, so they did not compute the same physics")
    return rollout


def _advance(batch: PhysicsBatch, frame_skip: int, rows: Array | None, controls: Array) -> None:
    if isinstance(batch, Batch):
        batch.rollout(controls.shape[1], controls, int(mujoco.mjtState.mjSTATE_CTRL), record=(), ids=rows)
        return
    # Contact forces are part of these robots' physics, once per control step.
    ctrl, places = batch.bind("ctrl"), slice(None) if rows is None else rows
    for control in np.moveaxis(controls[:, ::frame_skip], 1, 0):
        ctrl[places] = control
        batch.step(rows, frame_skip)


def _parts(controls: Array, lengths: Array) -> Iterator[tuple[Array | None, Array]]:
    """The rollout cut where episodes end: for each part, the rows that still run (None: all) and their controls."""
    start = 0
    for end in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths >= end)
        yield None if len(rows) == len(lengths) else rows, np.ascontiguousarray(controls[rows, start:end])
        start = end


def policy_params(observations: Any, actions: Any, hidden: int) -> Params:
    """Parameters of a policy with two hidden layers for these spaces."""
    sizes = [observations.shape[0], hidden, hidden, actions.shape[0]]
    rng = generator(1, "initialize")
    params: Params = {}
    for layer, rows, columns in zip(("hidden_0", "hidden_1", "output"), sizes[:-1], sizes[1:], strict=True):
        bound = np.sqrt(6 / (rows + columns))
        params[f"mean_network.{layer}.kernel"] = rng.uniform(-bound, bound, (rows, columns)).astype(np.float32)
        params[f"mean_network.{layer}.bias"] = np.zeros(columns, np.float32)
    params["log_std"] = np.zeros(sizes[-1], np.float32)
    return params


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _shares(closed_loop: Callable[[], object]) -> dict[str, float]:
    """Break the time of a round down under the profiler (which itself adds a little to small calls)."""
    profile = cProfile.Profile()
    profile.runcall(closed_loop)
    stats: Any = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue] - not in the stubs
    parts = {
        "physics": ("batch.py", "step"),
        "policy": ("inference.py", "mean"),
        "resets": ("wrappers.py", "reset"),
        "actions with policy": ("collect_rollouts.py", "_act_in_all"),
        "physics with rules": ("wrappers.py", "step"),
        "recording": ("collect_rollouts.py", "_record"),
        "to [B, E, T]": ("collect_rollouts.py", "_episodes"),
    }
    total = max(values[3] for values in stats.values())
    shares = {}
    for name, (file, function) in parts.items():
        found = [v[3] for (path, _, called), v in stats.items() if called == function and path.endswith(file)]
        if found:
            shares[name] = max(found) / total
    return shares


if __name__ == "__main__":
    main()
