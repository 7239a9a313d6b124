"""Sampling speed beside gymnasium's AsyncVectorEnv and EnvPool: `python benchmarks/peers.py --env half-cheetah-dir`.

A policy of the same sizes acts in all three, 64x64, on the same cores, in turns within one run. Here and in EnvPool
every task has parameters of its own; AsyncVectorEnv, whose rows are fewer, has one set for all, which spares it work.
The peers run gymnasium's v5 robot with the frame skip of ours; their rewards, tasks and (walker2d) the friction of one
foot differ, which costs nothing. Steps in which a peer only resets an ended episode count as its steps. AsyncVectorEnv
runs with several numbers of processes: as many as tasks, and fewer. EnvPool is an optional dependency:
`pip install -e '.[bench]'`.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import gymnasium
import numpy as np
from sampling import policy_params

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import MEAN_NETWORK, network_inference
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import Array, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes

GYMNASIUM_IDS = {
    "half-cheetah": "HalfCheetah-v5",
    "ant": "Ant-v5",
    "humanoid": "Humanoid-v5",
    "swimmer": "Swimmer-v5",
    "walker2d": "Walker2d-v5",
    "hopper": "Hopper-v5",
}


class VectorEnv(Protocol):
    """Interface of both peers."""

    def reset(self) -> tuple[Any, Any]: ...

    def step(self, actions: Array, /) -> tuple[Any, ...]: ...

    def close(self) -> None: ...


def main() -> None:
    args = _arguments()
    results = []
    for name in args.env:
        for cores in args.cores:
            os.sched_setaffinity(0, sorted(args.all_cores)[:cores])
            results.append({"env": name, "cores": cores, **_compare(args, name, cores)})
            if not args.json:
                print(_line(results[-1]), flush=True)
    if args.json:
        print(json.dumps(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["half-cheetah-dir"])
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8, 40], help="of AsyncVectorEnv")
    parser.add_argument("--seconds", type=float, default=3, help="of each peer's turn in a round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.all_cores = os.sched_getaffinity(0)
    return args


def _line(result: dict[str, Any]) -> str:
    peers = {name: speed for name, speed in result.items() if name not in ("env", "cores", "metaloom")}
    ratios = ", ".join(f"{result['metaloom'] / speed:.1f} x {name} ({speed:,.0f})" for name, speed in peers.items())
    return f"{result['env']}, {result['cores']} core(s): {result['metaloom']:,.0f} steps/s; {ratios}"


def _compare(args: argparse.Namespace, name: str, cores: int) -> dict[str, float]:
    """Steps per second by peer."""
    own: Any = make_env(EnvConfig(name=name)).unwrapped
    frame_skip, box = own.frame_skip, own.action_space
    robot = next(robot for robot in GYMNASIUM_IDS if name.removeprefix("pearl-").startswith(robot))
    id = GYMNASIUM_IDS[robot]
    with _async_vector_envs(args, id, frame_skip) as processes, _envpool(args, id, frame_skip, cores) as pool:
        turns = {"metaloom": _metaloom(args, name, cores)}
        for number, env in zip(args.processes, processes, strict=True):
            turns[f"async_vector_env({number})"] = partial(_steps_per_second, args, env, box, tasks=1)
        turns["envpool"] = partial(_steps_per_second, args, pool, box, tasks=args.tasks)
        rounds = [{peer: turn() for peer, turn in turns.items()} for _ in range(args.rounds)]
    # The best round of each is the one that other programs disturbed least.
    return {peer: max(speeds[peer] for speeds in rounds) for peer in turns}


def _metaloom(args: argparse.Namespace, name: str, threads: int) -> Callable[[], float]:
    config, policy = EnvConfig(name=name), PolicyConfig(hidden_sizes=(args.hidden, args.hidden))
    env = make_env(config)
    tasks = draw_tasks(env, num_tasks=args.tasks, run_seed=1, iteration=0)
    params = TaskParams.broadcast(policy_params(env.observation_space, env.action_space, args.hidden), args.tasks)
    sampler = Sampler(
        config, policy, episodes_per_task=args.episodes, max_episode_steps=args.steps, num_threads=threads
    )

    def round() -> float:
        began = time.perf_counter()
        episodes = play_episodes(sampler, params, tasks, position=RolloutPosition(1, 0, 0))
        return episodes.num_steps / (time.perf_counter() - began)

    round()
    return round


@contextmanager
def _async_vector_envs(args: argparse.Namespace, id: str, frame_skip: int) -> Iterator[list[VectorEnv]]:
    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(id, max_episode_steps=args.steps, frame_skip=frame_skip)

    envs: list[Any] = [gymnasium.vector.AsyncVectorEnv([make] * number) for number in args.processes]
    yield envs
    for env in envs:
        env.close()


@contextmanager
def _envpool(args: argparse.Namespace, id: str, frame_skip: int, cores: int) -> Iterator[VectorEnv]:
    import envpool  # pyright: ignore[reportMissingImports] - of the extra [bench]

    number = args.tasks * args.episodes
    env = envpool.make_gymnasium(
        id, num_envs=number, num_threads=cores, max_episode_steps=args.steps, frame_skip=frame_skip
    )
    yield env
    env.close()


def _steps_per_second(args: argparse.Namespace, env: VectorEnv, actions: Any, tasks: int) -> float:
    observations, _ = env.reset()
    rows = len(observations)
    params = policy_params(observations[0], actions, args.hidden)
    spaces = Spaces(observations[0].shape, 1.0, actions.shape[0], 0)
    spec = PolicyConfig(hidden_sizes=(args.hidden, args.hidden)).network_spec(spaces, spaces.action_size)
    policy = network_inference(MEAN_NETWORK, spec, TaskParams.broadcast(params, tasks), rows // tasks)
    rng = np.random.default_rng(1)
    began, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < args.seconds:
        policy.inputs[:] = np.reshape(observations, policy.inputs.shape)
        mean = policy.outputs()
        noisy = (mean + rng.standard_normal(mean.shape, np.float32)).reshape(rows, -1)
        # As our own policies act: the box of the policy is ten times wider than its noise.
        observations, *_ = env.step((noisy / 10 * actions.high).clip(actions.low, actions.high).astype(actions.dtype))
        steps += rows
    return steps / seconds


if __name__ == "__main__":
    main()
