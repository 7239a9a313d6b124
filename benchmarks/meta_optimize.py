"""Seconds of process_samples, adapt and meta_optimize at the paper's size, by threads and tasks per chunk.

    python benchmarks/meta_optimize.py [--threads 1 2] [--chunks 1 2 5 10] [--rounds N]

Variants are measured in turns, and the best of the rounds is printed: a busy machine only ever adds.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from pipeline.algorithms import ProMP
from pipeline.algorithms.contract import ParallelMap
from pipeline.baselines import BaselineConfig
from pipeline.config import ProcessingConfig
from pipeline.policies import PolicyConfig
from pipeline.policies.gaussian import GaussianPolicy
from pipeline.types import EpisodeBatch, LearnerState, Samples, Step, TaskParams
from stages.adapt import adapt
from stages.initialize import initialize
from stages.meta_optimize import meta_optimize
from stages.process_samples import process_samples

TASKS, EPISODES, STEPS, OBSERVATION, ACTION = 40, 20, 100, 17, 6
POLICY = GaussianPolicy(OBSERVATION, ACTION, PolicyConfig(hidden_sizes=(64, 64)))

Timings = dict[tuple[int, int, str], tuple[float, float]]


def main() -> None:
    """Print the CPU and wall seconds of each stage."""
    arguments = _arguments()
    torch.set_num_threads(1)
    rounds = [_rollouts(np.random.default_rng(k)) for k in range(2)]
    best: Timings = {}
    with threadpool_limits(1):
        for _ in range(arguments.rounds):
            for threads in arguments.threads:
                with ThreadPoolExecutor(threads) as pool:
                    for chunk in arguments.chunks:
                        _measure(rounds, threads, chunk, map if threads == 1 else pool.map, best)
    _report(best)


def _measure(rounds: list[EpisodeBatch], threads: int, chunk: int, parallel: ParallelMap, best: Timings) -> None:
    promp = ProMP(tasks_per_chunk=chunk)
    learner = initialize(POLICY, promp, run_seed=0).learner
    baseline, settings = BaselineConfig().build(), ProcessingConfig().model_dump()
    samples: list[Samples] = []

    def process() -> None:
        samples.extend(process_samples(episodes, baseline, **settings, parallel=parallel) for episodes in rounds)

    _time(best, (threads, chunk, "process_samples, 2 rounds"), process)
    steps = [Step(*pair, k) for k, pair in enumerate(zip(rounds, samples, strict=True))]
    _time(best, (threads, chunk, "adapt"), lambda: _adapt(promp, learner, steps[0], parallel))
    _time(best, (threads, chunk, "meta_optimize, 5 epochs"), lambda: _optimize(promp, learner, steps, parallel))


def _adapt(promp: ProMP, learner: LearnerState, step: Step, parallel: ParallelMap) -> None:
    adapt(POLICY, promp, learner, TaskParams.broadcast(learner.params, TASKS), step, parallel=parallel)


def _optimize(promp: ProMP, learner: LearnerState, steps: list[Step], parallel: ParallelMap) -> None:
    meta_optimize(POLICY, promp, learner, steps, run_seed=0, iteration=0, parallel=parallel)


def _time(best: Timings, key: tuple[int, int, str], work: Callable[[], None]) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    spent = (time.process_time() - cpu, time.perf_counter() - wall)
    before = best.get(key, spent)
    best[key] = (min(before[0], spent[0]), min(before[1], spent[1]))


def _rollouts(rng: np.random.Generator) -> EpisodeBatch:
    """Episodes of full length around the initial policy; the observations are noise."""
    learner = initialize(POLICY, ProMP(), run_seed=0).learner
    params = {name: torch.from_numpy(value) for name, value in learner.params.items()}
    observations = rng.standard_normal((TASKS, EPISODES, STEPS + 1, OBSERVATION), np.float32)
    rows = torch.from_numpy(observations[:, :, :-1].reshape(-1, OBSERVATION))
    mean = POLICY.distribution(params, rows).mean.numpy().reshape(TASKS, EPISODES, STEPS, ACTION)
    return EpisodeBatch(
        observations=observations,
        actions=mean + rng.standard_normal(mean.shape, np.float32),
        rewards=rng.standard_normal(mean.shape[:-1], np.float32),
        terminated=np.zeros((TASKS, EPISODES), bool),
        truncated=np.ones((TASKS, EPISODES), bool),
        lengths=np.full((TASKS, EPISODES), STEPS, np.int32),
        behavior={"mean": mean, "log_std": np.zeros((TASKS, ACTION), np.float32)},
        reward_terms={},
        initial_state=np.zeros((TASKS, EPISODES, 0)),
    )


def _report(best: Timings) -> None:
    rows = TASKS * EPISODES * STEPS
    print(f"{TASKS} tasks x {EPISODES * STEPS} steps x 2 rounds ({2 * rows} rows), {OBSERVATION}-64-64-{ACTION}")
    print(f"{'threads':>7} {'tasks per chunk':>15}  {'stage':<26} {'CPU s':>7} {'wall s':>7}")
    for (threads, chunk, stage), (cpu, wall) in sorted(best.items(), key=lambda item: item[0][:2]):
        print(f"{threads:>7} {chunk:>15}  {stage:<26} {cpu:>7.3f} {wall:>7.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each variant, the first warms up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
