"""Milliseconds of a gradient step of PEARL: our kernel beside its definition in torch.

    OPENBLAS_NUM_THREADS=1 python benchmarks/pearl_update.py [--threads 2] [--steps 40] [--quick]

At the size of PEARL's half-cheetah-vel. Both start from the same parameters and are given the same noise; before they
are timed their parameters are compared after one step. Steps are timed in turns, and between them products of float32
matrices of the step's size, one per thread at a time: what the machine can do at most. On a busy machine processor time
is the better measure, though not of torch, whose threads wait for one another in loops.
"""
# pyright: reportUnknownLambdaType=false

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from metaloom.pipeline.algorithms.contract import KernelName, Setup
from metaloom.pipeline.algorithms.pearl.learner import PEARLLearner
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import Minibatch, ParallelMap, Transitions

DISCOUNT = 0.99
NUM_PRODUCTS = 64


@dataclass(frozen=True)
class Size:
    """Units and rows of a gradient step."""

    observation: int = 20
    action: int = 6
    tasks: int = 16
    rows: int = 256
    context: int = 100
    critic: tuple[int, ...] = (300, 300, 300)
    encoder: tuple[int, ...] = (200, 200, 200)

    @property
    def settings(self) -> PEARL:
        return PEARL(encoder_hidden_sizes=self.encoder, critic_hidden_sizes=self.critic)

    @property
    def setup(self) -> Setup:
        return Setup(
            observation_shape=(self.observation,),
            observation_scale=1.0,
            action_size=self.action,
            num_actions=0,
            env_name="half-cheetah-vel",
            max_episode_steps=200,
            policy=PolicyConfig(hidden_sizes=self.critic),
            baseline=BaselineConfig(name="zero"),
            processing=ProcessingConfig(discount=DISCOUNT),
            device="cpu",
            sparse_rewards=lambda rewards: rewards,
        )

    def minibatch(self, rng: np.random.Generator) -> Minibatch:
        return Minibatch(self._transitions(rng, self.rows), self._transitions(rng, self.context))

    def _transitions(self, rng: np.random.Generator, rows: int) -> Transitions:
        shape = (self.tasks, rows)

        def normal(*sizes: int) -> np.ndarray:
            return rng.standard_normal((*shape, *sizes)).astype(np.float32)

        actions = np.tanh(normal(self.action))
        return Transitions(
            normal(self.observation), actions, normal(), normal(self.observation), rng.random(shape) < 0.1
        )


@dataclass(frozen=True)
class Timings:
    """Seconds of every timed step: on the clock, and of processors."""

    wall: list[float]
    cpu: list[float]


class Steps:
    """Gradient steps of one kind on the same minibatch, with noise from a generator of their own."""

    def __init__(self, size: Size, kernel: KernelName, minibatch: Minibatch, parallel: ParallelMap = map) -> None:
        learner = size.settings.model_copy(update={"kernel": kernel}).build(size.setup)
        assert isinstance(learner, PEARLLearner)
        self._learner, self._minibatch, self._rng = learner, minibatch, np.random.default_rng(1)
        self.steps = learner.gradient_steps(learner.initialize(run_seed=0), parallel=parallel)

    def step(self) -> None:
        """Make one."""
        self.steps.step(self._minibatch, self._learner.noise(self._minibatch, self._rng))

    def arrays(self) -> dict[str, np.ndarray]:
        """All parameters, by name."""
        state = self.steps.state()
        return {name: v for name, v in (state.params | state.extra).items() if name.endswith(("kernel", "bias"))}


def gflop(size: Size, latent: int) -> float:
    """Multiplications and additions of our step in 1e9: forwards, gradients of layers, errors on their way back."""

    def passes(
        rows: int, inputs: int, hidden: tuple[int, ...], outputs: int, *, forward: int, layers: int, back: int
    ) -> int:
        sizes = (inputs, *hidden, outputs)
        products = [a * b for a, b in pairwise(sizes)]
        return 2 * rows * ((forward + layers) * sum(products) + back * sum(products[1:]))

    rows, state = size.tasks * size.rows, size.observation + latent
    q_inputs, context = state + size.action, size.observation + size.action + 1
    encoder_rows = size.tasks * size.context
    return 1e-9 * (
        passes(encoder_rows, context, size.encoder, 2 * latent, forward=1, layers=1, back=1)
        + passes(rows, state, size.critic, 2 * size.action, forward=1, layers=1, back=1)
        + passes(rows, state, size.critic, 1, forward=2, layers=1, back=1)
        # On stored actions forwards and back for two functions; on new ones forwards for two and back for the lower.
        + passes(rows, q_inputs, size.critic, 1, forward=4, layers=2, back=3)
    )


