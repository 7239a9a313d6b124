"""Learner for A2C, PPO and PPO2: a policy and a critic that learn from an iteration's episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import CRITIC, POLICY, ActorCriticSteps, TorchSteps
from metaloom.pipeline.algorithms.actor_critic.settings import PPO, ActorCriticSettings
from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup, Steps, require_finite_params
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, fused, network_blockers, optimizer_blockers
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.experience import Experience, StepRows
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import EPSILON, discounted_returns, shift_positive
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.torch_optimizers import initial_state, lr_factor
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step

RUNNING = "advantage_moments"
"""Key in LearnerState.extra for the advantages' running count, mean and sum of squared deviations, [3] float64."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all values so far (Welford; merged as in Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, values: Array) -> "Moments":
        """Return the moments updated with values [n]."""
        count, mean = len(values), float(values.mean())
        total, gap = self.count + count, mean - self.mean
        squares = float(np.square(values - mean).sum())
        return Moments(
            total, self.mean + gap * count / total, self.squares + squares + gap**2 * self.count * count / total
        )

    @property
    def std(self) -> float:
        return float(np.sqrt(self.squares / self.count))

    @classmethod
    def of(cls, learner: LearnerState) -> "Moments | None":
        """Return the moments stored in a learner state, or None if there are none."""
        return cls(*learner.extra[RUNNING].tolist()) if RUNNING in learner.extra else None


def scaled(advantages: Array, mask: Array, processing: ProcessingConfig, running: Moments | None) -> Array:
    """Return advantages [b, E, T] normalized and shifted as configured, per task or with `running` moments."""
    if running is None:
        return np.stack([scale(task, real, processing) for task, real in zip(advantages, mask, strict=True)])
    if processing.normalize_advantages:
        advantages = (advantages - running.mean) / (running.std + EPSILON) * mask
    if processing.positive_advantages:
        advantages = np.stack([shift_positive(*task) for task in zip(advantages, mask, strict=True)])
    return advantages


POLICY_PASS, CRITIC_PASS = 0, 1  # last element of the position that seeds the minibatch order


