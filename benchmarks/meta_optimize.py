"""Seconds of process_samples, adapt and meta_optimize at the paper's size, by threads and tasks per chunk.

    python benchmarks/meta_optimize.py [--algorithms promp maml-trpo] [--threads 1 2] [--chunks 1 2 5 10] [--rounds N]

Variants are measured in turns, and the best of the rounds is printed: a busy machine only ever adds.
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, Step, TaskParams
from metaloom.stages.initialize import initialize

TASKS, EPISODES, STEPS, OBSERVATION, ACTION = 40, 20, 100, 17, 6
POLICY = GaussianPolicy(Spaces((OBSERVATION,), 1.0, ACTION, 0), PolicyConfig(hidden_sizes=(64, 64)))

Timings = dict[tuple[int, int, str, str], tuple[float, float]]


def main() -> None:
    """Print the CPU and wall seconds of each stage."""
    arguments = _arguments()
    torch.set_num_threads(1)
    best: Timings = {}
    with threadpool_limits(1):
        for _ in range(arguments.rounds):
            for threads in arguments.threads:
                with ThreadPoolExecutor(threads) as pool:
                    parallel = map if threads == 1 else pool.map
                    for chunk in arguments.chunks:
                        for name in arguments.algorithms:
                            _measure(name, threads, chunk, parallel, best)
    _report(best)


def _measure(name: str, threads: int, chunk: int, parallel: ParallelMap, best: Timings) -> None:
    config = build_config({"env": "half-cheetah-dir", "algorithm": {"name": name, "tasks_per_chunk": chunk}})
    _, learner, _ = build_learner(config)
    state = initialize(learner, At(0, 0), lambda: None).learner
    params = learner.acting_params(state, TASKS)
    steps: list[Step] = []
    for k in range(2):
        episodes = _rollouts(params, np.random.default_rng(k))
        with _timed(best, (threads, chunk, name, "process_samples, 1 round")):
            samples = learner.process(state, episodes, seed=0, parallel=parallel)
        steps.append(Step(episodes, samples, k))
        if k == 0:
            with _timed(best, (threads, chunk, name, "adapt")):
                params = learner.adapt(state, params, steps[0], parallel=parallel)
    with _timed(best, (threads, chunk, name, "meta_optimize")):
        learner.update(state, steps, run_seed=0, iteration=0, parallel=parallel)


@contextmanager
def _timed(best: Timings, key: tuple[int, int, str, str]) -> Iterator[None]:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    spent = (time.process_time() - cpu, time.perf_counter() - wall)
    before = best.get(key, spent)
    best[key] = (min(before[0], spent[0]), min(before[1], spent[1]))


def _rollouts(params: TaskParams, rng: np.random.Generator) -> EpisodeBatch:
    """Episodes of full length under the given parameters; the observations are noise, the reward is an action."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in params.params.items()}
    observations = rng.standard_normal((TASKS, EPISODES, STEPS + 1, OBSERVATION), np.float32)
    rows = torch.from_numpy(observations[:, :, :-1].reshape(TASKS, -1, OBSERVATION))
    mean, log_std = (value.numpy() for value in POLICY.distribution(tensors, rows))
    mean = mean.reshape(TASKS, EPISODES, STEPS, ACTION)
    actions = mean + np.exp(log_std)[:, None] * rng.standard_normal(mean.shape, np.float32)
    directions = np.where(np.arange(TASKS) % 2, 1, -1)[:, None, None]
    return EpisodeBatch(
        observations=observations,
        actions=actions,
        rewards=(directions * actions[..., 0]).astype(np.float32),
        terminated=np.zeros((TASKS, EPISODES), bool),
        truncated=np.ones((TASKS, EPISODES), bool),
        lengths=np.full((TASKS, EPISODES), STEPS, np.int32),
        behavior={"mean": mean, "log_std": log_std[:, 0]},
        reward_terms={},
        initial_state=np.zeros((TASKS, EPISODES, 0)),
    )


def _report(best: Timings) -> None:
    rows = TASKS * EPISODES * STEPS
    print(f"{TASKS} tasks x {EPISODES * STEPS} steps x 2 rounds ({2 * rows} rows), {OBSERVATION}-64-64-{ACTION}")
    print(f"{'threads':>7} {'tasks per chunk':>15}  {'algorithm':<10} {'stage':<24} {'CPU s':>7} {'wall s':>7}")
    for (threads, chunk, name, stage), (cpu, wall) in sorted(best.items(), key=lambda item: item[0][:3]):
        print(f"{threads:>7} {chunk:>15}  {name:<10} {stage:<24} {cpu:>7.3f} {wall:>7.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["promp", "maml-trpo"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each variant, the first warms up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