def main() -> None:
    """Print both medians, their ratio and the rate beside that of plain matrix products."""
    arguments = _arguments()
    size = Size(5, 2, 4, 8, 6, (16, 16), (8, 8)) if arguments.quick else Size()
    steps = 2 if arguments.quick else arguments.steps
    torch.set_num_threads(arguments.threads)
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(arguments.threads) as pool:
        _compare(size)
        _report(size, _time(size, steps, pool), arguments.threads)


def _compare(size: Size) -> None:
    """Refuse to time two different things."""
    minibatch = size.minibatch(np.random.default_rng(0))
    kernel, definition = Steps(size, "fused", minibatch), Steps(size, "torch", minibatch)
    kernel.step()
    definition.step()
    expected = definition.arrays()
    for name, found in kernel.arrays().items():
        # Adam's first step is as long as the step size, 3e-4, wherever a gradient is not zero.
        apart = float(np.abs(found - expected[name]).mean())
        if apart > 3e-6:
            raise SystemExit(f"{name}: parameters are {apart:.1e} apart after one step on average; expected 3e-6")


def _time(size: Size, steps: int, pool: ThreadPoolExecutor) -> dict[str, Timings]:
    rng = np.random.default_rng(0)
    minibatch = size.minibatch(rng)
    kernel, definition = Steps(size, "fused", minibatch, pool.map), Steps(size, "torch", minibatch)
    rows, units = size.tasks * size.rows // 4, size.critic[0]
    factors = rng.standard_normal((rows, units), np.float32), rng.standard_normal((units, units), np.float32)

    def products() -> None:
        for _ in pool.map(lambda _: np.matmul(*factors), range(NUM_PRODUCTS)):
            pass

    acts: dict[str, Callable[[], object]] = {
        "fused": kernel.step,
        "torch": definition.step,
        "products": products,
    }
    timings: dict[str, Timings] = {name: Timings([], []) for name in acts}
    for turn in range(steps + 2):
        for name, act in acts.items():
            wall, cpu = time.perf_counter(), time.process_time()
            act()
            if turn >= 2:  # the first turns fill caches
                timings[name].wall.append(time.perf_counter() - wall)
                timings[name].cpu.append(time.process_time() - cpu)
    return timings


def _report(size: Size, timings: dict[str, Timings], threads: int) -> None:
    work = gflop(size, size.settings.latent_size)
    product_work = NUM_PRODUCTS * 2e-9 * (size.tasks * size.rows // 4) * size.critic[0] ** 2
    print(f"{size.tasks} tasks x {size.rows} rows, {work:.1f} GFLOP per step, {threads} threads")
    for name in ("fused", "torch"):
        wall, cpu = (1e3 * np.array(values) for values in (timings[name].wall, timings[name].cpu))
        print(
            f"{name:<15} wall: median {np.median(wall):7.2f} ms, least {wall.min():7.2f} ms   "
            f"processor: median {np.median(cpu):7.2f} ms, least {cpu.min():7.2f} ms"
        )
    for kind in ("wall", "cpu"):
        ratio = np.median(getattr(timings["torch"], kind)) / np.median(getattr(timings["fused"], kind))
        print(f"torch / fused ({kind}): {ratio:.2f} of medians")
    for kind in ("wall", "cpu"):
        ours = work / np.median(getattr(timings["fused"], kind))
        alone = product_work / np.median(getattr(timings["products"], kind))
        print(f"GFLOP per second ({kind}): fused {ours:.0f}, matrix products alone {alone:.0f}: {ours / alone:.0%}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny size, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
