"""Learners for recurrent policies with a critic on their memory, trained on whole trials with PPO, A2C or TRPO."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import (
    NUM_UPDATES,
    Kernel,
    NumericalError,
    Setup,
    Steps,
    require_finite_params,
)
from metaloom.pipeline.algorithms.trials.learner import CRITIC_SCALE, UNSCALED, TrialLearner
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.settings import RL2TRPO, MemorySettings, TrialSteps
from metaloom.pipeline.baselines.linear import solve
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution, kl_from_itself, likelihood_ratio
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.natural_steps import natural_step, search
from metaloom.pipeline.nn.recurrent import differentiable_twice
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.build import RecurrentPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Params

CRITIC_KERNEL, CRITIC_BIAS = "critic.output.kernel", "critic.output.bias"
KERNEL = Kernel("torch", "recurrent networks have no fused kernel")


class MemoryPolicy(RecurrentPolicy):
    """A recurrent policy with a linear critic on its memory."""

    def __init__(self, settings: MemorySettings, setup: Setup) -> None:
        super().__init__(setup, setup.policy)
        F, P = self.cell.feature_size, settings.position_size
        self.critic_size: int = 2 * F + P if P else F
        self._position_size, self._input_size = P, setup.policy.cell_spec(setup).seen_size

    def features(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the memory's features, ignoring inputs that only the critic sees."""
        return super().features(params, inputs[..., : self._input_size])

    def judging(self, features: Tensor, inputs: Tensor) -> Tensor:
        """Return the linear critic's inputs, [L, N, critic_size], given the memory's features and the policy's inputs.

        If the critic sees the trial's end, the inputs are the memory h, d·h and the position, whose last entry d is the
        remaining share of discounted steps. A trial that pays r(h) at every step has value d·r(h), which is linear in
        these inputs.
        """
        if not self._position_size:
            return features
        position = inputs[..., -self._position_size :]
        return torch.cat([features, features * position[..., -1:], position], -1)

    def inputs(self, trials: Trials) -> Array:
        return trials.inputs

    def acting(self, params: Mapping[str, Tensor], of: Sequences) -> Distribution:
        """Return the action distributions [n] at real steps."""
        return self.distribution(params, of.rows(self.features(params, of.inputs)))

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        features = self.features(params, of.inputs)
        rows = of.rows(self.judging(features, of.inputs))
        values = torch.addmm(params[CRITIC_BIAS], rows, params[CRITIC_KERNEL]).squeeze(-1)
        return self.distribution(params, of.rows(features)), values

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        features = self.judging(self.features(params, inputs), inputs)
        return torch.nn.functional.linear(features, params[CRITIC_KERNEL].t(), params[CRITIC_BIAS]).squeeze(-1)


def first_state(policy: MemoryPolicy, settings: MemorySettings, run_seed: int) -> LearnerState:
    """Return the state before the first update, with a critic that is zero everywhere."""
    params = policy.initialize(generator(run_seed, "initialize"), settings.initial_output_scale)
    critic: Params = {
        CRITIC_KERNEL: np.zeros((policy.critic_size, 1), np.float32),
        CRITIC_BIAS: np.zeros(1, np.float32),
    }
    optimizer = initial_state(settings.optimizer, params | critic) if isinstance(settings, TrialSteps) else {}
    counter = np.array(0, np.int64)
    return LearnerState(params, optimizer, {**critic, CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: counter})


