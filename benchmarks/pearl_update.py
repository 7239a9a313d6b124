"""Milliseconds of a gradient step of PEARL, beside the same step written with torch.nn and autograd.

    OPENBLAS_NUM_THREADS=1 python benchmarks/pearl_update.py [--threads 2] [--steps 40] [--quick]

At the size of PEARL's half-cheetah-vel. Both start from the same parameters and are given the same noise; before they
are timed their parameters are compared after one step. Steps are timed in turns, and between them products of float32
matrices of the step's size, one per thread at a time: what the machine can do at most. On a busy machine processor time
is the better measure, though not of torch, whose threads wait for one another in loops.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.algorithms.pearl.update import GradientSteps
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.types import LearnerState, Minibatch, Transitions

DISCOUNT = 0.99
NUM_PRODUCTS = 64
STORED = {"policy": "policy_network", "encoder": "encoder", "q1": "q1", "q2": "q2", "v": "v", "target_v": "target_v"}


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
    def policy(self) -> OffPolicyPolicy:
        return OffPolicyPolicy(self.observation, self.action, 0, PolicyConfig(hidden_sizes=self.critic))

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


class TorchStep:
    """PEARL's gradient step as one would write it down."""

    def __init__(self, settings: PEARL, learner: LearnerState) -> None:
        self.settings = settings
        stored = learner.params | learner.extra
        self.nets = {name: _sequential(stored, prefix) for name, prefix in STORED.items()}
        trained = (name for name in self.nets if name != "target_v")
        self.adam = {name: torch.optim.Adam(self.nets[name].parameters(), lr=3e-4) for name in trained}

    def step(self, minibatch: Minibatch, rng: np.random.Generator) -> None:
        nets, settings = self.nets, self.settings
        obs, actions, rewards, next_obs, terminated = _tensors(minibatch.transitions)
        context = torch.cat(_tensors(minibatch.context)[:3], -1)
        K, N, _ = obs.shape
        latent_noise = torch.from_numpy(rng.standard_normal((K, settings.latent_size), np.float32))
        action_noise = torch.from_numpy(rng.standard_normal(actions.shape, np.float32))

        means, raw = nets["encoder"](context).chunk(2, -1)
        precision = 1 / softplus(raw).clamp(min=1e-7)
        variance = 1 / precision.sum(1)
        mean = variance * (means * precision).sum(1)
        z = (mean + variance.sqrt() * latent_noise)[:, None].expand(K, N, -1)
        kl = 0.5 * (variance + mean.square() - 1 - variance.log()).sum()

        with torch.no_grad():
            next_values = nets["target_v"](torch.cat([next_obs, z], -1))
            target = settings.reward_scale * rewards + (1 - terminated) * DISCOUNT * next_values
        inputs = torch.cat([obs, actions, z], -1)
        q_loss = mse_loss(nets["q1"](inputs), target) + mse_loss(nets["q2"](inputs), target)
        self._descend(q_loss + settings.kl_weight * kl, "q1", "q2", "encoder")

        z = z.detach()
        state = torch.cat([obs, z], -1)
        mean, log_std = nets["policy"](state).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        u = mean + log_std.exp() * action_noise
        new_actions = u.tanh()
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(u) - (1 - new_actions.square() + 1e-6).log()
        log_prob = log_prob.sum(-1, keepdim=True)
        inputs = torch.cat([obs, new_actions, z], -1)
        lowest = torch.minimum(nets["q1"](inputs), nets["q2"](inputs))
        self._descend(mse_loss(nets["v"](state), (lowest - log_prob).detach()), "v")
        with torch.no_grad():
            for target_param, param in zip(nets["target_v"].parameters(), nets["v"].parameters(), strict=True):
                target_param.lerp_(param, settings.soft_target_tau)
        regularization = settings.policy_mean_reg * mean.square().mean()
        regularization = regularization + settings.policy_std_reg * log_std.square().mean()
        self._descend((log_prob - lowest).mean() + regularization, "policy")

    def _descend(self, loss: Tensor, *names: str) -> None:
        for name in names:
            self.adam[name].zero_grad()
        loss.backward()
        for name in names:
            self.adam[name].step()


