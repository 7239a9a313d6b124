"""PPO and A2C beside those of Stable-Baselines3, on the same environment with the same settings: returns and time.

    pip install -e .[bench]
    python benchmarks/single_task.py ppo --env HalfCheetah-v5 --steps 200000 --seeds 1 2 3 4 5
    python benchmarks/single_task.py a2c --env CartPole-v1 --steps 100000 --steps-per-update 200

Both collect about as many steps per update, here whole episodes and there a fixed number, with γ 0.99, λ 0.95, two
layers of 64 and gradients of norm 0.5 at most. PPO learns in 10 epochs of minibatches of 64 by Adam at 3e-4 and clips
at 0.2; A2C makes one gradient step from all steps by RMSprop at 7e-4, from standardized advantages.

With --normalize, observations and rewards are normalized: here by policy.normalize_observations and
processing.scale_rewards, there by VecNormalize.

Each seed runs the two one after the other in this process, on one thread each; Metaloom keeps every batch on disk,
Stable-Baselines3 nothing. A JSON file per program and seed is written to `--out`, and read instead of training where
there is one. Steps per second are environment steps over the time from the first reset to the last update.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side_by_side import Curve, Row, compared_returns, complete_row, draw, last_return

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import RECIPES
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.algorithms.actor_critic.settings import A2C
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig

MOST_EPISODES = 128
"""Per iteration: enough for its steps. Places for more, though empty, would take time."""
SMOOTHED = 10
"""Episodes whose mean is a point of a curve."""
LEARNING_RATE_A2C = 7e-4
ALGORITHMS = {
    "ppo": RECIPES["ppo"]().algorithm,
    "a2c": A2C(
        learning_rate=LEARNING_RATE_A2C,
        batch_size=10**6,  # all steps of an iteration
        value_target="td_lambda",
        value_coeff=1.0,  # of half the mean square, there half of the mean square
        entropy_coeff=0.0,
        max_grad_norm=0.5,
    ),
}


def run_metaloom(args: argparse.Namespace, seed: int) -> Row:
    """Train through the store."""
    config = RunConfig(
        env=EnvConfig(name=args.env),
        algorithm=ALGORITHMS[args.algorithm],
        policy=PolicyConfig(normalize_observations=args.normalize),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95, scale_rewards=args.normalize),
        iterations=args.steps,
        episodes_per_task=MOST_EPISODES,
        min_steps=args.steps_per_update,
        stop={"samples": args.steps},  # pyright: ignore[reportArgumentType]
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        spent = _timed(lambda: train(config, path, backend=Backend(workers=0, threads=args.threads)))
        episodes = storage.open_run(path).episodes().to_pandas()
    return {"lengths": episodes["length"].tolist(), "returns": episodes["return"].tolist(), **spent}


def run_stable_baselines3(args: argparse.Namespace, seed: int) -> Row:
    """The same with Stable-Baselines3."""
    import gymnasium
    from stable_baselines3 import A2C as ReferenceA2C  # pyright: ignore[reportMissingImports]
    from stable_baselines3 import PPO as ReferencePPO  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.monitor import Monitor  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # pyright: ignore[reportMissingImports]

    monitor = Monitor(gymnasium.make(args.env))
    env: Any = VecNormalize(DummyVecEnv([lambda: monitor]), gamma=0.99) if args.normalize else monitor
    same: dict[str, Any] = {
        "max_grad_norm": 0.5,
        "gae_lambda": 0.95,
        "seed": seed,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [64, 64]},
    }
    if args.algorithm == "ppo":
        steps, minibatch = 64 * math.ceil(args.steps_per_update / 64), {"batch_size": 64, "n_epochs": 10}
        model = ReferencePPO("MlpPolicy", env, n_steps=steps, learning_rate=3e-4, clip_range=0.2, **minibatch, **same)
    else:
        same |= {"n_steps": args.steps_per_update, "learning_rate": LEARNING_RATE_A2C, "normalize_advantage": True}
        model = ReferenceA2C("MlpPolicy", env, **same)
    spent = _timed(lambda: model.learn(args.steps))
    return {"lengths": monitor.get_episode_lengths(), "returns": monitor.get_episode_rewards(), **spent}


PROGRAMS = {"metaloom": run_metaloom, "stable-baselines3": run_stable_baselines3}


def main() -> None:
    """Print a JSON line per seed and program, then both beside each other."""
    args = _arguments()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {program: [] for program in PROGRAMS}
    for seed in args.seeds:
        for program in PROGRAMS:
            rows[program].append(_trained(program, seed, args))
            print(json.dumps({"program": program, "seed": seed, **_summary(rows[program][-1])}), flush=True)
    for what in ("steps_per_second", "cpu_microseconds_per_step"):
        means = {program: float(np.mean([_summary(row)[what] for row in found])) for program, found in rows.items()}
        print(json.dumps({"mean": what, **means}))
    for line in compared_returns({program: [last_return(row) for row in found] for program, found in rows.items()}):
        print(line)
    if args.plot:
        curves = {program: [_smooth(row) for row in found] for program, found in rows.items()}
        title = f"{args.algorithm.upper()} on {args.env}"
        draw(args.plot, title, f"return, mean of {SMOOTHED} episodes", curves)


def _trained(program: str, seed: int, args: argparse.Namespace) -> Row:
    """Contents of a run's file, which is written now if there is none."""
    kind = f"{args.algorithm}{'-normalized' if args.normalize else ''}"
    path = args.out / f"{kind}_{args.env}_{program}_seed{seed}.json"
    same = ("algorithm", "env", "steps", "steps_per_update", "threads")
    about = {"program": program, "seed": seed, **{name: getattr(args, name) for name in same}}
    about |= {"normalize": True} if args.normalize else {}
    if not (row := complete_row(path, about)):
        row = {**about, **PROGRAMS[program](args, seed), "complete": True}
        path.write_text(json.dumps(row))
    return row


def _timed(work: Callable[[], object]) -> Row:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def _summary(row: Row) -> dict[str, float]:
    steps = sum(row["lengths"])
    return {
        "steps": steps,
        "steps_per_second": steps / row["seconds"],
        "cpu_microseconds_per_step": 1e6 * row["cpu_seconds"] / steps,
        "last_return": last_return(row),
    }


def _smooth(row: Row) -> Curve:
    """Environment steps at the end of every episode, and the mean return of the ten up to it, or of all so far."""
    sums = np.concatenate([[0.0], np.cumsum(row["returns"])])
    last = np.arange(1, len(sums))
    first = np.maximum(last - SMOOTHED, 0)
    return np.cumsum(row["lengths"]), (sums[last] - sums[first]) / (last - first)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--steps-per-update", type=int, default=2000, help="at least; there rounded up to minibatches")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=1, help="physics threads of Metaloom, where an env can use them")
    parser.add_argument("--normalize", action="store_true", help="observations and rewards, by running statistics")
    parser.add_argument("--out", type=Path, default=Path("build/single-task"), help="folder of the results")
    parser.add_argument("--plot", type=Path, help="draw the learning curves into this PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
