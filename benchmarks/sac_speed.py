"""Gradient steps per second of SAC: our kernel, its definition in torch, and Stable-Baselines3 where it is installed.

    pip install -e .[bench]
    python benchmarks/sac_speed.py [--threads 1] [--blocks 20] [--steps 200]

Minibatches of 256, networks of two layers of 256, observations and actions of HalfCheetah-v5; all take turns within one
run and draw their minibatches from 100,000 remembered steps within the time. Torch has `--threads` threads; as many
share out the parts of a minibatch in the kernel. Printed are medians over blocks; of a busy machine, believe processor
time.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import sac_settings as same
import torch
from threadpoolctl import threadpool_limits

from metaloom.pipeline.algorithms.contract import KernelName, Setup
from metaloom.pipeline.algorithms.off_policy.settings import SAC, Filling, OffPolicyPlan
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns
from metaloom.pipeline.replay.index import TaskIndex
from metaloom.pipeline.types import EpisodeBatch, ParallelMap
from metaloom.stages.sample_transitions import draw_transitions

ENV = "HalfCheetah-v5"
REFERENCE = "stable-baselines3"
OBSERVATION, ACTION = 17, 6
EPISODES, LENGTH = 100, 1000

Block = Callable[[], object]
"""Makes the next gradient steps."""


def main() -> None:
    """Print milliseconds per gradient step of every block, and medians."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    experience = _experience()
    with ThreadPoolExecutor(args.threads) as pool:
        parallel = map if args.threads == 1 else pool.map
        blocks = {f"metaloom, {name}": _metaloom(experience, args.steps, parallel, name) for name in ("fused", "torch")}
        if (reference := _reference(experience)) is not None:
            blocks[REFERENCE] = reference(args.steps)
        for name, block in blocks.items():
            _seconds(block, name)  # first touches memory and caches
        seconds = {name: np.zeros((2, args.blocks)) for name in blocks}
        for n in range(args.blocks):
            for name, block in blocks.items():
                seconds[name][:, n] = _seconds(block, name)
    for name, values in seconds.items():
        wall, cpu = 1e3 * np.median(values, axis=1) / args.steps
        print(f"{name:18} {wall:7.2f} ms per gradient step, {cpu:7.2f} ms of processor time")
    *ours, slowest = seconds
    for name in ours:
        for what, ratios in zip(("clock", "processor"), seconds[slowest] / seconds[name], strict=True):
            low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            print(f"by the {what} {name} is {median:.2f} times as fast as {slowest} ({low:.2f} to {high:.2f})")
    if slowest != REFERENCE:
        print(f"{REFERENCE} is not installed; `pip install -e .[bench]` to compare with it")


def _seconds(block: Block, name: str) -> tuple[float, float]:
    """Seconds of the clock, and of the processor."""
    began, cpu = time.perf_counter(), time.process_time()
    # Metaloom's stages keep BLAS to one thread per call.
    with threadpool_limits(None if name == REFERENCE else 1, user_api="blas"):
        block()
    return time.perf_counter() - began, time.process_time() - cpu


def _experience() -> EpisodeBatch:
    rng = np.random.default_rng(0)
    shape = (1, EPISODES, LENGTH)
    rewards = rng.standard_normal(shape, np.float32)
    return EpisodeBatch(
        observations=rng.standard_normal((1, EPISODES, LENGTH + 1, OBSERVATION), np.float32),
        actions=rng.uniform(-1, 1, (*shape, ACTION)).astype(np.float32),
        rewards=rewards,
        terminated=np.zeros((1, EPISODES), np.bool_),
        truncated=np.ones((1, EPISODES), np.bool_),
        lengths=np.full((1, EPISODES), LENGTH, np.int32),
        behavior={},
        reward_terms={"reward": rewards},
        initial_state=np.zeros((1, EPISODES, 0)),
    )


def _metaloom(experience: EpisodeBatch, steps: int, parallel: ParallelMap, kernel: KernelName) -> Block:
    settings = SAC(
        kernel=kernel,
        learning_rate=same.LEARNING_RATE,
        memory_size=same.MEMORY_SIZE,
        batch_size=same.BATCH_SIZE,
        tau=same.OLD_TARGET_WEIGHT,
        ent_coeff_init=same.FIRST_TEMPERATURE,
        critic_hidden_sizes=same.HIDDEN_SIZES,
        max_grad_norm=None,
    )
    setup = Setup(
        observation_shape=(OBSERVATION,),
        observation_scale=1.0,
        action_size=ACTION,
        num_actions=0,
        env_name=ENV,
        max_episode_steps=LENGTH,
        policy=PolicyConfig(hidden_sizes=same.HIDDEN_SIZES),
        baseline=BaselineConfig(name="zero"),
        processing=ProcessingConfig(discount=same.DISCOUNT),
        device="cpu",
        sparse_rewards=lambda rewards: rewards,
    )
    learner = settings.build(setup)
    columns = TransitionColumns(OBSERVATION, ACTION)
    room = 2 * EPISODES * LENGTH
    tasks, buffer = TaskIndex(), ReplayBuffer(columns, cache_bytes=room * columns.row_bytes, max_rows=room)
    tasks.append(-1, [0], experience.lengths, in_context=False)
    buffer.append(experience.lengths)
    state, iteration = learner.initialize(run_seed=1), 0
    plan = OffPolicyPlan(Filling("uniform"), (), None, 1, same.BATCH_SIZE, context_size=0, memory_size=same.MEMORY_SIZE)

    def block() -> None:
        nonlocal state, iteration
        at = At(run_seed=1, iteration=iteration)
        chosen = draw_transitions(tasks.as_of(0), plan, at, [0], num_updates=steps, max_updates=steps)
        minibatches = buffer.minibatches(chosen, lambda number: experience)
        state, _ = learner.update(state, minibatches, run_seed=1, iteration=iteration, parallel=parallel)
        iteration += 1

    return block


def _reference(experience: EpisodeBatch) -> Callable[[int], Block] | None:
    """Makes blocks of so many gradient steps; None where Stable-Baselines3 is not installed."""
    try:
        from sac_reference import reference_model
    except ModuleNotFoundError:
        return None
    model = reference_model(gymnasium.make(ENV), seed=1)
    buffer = model.replay_buffer
    assert buffer is not None
    for e in range(EPISODES):
        observations, actions, rewards = (
            values[0, e] for values in (experience.observations, experience.actions, experience.rewards)
        )
        for t in range(LENGTH):
            ended = np.array([t == LENGTH - 1])
            about = [{"TimeLimit.truncated": bool(ended[0])}]
            buffer.add(observations[t], observations[t + 1], actions[t], rewards[t : t + 1], ended, about)
    model.prepare_to_train()
    return lambda steps: lambda: model.train(steps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=20, help="of each")
    parser.add_argument("--steps", type=int, default=200, help="gradient steps per block")
    return parser.parse_args()


if __name__ == "__main__":
    main()