def _sequential(stored: dict[str, np.ndarray], prefix: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for name, kernel in stored.items():
        if name.startswith(f"{prefix}.") and name.endswith(".kernel"):
            linear = nn.Linear(*kernel.shape)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(kernel.T))
                linear.bias.copy_(torch.from_numpy(stored[name.replace("kernel", "bias")]))
            layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _tensors(transitions: Transitions | None) -> tuple[Tensor, ...]:
    assert transitions is not None
    t = transitions
    arrays = (t.observations, t.actions, t.rewards[..., None], t.next_observations)
    return (*map(torch.from_numpy, arrays), torch.from_numpy(t.terminated[..., None].astype(np.float32)))


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
    ours, theirs = _both(size)
    minibatch = size.minibatch(np.random.default_rng(0))
    ours.step(minibatch, np.random.default_rng(1), map)
    theirs.step(minibatch, np.random.default_rng(1))
    for name, network in ours.networks.items():
        linears = [layer for layer in theirs.nets[name] if isinstance(layer, nn.Linear)]
        parts = [part.detach().numpy().ravel() for layer in linears for part in (layer.weight.T, layer.bias)]
        # Adam's first step is as long as the step size, 3e-4, wherever a gradient is not zero.
        apart = float(np.abs(network.vector - np.concatenate(parts)).mean())
        if apart > 3e-6:
            raise SystemExit(f"{name}: parameters are {apart:.1e} apart after one step on average; required 3e-6")


def _time(size: Size, steps: int, pool: ThreadPoolExecutor) -> dict[str, Timings]:
    ours, theirs = _both(size)
    rng = np.random.default_rng(0)
    minibatch = size.minibatch(rng)
    rows, units = size.tasks * size.rows // 4, size.critic[0]
    factors = rng.standard_normal((rows, units), np.float32), rng.standard_normal((units, units), np.float32)

    def products() -> None:
        for _ in pool.map(lambda _: np.matmul(*factors), range(NUM_PRODUCTS)):
            pass

    acts: dict[str, Callable[[], object]] = {
        "metaloom": lambda: ours.step(minibatch, rng, pool.map),
        "torch autograd": lambda: theirs.step(minibatch, rng),
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


def _both(size: Size) -> tuple[GradientSteps, TorchStep]:
    algorithm = size.settings.build(ProcessingConfig(discount=DISCOUNT))
    learner = algorithm.initialize(size.policy, run_seed=0)
    return GradientSteps(size.settings, DISCOUNT, learner), TorchStep(size.settings, learner)


def _report(size: Size, timings: dict[str, Timings], threads: int) -> None:
    work = gflop(size, size.settings.latent_size)
    product_work = NUM_PRODUCTS * 2e-9 * (size.tasks * size.rows // 4) * size.critic[0] ** 2
    print(f"{size.tasks} tasks x {size.rows} rows, {work:.1f} GFLOP per step, {threads} threads")
    for name in ("metaloom", "torch autograd"):
        wall, cpu = (1e3 * np.array(values) for values in (timings[name].wall, timings[name].cpu))
        print(
            f"{name:<15} wall: median {np.median(wall):7.2f} ms, least {wall.min():7.2f} ms   "
            f"processor: median {np.median(cpu):7.2f} ms, least {cpu.min():7.2f} ms"
        )
    ratio = np.median(timings["torch autograd"].wall) / np.median(timings["metaloom"].wall)
    print(f"torch / metaloom: {ratio:.2f} of medians")
    for kind in ("wall", "cpu"):
        ours = work / np.median(getattr(timings["metaloom"], kind))
        alone = product_work / np.median(getattr(timings["products"], kind))
        print(f"GFLOP per second ({kind}): metaloom {ours:.0f}, matrix products alone {alone:.0f}: {ours / alone:.0%}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny size, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
