"""RL2's update beside the bare GRU in it, and acting with a memory beside the physics of the half-cheetah, in turns.

    python benchmarks/recurrent.py [--blocks 5] [--hidden 128] [--trials 80] [--steps 200]

An update is 5 epochs of minibatches of 10 whole trials of `steps` steps with 17 observations and 6 actions; the bare
one runs torch's nn.GRU forward and backward over the same minibatches and does nothing else. Acting is a step of 40
tasks with 2 trials each. Processor time on one thread; printed are medians.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.trials.settings import RL2
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.remembering import Remembering
from metaloom.pipeline.types import EpisodeBatch, Step, TaskParams

OBSERVATIONS, ACTIONS = 17, 6
EPOCHS, MINIBATCH = 5, 10
TASKS, TRIALS_EACH, ACTING_STEPS = 40, 2, 50


def main() -> None:
    """Print the times of both pairs and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="rounds of each")
    parser.add_argument("--hidden", type=int, default=128, help="units of the GRU")
    parser.add_argument("--trials", type=int, default=80, help="in an iteration")
    parser.add_argument("--steps", type=int, default=200, help="of a trial of two episodes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = PolicyConfig(network="gru", hidden_sizes=(arguments.hidden,))
    timed = {
        "update": _update(policy, arguments.trials, arguments.steps),
        "bare GRU": _bare(arguments.hidden, arguments.trials, arguments.steps),
        "acting": _acting(policy),
        "physics": _physics(),
    }
    medians = _medians(timed, arguments.blocks)
    steps = EPOCHS * arguments.trials * arguments.steps
    for name in ("update", "bare GRU"):
        print(f"{name:10} {medians[name]:8.3f} s  {steps / medians[name] / 1000:7.1f} k steps/s")
    print(f"update runs at {medians['bare GRU'] / medians['update']:.2f} of the bare GRU's speed")
    for name in ("acting", "physics"):
        print(f"{name:10} {1000 * medians[name] / ACTING_STEPS:8.3f} ms per step of {TASKS * TRIALS_EACH} rows")
    together = medians["acting"] + medians["physics"]
    print(f"sampling runs at {medians['physics'] / together:.2f} of the physics' speed")


def _medians(timed: Mapping[str, Callable[[], object]], blocks: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for n in range(blocks + 1):
        for name, work in timed.items():
            began = time.process_time()
            work()
            if n:  # the first one touches memory and caches
                seconds[name].append(time.process_time() - began)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _update(policy: PolicyConfig, trials: int, steps: int) -> Callable[[], object]:
    setup = Setup(
        observation_shape=(OBSERVATIONS,),
        observation_scale=1.0,
        action_size=ACTIONS,
        num_actions=0,
        env_name="none",
        max_episode_steps=steps // 2,
        policy=policy,
        baseline=BaselineConfig(name="zero"),
        processing=ProcessingConfig(),
        device="cpu",
        sparse_rewards=lambda rewards: rewards,
    )
    learner = RL2(num_epochs=EPOCHS, trials_per_minibatch=MINIBATCH).build(setup)
    state, rng, T = learner.initialize(run_seed=0), np.random.default_rng(0), steps // 2
    shape = (trials, 2, T)

    def draw(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32)

    none = np.zeros(shape[:2], np.bool_)
    episodes = EpisodeBatch(
        observations=draw(trials, 2, T + 1, OBSERVATIONS),
        actions=draw(*shape, ACTIONS),
        rewards=draw(*shape),
        terminated=none,
        truncated=~none,
        lengths=np.full(shape[:2], T, np.int32),
        behavior={"mean": draw(*shape, ACTIONS), "log_std": np.zeros((trials, ACTIONS), np.float32)},
        reward_terms={},
        initial_state=np.zeros((trials, 2, 0)),
    )
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    return lambda: learner.update(state, [step], run_seed=0, iteration=0)


def _bare(hidden: int, trials: int, steps: int) -> Callable[[], object]:
    network = torch.nn.GRU(OBSERVATIONS + ACTIONS + 2, hidden)
    inputs = torch.randn(steps, trials, OBSERVATIONS + ACTIONS + 2)

    def run() -> None:
        for _ in range(EPOCHS):
            for part in inputs.split(MINIBATCH, dim=1):
                network.zero_grad()
                network(part)[0].sum().backward()

    return run


def _acting(policy: PolicyConfig) -> Callable[[], object]:
    from metaloom.pipeline.policies.build import RecurrentPolicy

    spaces = Spaces((OBSERVATIONS,), 1.0, ACTIONS, 0)
    initial = RecurrentPolicy(spaces, policy).initialize(np.random.default_rng(0), 1.0)
    remembering = Remembering(policy, spaces, TaskParams.broadcast(initial, TASKS), TRIALS_EACH)
    rows = np.arange(TASKS * TRIALS_EACH)
    rewards, ended = np.ones(len(rows), np.float32), np.zeros(len(rows), np.bool_)

    def run() -> None:
        for _ in range(ACTING_STEPS):
            actions = remembering.outputs().reshape(len(rows), -1)
            remembering.keep(rows, actions)
            remembering.learn_of(rows, rewards, ended)

    return run


def _physics() -> Callable[[], object]:
    config, num_rows = EnvConfig(name="half-cheetah-dir", action_scale=1.0), TASKS * TRIALS_EACH
    batch, rows = make_batch_env(config, num_rows), np.arange(num_rows)
    tasks = make_env(config).sample_tasks(num_rows, np.random.default_rng(0))
    actions = np.random.default_rng(0).standard_normal((ACTING_STEPS, num_rows, ACTIONS)).astype(np.float32)

    def run() -> None:
        batch.reset(tasks, np.arange(num_rows, dtype=np.uint64))
        for step in actions:
            batch.step(step, rows)

    return run


if __name__ == "__main__":
    main()
