"""PPO beside Stable-Baselines3's PPO on the same environment with the same settings: returns and steps per second.

    pip install -e .[bench]
    python benchmarks/single_task.py --env HalfCheetah-v5 --steps 200000 --seeds 1 2 3
    python benchmarks/single_task.py --env CartPole-v1 --steps 50000

Both collect about 2,048 steps per update (here whole episodes, there a fixed number) and learn in 10 epochs of
minibatches of 64 with Adam at 3e-4, γ 0.99, λ 0.95, clipping at 0.2, gradients of norm 0.5 at most, two layers of 64.
Each seed runs the two one after the other in this process, on one thread each; Metaloom keeps every batch on disk,
Stable-Baselines3 nothing. Steps per second are environment steps over the time from the first reset to the last update.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes.actor_critic import CUSTOMARY_PPO
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit
from metaloom.pipeline.types import Array

STEPS_PER_UPDATE = 2048

Row = dict[str, float]
Curve = tuple[Array, Array]
"""Environment steps at the end of every episode, and the episode's return."""


def run_metaloom(env: str, steps: int, seed: int, threads: int, folder: Path) -> tuple[Row, Curve]:
    """Train through the store; the return is the mean over the episodes of the last tenth of the steps."""
    limit = gymnasium_limit(env)
    assert limit is not None
    config = RunConfig(
        env=EnvConfig(name=env),
        algorithm=CUSTOMARY_PPO,
        iterations=10**4,
        # Whole episodes: as many as come nearest, or short ones until there are enough.
        episodes_per_task=max(1, STEPS_PER_UPDATE // limit) if limit >= 1000 else 128,
        min_steps=None if limit >= 1000 else STEPS_PER_UPDATE,
        stop={"samples": steps},  # pyright: ignore[reportArgumentType]
        seed=seed,
    )
    began, cpu = time.perf_counter(), time.process_time()
    train(config, folder, backend=Backend(workers=0, threads=threads))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    episodes = storage.open_run(folder).episodes().to_pandas()
    made = int(episodes["length"].sum())
    curve = episodes["length"].cumsum().to_numpy(), episodes["return"].to_numpy()
    return _row(made, seconds, cpu_seconds, curve), curve


def run_stable_baselines3(env: str, steps: int, seed: int) -> tuple[Row, Curve]:
    """The same with Stable-Baselines3."""
    import gymnasium
    from stable_baselines3 import PPO as Reference  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.monitor import Monitor  # pyright: ignore[reportMissingImports]

    monitor = Monitor(gymnasium.make(env))
    model = Reference(
        "MlpPolicy",
        monitor,
        learning_rate=3e-4,
        n_steps=STEPS_PER_UPDATE,
        batch_size=64,
        n_epochs=10,
        clip_range=0.2,
        max_grad_norm=0.5,
        seed=seed,
        device="cpu",
        policy_kwargs={"net_arch": [64, 64]},
    )
    began, cpu = time.perf_counter(), time.process_time()
    model.learn(steps)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    lengths, returns = np.array(monitor.get_episode_lengths()), np.array(monitor.get_episode_rewards())
    curve = lengths.cumsum(), returns
    return _row(int(model.num_timesteps), seconds, cpu_seconds, curve), curve


def _row(steps: int, seconds: float, cpu_seconds: float, curve: Curve) -> Row:
    ends, returns = curve
    last = ends > 0.9 * steps
    return {
        "steps": steps,
        "steps_per_second": steps / seconds,
        "cpu_microseconds_per_step": 1e6 * cpu_seconds / steps,
        "last_return": float(returns[last].mean()) if last.any() else np.nan,
    }


def main() -> None:
    """Print a JSON line per seed and program, then the ratio of their speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=1, help="physics threads of Metaloom, where an env can use them")
    parser.add_argument("--plot", type=Path, help="draw the learning curves into this PNG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[Row]] = {"metaloom": [], "stable-baselines3": []}
    curves: dict[str, list[Curve]] = {program: [] for program in rows}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = {
                "metaloom": run_metaloom(arguments.env, arguments.steps, seed, arguments.threads, Path(folder) / "run"),
                "stable-baselines3": run_stable_baselines3(arguments.env, arguments.steps, seed),
            }
        for program, (row, curve) in found.items():
            rows[program].append(row)
            curves[program].append(curve)
            print(json.dumps({"program": program, "seed": seed, **row}), flush=True)
    for what in ("steps_per_second", "cpu_microseconds_per_step", "last_return"):
        means = {program: float(np.mean([row[what] for row in found])) for program, found in rows.items()}
        print(json.dumps({"mean": what, **means}))
    if arguments.plot:
        _plot(curves, arguments.env, arguments.plot)


def _plot(curves: dict[str, list[Curve]], env: str, path: Path) -> None:
    """A line per seed: the mean return of the last ten episodes against environment steps."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (program, found) in zip(("C0", "C1"), curves.items(), strict=True):
        for seed, (ends, returns) in enumerate(found):
            smooth = np.convolve(returns, np.full(10, 0.1), mode="valid")
            ax.plot(ends[9:], smooth, color=color, label=program if seed == 0 else None)
    ax.set(title=f"PPO on {env}", xlabel="environment steps", ylabel="return, mean of ten episodes")
    ax.legend()
    fig.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
