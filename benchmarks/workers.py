"""Growth of sampling with Dask workers: `python benchmarks/workers.py --workers 1 2 --env half-cheetah-dir`.

Rounds of rollouts by each number of workers take turns in one run, at the default size, and have to have equal digests.
Workers that wait cost nothing, so the numbers do not disturb each other; the trainer that gathers the batches does.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from contextlib import ExitStack
from statistics import median

from sampling import policy_params

from metaloom import storage
from metaloom.flows.graph.run_stages import rollout_workers
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend, RolloutWorkers
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition


def main() -> None:
    args = _arguments()
    for name in args.env:
        config = build_config(override(load_settings(args.recipe), [f"env={name}"]))
        env = make_env(config.env)
        tasks = draw_tasks(env, num_tasks=config.num_tasks, run_seed=1, iteration=0)
        policy = policy_params(env.observation_space, env.action_space, config.policy.hidden_sizes[0])
        params = TaskParams.broadcast(policy, config.num_tasks)
        with ExitStack() as stack:
            backends = {n: stack.enter_context(rollout_workers(config, Backend(workers=n))) for n in args.workers}
            print(f"{name}: {_compare(backends, params, tasks, args.rounds)}", flush=True)


def _compare(backends: dict[int, RolloutWorkers], params: TaskParams, tasks: TaskBatch, rounds: int) -> str:
    seconds: dict[int, list[float]] = {workers: [] for workers in backends}
    steps = 0
    for i in range(rounds + 1):
        digests = set()
        for workers, backend in backends.items():
            began = time.perf_counter()
            episodes = backend.collect(params, tasks, RolloutPosition(1, i, 0))
            taken = time.perf_counter() - began
            digests.add(storage.output_digest(storage.digest(episodes)))
            steps = episodes.num_steps
            if i:  # workers make their simulators in the first round
                seconds[workers].append(taken)
        if len(digests) > 1:
            raise SystemExit(f"round {i} has different digests: {digests}")
    best = {workers: min(values) for workers, values in seconds.items()}
    first = min(backends)
    told = [f"{workers} worker(s) {steps / best[workers]:,.0f} steps/s" for workers in backends]
    for workers in backends.keys() - {first}:
        turns = median(a / b for a, b in zip(seconds[first], seconds[workers], strict=True))
        told.append(
            f"{workers} are {best[first] / best[workers]:.2f} x {first} (best rounds), {turns:.2f} x (median turn)"
        )
    return "; ".join([*told, "equal digests"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["half-cheetah-dir"])
    parser.add_argument("--recipe", default="promp-half-cheetah-dir", help="what decides the sizes")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