class MemoryLearner(TrialLearner[Steps]):
    """Learner that trains a recurrent policy with gradient steps on minibatches of trials."""

    settings: MemorySettings
    policy: MemoryPolicy
    kernel: Kernel = KERNEL

    def __init__(self, settings: MemorySettings, setup: Setup) -> None:
        super().__init__(settings, setup, MemoryPolicy(settings, setup), (CRITIC_KERNEL, CRITIC_BIAS))

    def initialize(self, *, run_seed: int) -> LearnerState:
        return first_state(self.policy, self.settings, run_seed)

    def update(
        self, state: LearnerState, experience: Steps, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        (step,) = experience
        return self.improved(state, step, run_seed=run_seed, iteration=iteration)


class PolicyMeans(NamedTuple):
    """Means over all real steps, for one set of policy parameters."""

    loss: float
    kl: float
    entropy: float


class TrialChunk(NamedTuple):
    """A chunk of trials, and the behavior policy's distributions [n] at their real steps."""

    of: Sequences
    recorded: Distribution


class SequenceRegion:
    """Loss, gradient and Fisher metric of a policy on whole trials, summed chunk by chunk in order."""

    def __init__(self, policy: MemoryPolicy, params: Params, chunks: Sequence[TrialChunk]) -> None:
        self._policy, self._params, self._chunks = policy, params, chunks
        self.flat: FlatParams = FlatParams({name: params[name] for name in policy.learned(params)})
        self._num_steps = sum(len(chunk.of.advantages) for chunk in chunks)

    def gradient(self) -> Array:
        """Return the gradient of -mean(r A), [D] float64, where r = 1 for the behavior policy."""

        def of_chunk(of: Sequences) -> Array:
            leaves = self._leaves(of)
            log_prob = self._policy.acting(leaves, of).log_prob(of.actions)
            loss = -(likelihood_ratio(log_prob, of.old_log_prob) * of.advantages).sum()
            return self._packed(torch.autograd.grad(loss, self._learned(leaves), materialize_grads=True))

        return self._mean(of_chunk)

    def product(self, v: Array) -> Array:
        """Return F v for v [D] float64 and the Fisher matrix F, the Hessian of the mean KL of the policy from itself.

        The graph of ∇(∇KL · v), through all steps of a trial, is rebuilt for every product, which bounds memory.
        """
        direction = self.flat.views(v)

        def of_chunk(of: Sequences) -> Array:
            leaves = self._leaves(of)
            learned = self._learned(leaves)
            kl = kl_from_itself(self._policy.acting(leaves, of)).sum()
            gradients = torch.autograd.grad(kl, learned, create_graph=True, materialize_grads=True)
            pairs = zip(gradients, direction.values(), strict=True)
            along = torch.stack([(gradient * gradient.new_tensor(part)).sum() for gradient, part in pairs]).sum()
            return self._packed(torch.autograd.grad(along, learned, materialize_grads=True))

        with differentiable_twice():
            return self._mean(of_chunk)

    @torch.no_grad()
    def at(self, params: Mapping[str, Array]) -> PolicyMeans | None:
        """Return the mean loss, KL and entropy for the given parameters, or None if any of them is not finite."""
        total = np.zeros(3)
        for of, recorded in self._chunks:
            now = self._policy.acting(_tensors(params, of), of)
            loss = -(likelihood_ratio(now.log_prob(of.actions), of.old_log_prob) * of.advantages).sum()
            entropy = now.entropy().expand(of.advantages.shape).sum()
            total += [float(loss), float(recorded.kl(now).sum()), float(entropy)]
        return PolicyMeans(*(total / self._num_steps).tolist()) if np.isfinite(total).all() else None

    def _leaves(self, of: Sequences) -> dict[str, Tensor]:
        tensors = _tensors(self._params, of)
        return {name: t.requires_grad_() if name in self.flat.params else t for name, t in tensors.items()}

    def _learned(self, leaves: Mapping[str, Tensor]) -> list[Tensor]:
        return [leaves[name] for name in self.flat.params]

    def _packed(self, values: Sequence[Tensor]) -> Array:
        pairs = zip(self.flat.params, values, strict=True)
        return self.flat.pack({name: value.cpu().numpy() for name, value in pairs})

    def _mean(self, of_chunk: Callable[[Sequences], Array]) -> Array:
        return reduce(add, (of_chunk(chunk.of) for chunk in self._chunks)) / self._num_steps


def _tensors(params: Mapping[str, Array], of: Sequences) -> dict[str, Tensor]:
    return {name: torch.tensor(value, device=of.inputs.device) for name, value in params.items()}


class RL2TRPOLearner(TrialLearner[Steps]):
    """Learner for RL2-TRPO: takes a natural-gradient step, then fits the critic to the new policy's memory."""

    settings: RL2TRPO
    policy: MemoryPolicy
    kernel: Kernel = KERNEL

    def __init__(self, settings: RL2TRPO, setup: Setup) -> None:
        super().__init__(settings, setup, MemoryPolicy(settings, setup), (CRITIC_KERNEL, CRITIC_BIAS))

    def initialize(self, *, run_seed: int) -> LearnerState:
        return first_state(self.policy, self.settings, run_seed)

    def update(
        self, state: LearnerState, experience: Steps, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        (step,) = experience
        batch = self.batch(state, step)
        parts = np.array_split(np.arange(len(batch)), -(-len(batch) // self.settings.trials_per_chunk))
        chunks = [TrialChunk(batch.sequences(part), batch.recorded(part)) for part in parts]
        region = SequenceRegion(self.policy, state.params, chunks)
        before = region.at(state.params)
        gradient = region.gradient()
        if not np.isfinite(gradient).all():
            raise NumericalError(
                "meta_optimize: the gradient of the policy loss is not finite; it must be finite. Check the rewards of "
                "this iteration"
            )
        full_step, metrics = natural_step(region.product, gradient, self.settings)

        def accept(found: PolicyMeans) -> bool:
            return before is not None and found.loss < before.loss and found.kl <= self.settings.max_kl

        found, searched = search(state.params, region.flat.views(full_step), region.at, accept, self.settings)
        params = state.params if found is None else found.params
        critic, value_loss = self._fit(params, chunks)
        networks = {"the policy": params, "the critic": critic}
        require_finite_params(networks, stage="meta_optimize", advice="Lower algorithm.max_kl")
        after = before if found is None else found.value
        described = {} if after is None else {"loss_after": after.loss, "kl": after.kl, "entropy_after": after.entropy}
        metrics |= {
            **described,
            "value_loss_after": value_loss * float(batch.scale[1]) ** 2,
            "gradient_norm": float(np.linalg.norm(gradient)),
            **searched,
            **self.described(step.episodes, batch),
        }
        counter = np.array(int(state.extra[NUM_UPDATES]) + 1, np.int64)
        extra = {**state.extra, **critic, CRITIC_SCALE: batch.scale, NUM_UPDATES: counter}
        return LearnerState(params, state.optimizer, extra), metrics

    @torch.no_grad()
    def _fit(self, params: Mapping[str, Array], chunks: Sequence[TrialChunk]) -> tuple[Params, float]:
        """Fit the critic by least squares; return its parameters and ½ mean squared error in the critic's units."""
        F = self.policy.critic_size
        gram, moments, squares, num_steps = np.zeros((F + 1, F + 1)), np.zeros(F + 1), 0.0, 0
        for of, _ in chunks:
            judging = self.policy.judging(self.policy.features(_tensors(params, of), of.inputs), of.inputs)
            features = of.rows(judging).cpu().numpy().astype(np.float64)
            rows = np.concatenate([features, np.ones((len(features), 1))], axis=1)
            targets = of.targets.cpu().numpy().astype(np.float64)
            gram, moments = gram + rows.T @ rows, moments + rows.T @ targets
            squares, num_steps = squares + float(np.sum(targets**2)), num_steps + len(rows)
        gram, moments = gram / num_steps, moments / num_steps
        w = solve(gram, moments, self.settings.critic_regularization, setting="algorithm.critic_regularization")
        error = squares / num_steps - 2 * w @ moments + w @ gram @ w
        critic = {CRITIC_KERNEL: w[:F, None].astype(np.float32), CRITIC_BIAS: w[F:].astype(np.float32)}
        return critic, 0.5 * float(error)
