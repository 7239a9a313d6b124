"""A2C, PPO and PPO2 as the stages use them: a policy and a critic that learn from an iteration's episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import CRITIC, POLICY, ActorCriticSteps, TorchSteps
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCriticSettings
from metaloom.pipeline.algorithms.actor_critic.update import EpochsUpdate, Moments, estimated, scaled
from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, fused, network_blockers, optimizer_blockers
from metaloom.pipeline.estimation.experience import Experience
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.flat_networks import prefixed
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step


class ActorCriticLearner(Learner[Step, Sequence[Step]]):
    """A policy and its critic; see Learner."""

    def __init__(self, settings: ActorCriticSettings, setup: Setup) -> None:
        self.settings: ActorCriticSettings = settings
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
        """Estimate with the critic from before it learns from these episodes; see Learner."""
        mask = episodes.mask
        parts = zip(self.experiences(episodes), self.split(state), strict=True)
        estimates = [estimated(e, self.steps(part), self.settings, self._processing) for e, part in parts]
        raw = np.concatenate([estimate.advantages for estimate in estimates])
        before = Moments.of(state)
        moments = None if before is None else before.merged(raw[mask != 0])
        return Samples(
            returns=discounted_returns(episodes.rewards * mask, self._processing.discount).astype(np.float32),
            values=np.concatenate([estimate.values for estimate in estimates]).astype(np.float32),
            advantages=scaled(raw, mask, self._processing, moments).astype(np.float32),
            mask=mask,
        )

    def update(
        self,
        state: LearnerState,
        experience: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        (step,) = experience
        num_updates = int(state.extra[NUM_UPDATES])
        steps = [self.steps(part) for part in self.split(state)]
        update = EpochsUpdate(
            self.settings,
            self._processing,
            steps,
            self.experiences(step.episodes),
            step.episodes.mask,
            moments=Moments.of(state),
            lr_factor=self._lr_factor(num_updates),
            position=(run_seed, iteration),
        )
        update.take_samples(step.samples)
        before = update.describe()
        if (fit := self.settings.critic_fit) is not None:
            update.fit_critics(fit)
            update.reestimate()
        described = update.train(lambda steps: self.directions(steps, num_updates))
        after = update.describe()
        updated = [of.state() for of in steps]
        for j, of in enumerate(updated):
            require_finite_params(
                {f"the {POLICY}{self.called(j)}": of.params, f"the {CRITIC}{self.called(j)}": of.extra},
                stage="meta_optimize",
                advice="Lower algorithm.learning_rate or set algorithm.max_grad_norm",
            )
        metrics = {
            "loss_before": before.pop("loss"),
            "loss_after": after.pop("loss"),
            "value_loss_before": before["value_loss"],
            "value_loss_after": after.pop("value_loss"),
            "entropy_after": after.pop("entropy"),
            **after,
            **described,
        }
        joined = self.joined(updated)
        kept = LearnerState(joined.params, joined.optimizer, state.extra | joined.extra)
        return self._counted(kept, num_updates + 1, update.moments), metrics

    def fresh(self, rng: np.random.Generator) -> LearnerState:
        """Return a policy and a critic that have learned nothing, without counters."""
        params = self.policy.initialize(rng)
        # The output layer is the last one with a matrix.
        matrices = [name for name, shape in self.policy.network.shapes.items() if len(shape) > 1]
        for name in matrices[-1:]:
            params[name] *= np.float32(self.settings.initial_output_scale)
        critic = self.critic.initialize(rng)
        optimizer = self.settings.optimizer
        states = prefixed(initial_state(optimizer, params), POLICY) | prefixed(initial_state(optimizer, critic), CRITIC)
        return LearnerState(params, states, critic)

    def steps(self, state: LearnerState) -> ActorCriticSteps:
        """Return working copies of a policy and its critic."""
        if self.kernel.name == "torch":
            return TorchSteps(self.settings, self.policy, self.critic, state, self._device)
        policy, config = self.policy.network, self._setup.policy
        of = (self.settings, policy.spec, self.critic.spec, state)
        return fused(TorchSteps)(*of, prefix=policy.prefix, min_std=config.min_std, learn_std=config.learn_std)

    def split(self, state: LearnerState) -> list[LearnerState]:
        """Return the state of every policy: one learns from all tasks together."""
        return [state]

    def joined(self, states: Sequence[LearnerState]) -> LearnerState:
        """Return one state of all policies."""
        (state,) = states
        return state

    def experiences(self, episodes: EpisodeBatch) -> list[Experience]:
        """Return the experience of every policy."""
        return [Experience(episodes, slice(None))]

    def directions(self, steps: Sequence[ActorCriticSteps], num_updates: int) -> tuple[Sequence[Array | None], Metrics]:
        """Return the direction that each policy's optimizer descends, None for its gradient, and metrics of it."""
        return [None] * len(steps), {}

    def called(self, j: int) -> str:
        """Return the suffix for the name of a part of policy j in messages."""
        return ""

    def _counted(self, state: LearnerState, num_updates: int, moments: Moments | None) -> LearnerState:
        counters = {NUM_UPDATES: np.array(num_updates, np.int64)} | (moments.stored() if moments else {})
        return LearnerState(state.params, state.optimizer, state.extra | counters)