class ActorCriticLearner(Learner[Step, Steps]):
    """Learner that trains a policy and its critic on complete episodes."""

    def __init__(self, settings: ActorCriticSettings, setup: Setup) -> None:
        self.settings: ActorCriticSettings = settings
        # Only PPO trains its critic separately, before the policy.
        self._critic_epochs = settings if isinstance(settings, PPO) else None
        self._setup, self._processing = setup, setup.processing
        self._device = use_device(setup.device)
        self._lr_factor = lr_factor(settings, settings.learning_rate)
        self.policy: Policy = build_policy(setup.policy, setup)
        critic = settings.critic_like(setup.policy).critic(settings.critic_hidden_sizes)
        self.critic: Network = build_network(CRITIC, critic.network_spec(setup, 1))
        blockers = [f"policy is {setup.policy.name}"] if setup.policy.name is not None else []
        blockers += network_blockers(self.policy.network.spec, self.critic.spec, device=setup.device)
        blockers += optimizer_blockers(settings.optimizer)
        self.kernel: Kernel = choose_kernel(settings.kernel, blockers=blockers, fused="plain networks on the CPU")

    def initialize(self, *, run_seed: int) -> LearnerState:
        state = self.fresh(generator(run_seed, "initialize"))
        moments = Moments() if self.settings.advantage_scaling == "running" else None
        return self._counted(state, 0, moments)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Compute values and advantages with the current critic, before this iteration's update."""
        mask, parts = episodes.mask, [self.steps(part) for part in self.split(state)]
        raw, values, _ = self._estimated(self.experiences(episodes), parts)
        before = Moments.of(state)
        moments = None if before is None else before.merged(raw[mask != 0])
        return Samples(
            returns=discounted_returns(episodes.rewards * mask, self._processing.discount).astype(np.float32),
            values=values.astype(np.float32),
            advantages=scaled(raw, mask, self._processing, moments).astype(np.float32),
            mask=mask,
        )

    def update(
        self, state: LearnerState, experience: Steps, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        """Train in epochs of minibatches over the complete episodes.

        A critic with separate epochs is trained first; the policy then uses the advantages from the updated critic.
        """
        (step,) = experience
        num_updates, moments, mask = int(state.extra[NUM_UPDATES]), Moments.of(state), step.episodes.mask
        factor, of_seed = self._lr_factor(num_updates), partial(generator, run_seed, "minibatches", iteration)
        steps, owned = [self.steps(part) for part in self.split(state)], self.experiences(step.episodes)
        raw, _, targets = self._estimated(owned, steps)
        stored = (np.split(values, len(steps)) for values in (step.samples.advantages, step.samples.values, targets))
        data = [
            StepRows(e.observations, e.actions, of.old_log_prob(e), *(e.rows(part) for part in parts))
            for of, e, *parts in zip(steps, owned, *stored, strict=True)
        ]
        before = _described(steps, data, owned)
        if (own := self._critic_epochs) is not None:
            for j, (of, rows) in enumerate(zip(steps, data, strict=True)):
                num_parts = -(-len(rows) // own.critic_batch_size)
                for epoch in range(own.critic_num_epochs):
                    shuffled = rows[of_seed(epoch, j, CRITIC_PASS).permutation(len(rows))]
                    for n in range(num_parts):
                        of.critic_gradient(shuffled[_share(len(rows), num_parts, n)], 1.0, own.critic_max_grad_norm)
                        of.critic_params.step(own.critic_learning_rate * factor)
            raw, *_ = self._estimated(owned, steps)
        moments = None if moments is None else moments.merged(raw[mask != 0])
        if own is not None:
            advantages = np.split(scaled(raw, mask, self._processing, moments), len(steps))
            pairs = zip(data, owned, advantages, strict=True)
            data = [replace(rows, advantages=e.rows(part)) for rows, e, part in pairs]
        rate = self.settings.learning_rate * factor
        learned = self._learn(steps, data, rate, num_updates, of_seed)
        after = _described(steps, data, owned)
        updated = [of.state() for of in steps]
        for j, of in enumerate(updated):
            require_finite_params(
                {f"the {POLICY}{self.called(j)}": of.params, f"the {CRITIC}{self.called(j)}": of.extra},
                stage="meta_optimize",
                advice="Lower algorithm.learning_rate or set algorithm.max_grad_norm",
            )
        metrics = {
            "loss_before": before["loss"],
            "loss_after": after.pop("loss"),
            "value_loss_before": before["value_loss"],
            "value_loss_after": after.pop("value_loss"),
            "entropy_after": after.pop("entropy"),
            **after,
            **learned,
        }
        joined = self.joined(updated)
        return self._counted(replace(joined, extra=state.extra | joined.extra), num_updates + 1, moments), metrics

    def _learn(
        self,
        steps: Sequence[ActorCriticSteps],
        data: Sequence[StepRows],
        rate: float,
        num_updates: int,
        of_seed: Callable[[int, int, int], np.random.Generator],
    ) -> Metrics:
        """Run epochs of gradient steps on the policies, and on critics without separate epochs; return metrics."""
        critic_weight = self.settings.critic_weight if self._critic_epochs is None else None
        norms: list[float] = []
        described: Metrics = {}
        # Each round takes one minibatch per policy; the policy with the most steps determines the number of rounds.
        sizes = [len(rows) for rows in data]
        num_parts = min(-(-max(sizes) // self.settings.batch_size), *sizes)
        for epoch in range(self.settings.num_epochs):
            shuffled = [rows[of_seed(epoch, j, POLICY_PASS).permutation(len(rows))] for j, rows in enumerate(data)]
            for n in range(num_parts):
                parts = [rows[_share(len(rows), num_parts, n)] for rows in shuffled]
                lengths = [of.policy_gradient(part, critic_weight) for of, part in zip(steps, parts, strict=True)]
                moves, described = self.directions(steps, num_updates)
                for of, move in zip(steps, moves, strict=True):
                    if critic_weight is not None:
                        of.critic_params.step(rate)
                    of.policy_params.step(rate, move)
                # Read metrics last: reading one waits for the device.
                norms += [float(length) for length in lengths]
        return {"gradient_norm": float(np.mean(norms)), "learning_rate": rate, **described}

    def _estimated(self, owned: Sequence[Experience], steps: Sequence[ActorCriticSteps]) -> tuple[Array, Array, Array]:
        """Return advantages, values and targets [B, E, T] of all episodes, estimated with the current critics."""
        discount, gae_lambda = self._processing.discount, self._processing.gae_lambda
        estimates = [
            e.estimate(of.values, discount, gae_lambda, self.settings.value_target)
            for e, of in zip(owned, steps, strict=True)
        ]
        advantages, values, targets = map(np.concatenate, zip(*estimates, strict=True))
        return advantages, values, targets

    def fresh(self, rng: np.random.Generator) -> LearnerState:
        """Return the initial state of a policy and its critic, without counters."""
        params = self.policy.initialize(rng)
        # The output layer is the last with a weight matrix.
        matrices = [name for name, shape in self.policy.network.shapes.items() if len(shape) > 1]
        for name in matrices[-1:]:
            params[name] *= np.float32(self.settings.initial_output_scale)
        critic, optimizer = self.critic.initialize(rng), self.settings.optimizer
        states = renamed(initial_state(optimizer, params), "", f"{POLICY}.")
        states |= renamed(initial_state(optimizer, critic), "", f"{CRITIC}.")
        return LearnerState(params, states, critic)

    def steps(self, state: LearnerState) -> ActorCriticSteps:
        """Return working copies of a policy and its critic, on which the chosen kernel takes gradient steps."""
        if self.kernel.name == "torch":
            return TorchSteps(self.settings, self.policy, self.critic, state, self._device)
        policy, config = self.policy.network, self._setup.policy
        of = (self.settings, policy.spec, self.critic.spec, state)
        return fused(TorchSteps)(*of, prefix=policy.prefix, min_std=config.min_std, learn_std=config.learn_std)

    def split(self, state: LearnerState) -> list[LearnerState]:
        """Return the state of each policy. By default, one policy acts in all tasks."""
        return [state]

    def joined(self, states: Sequence[LearnerState]) -> LearnerState:
        """Combine the policies' states into one state, the inverse of `split`."""
        (state,) = states
        return state

    def experiences(self, episodes: EpisodeBatch) -> list[Experience]:
        """Return the experience that each policy learns from."""
        return [Experience(episodes, slice(None))]

    def directions(self, steps: Sequence[ActorCriticSteps], num_updates: int) -> tuple[Sequence[Array | None], Metrics]:
        """Return each policy's descent direction, where None stands for its gradient, and metrics."""
        return [None] * len(steps), {}

    def called(self, j: int) -> str:
        """Return the suffix that names policy j in messages."""
        return ""

    def _counted(self, state: LearnerState, num_updates: int, moments: Moments | None) -> LearnerState:
        counters = {NUM_UPDATES: np.array(num_updates, np.int64)}
        if moments is not None:
            counters[RUNNING] = np.array([moments.count, moments.mean, moments.squares])
        return replace(state, extra=state.extra | counters)


def _described(steps: Sequence[ActorCriticSteps], data: Sequence[StepRows], owned: Sequence[Experience]) -> Metrics:
    """Return losses, KL, entropy and, with clipping, the clip fraction, averaged over policies."""
    each = [of.describe(rows, e.behavior) for of, rows, e in zip(steps, data, owned, strict=True)]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def _share(num_rows: int, num_parts: int, n: int) -> slice:
    return slice(num_rows * n // num_parts, num_rows * (n + 1) // num_parts)
