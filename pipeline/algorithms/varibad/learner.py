"""VariBAD as the stages use it: a policy on a posterior over its task, and the model that learns to infer it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.update import CRITIC_SCALE, UNSCALED, TrialEstimates, TrialUpdate
from metaloom.pipeline.algorithms.varibad.model import Model
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.inferring import InferringPolicy
from metaloom.pipeline.policies.posterior import POSTERIOR_LOG_STD, POSTERIOR_MEAN, EncoderSizes, PosteriorNetwork
from metaloom.pipeline.policies.remembering import Remembering, remembered
from metaloom.pipeline.replay.trials import TrialExperience
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Params, Samples, TaskParams

CRITIC, DECODER = "critic", "decoder"
"""Prefixes in LearnerState.extra."""
POLICY_STATE, MODEL_STATE = "policy", "model"
"""Prefixes in LearnerState.optimizer."""


class VariBADPolicy(InferringPolicy):
    """A policy and its critic, both on an observation and the posterior that was acted on; see TrialPolicy."""

    def __init__(self, settings: VariBAD, setup: Setup) -> None:
        sizes = EncoderSizes(settings.embedding_size, settings.encoder_size, settings.latent_size)
        super().__init__(setup, setup.policy, sizes)
        critic = setup.policy.critic(settings.critic_hidden_sizes)
        self.critic: Network = build_network(
            CRITIC, critic.network_spec(setup, 1, extra_size=2 * sizes.latent + settings.position_size)
        )
        self._observation_size = setup.observation_size
        self._input_size = setup.observation_size + 2 * sizes.latent

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        return self.policy.learned(params)

    def inputs(self, trials: Trials) -> Array:
        """Return observations and the recorded posteriors: no gradient goes into the encoder."""
        observations = trials.inputs[..., : self._observation_size]
        return np.concatenate([observations, *(trials.behavior[n] for n in (POSTERIOR_MEAN, POSTERIOR_LOG_STD))], -1)

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        rows = of.rows(of.inputs)
        return self.policy.distribution(params, rows[:, : self._input_size]), self.critic(params, rows).squeeze(-1)

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        return self.critic(params, inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2]).squeeze(-1)


class VariBADLearner(Learner[EpisodeBatch, TrialExperience]):
    """A policy that adapts through its inferred belief about the task; see Learner."""

    def __init__(self, settings: VariBAD, setup: Setup) -> None:
        self._settings, self._setup = settings, setup
        self._policy, device = VariBADPolicy(settings, setup), use_device(setup.device)
        self._estimates = TrialEstimates(settings, setup, self._policy, device)
        self._ppo = TrialUpdate(settings, self._policy, self._estimates)
        self._model = Model(settings, setup, self._policy.encoder, device)
        self.kernel: Kernel = Kernel("torch", "models of trials have no fused kernel")

    def initialize(self, *, run_seed: int) -> LearnerState:
        rng, settings = generator(run_seed, "initialize"), self._settings
        encoder = self._policy.encoder.initialize(rng)
        policy, critic = self._policy.policy.initialize(rng), self._policy.critic.initialize(rng)
        decoder = self._model.initialize_decoders(rng)
        optimizer = _optimizers(
            initial_state(settings.optimizer, policy | critic),
            initial_state(settings.model_optimizer, encoder | decoder),
        )
        counters = {CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: np.array(0, np.int64)}
        return LearnerState(encoder | policy, optimizer, {**critic, **decoder, **counters})

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Estimate along the trials with the values from before this update; see Learner."""
        return self._estimates.process(self._critic(state), state.extra[CRITIC_SCALE], episodes)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: EpisodeBatch, *, parallel: ParallelMap = map
    ) -> TaskParams:
        remembering = Remembering(self._setup.policy, self._setup, params, num_rows=1, network=PosteriorNetwork)
        return remembered(remembering, params, evidence)

    def update(
        self,
        state: LearnerState,
        experience: TrialExperience,
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Run the policy's epochs on this iteration's trials, and the model's steps on the buffer's; see Learner."""
        num_updates, critic = int(state.extra[NUM_UPDATES]), self._critic(state)
        encoder = {name: state.params[name] for name in self._policy.encoder.shapes}
        decoder = {name: value for name, value in state.extra.items() if name.startswith(f"{DECODER}.")}
        improved = self._ppo.improve(
            {name: value for name, value in state.params.items() if name not in encoder},
            critic,
            state.extra[CRITIC_SCALE],
            unprefixed(state.optimizer, POLICY_STATE),
            experience.step,
            num_updates=num_updates,
            run_seed=run_seed,
            iteration=iteration,
        )
        model, model_state, metrics = self._model.learn(
            encoder | decoder,
            unprefixed(state.optimizer, MODEL_STATE),
            experience.buffer,
            learning_rate=self._settings.model_learning_rate * self._ppo.lr_factor(num_updates),
            run_seed=run_seed,
            iteration=iteration,
        )
        params = {name: model[name] for name in encoder} | improved.params
        extra = {
            **state.extra,
            **improved.critic,
            **{name: model[name] for name in decoder},
            CRITIC_SCALE: improved.scale,
            NUM_UPDATES: np.array(num_updates + 1, np.int64),
        }
        return LearnerState(params, _optimizers(improved.optimizer, model_state), extra), improved.metrics | metrics

    def _critic(self, state: LearnerState) -> Params:
        return {name: state.extra[name] for name in self._policy.critic.shapes}


def _optimizers(policy: Params, model: Params) -> Params:
    return prefixed(policy, POLICY_STATE) | prefixed(model, MODEL_STATE)
