"""Learner for VariBAD: a policy conditioned on a posterior over its task, and the model that infers the posterior."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Setup, require_finite_params
from metaloom.pipeline.algorithms.trials.learner import CRITIC_SCALE, UNSCALED, TrialLearner
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.varibad.model import DecodedSteps, Decoders, Encoder, RandomDraws, TrialTensors, elbo
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.build import CategoricalPolicy, GaussianPolicy
from metaloom.pipeline.policies.posterior import (
    POSTERIOR_LOG_STD,
    POSTERIOR_MEAN,
    EncoderSizes,
    PosteriorNetwork,
    encoder_input_size,
    without_posterior,
)
from metaloom.pipeline.policies.remembering import MakeNetwork
from metaloom.pipeline.replay.index import TrialExperience
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap

CRITIC, DECODER = "critic", "decoder."  # name prefixes in LearnerState.extra
MODEL_STATE = "model."  # name prefix in LearnerState.optimizer
ADAM_EPSILON = 1e-8


class VariBADPolicy:
    """An encoder of trials, and a policy and critic whose inputs are the observation and the posterior [μ, log σ].

    If the critic sees the end of a trial, it also has the position in the trial as input.
    """

    def __init__(self, settings: VariBAD, setup: Setup) -> None:
        sizes = EncoderSizes(settings.embedding_size, settings.encoder_size, settings.latent_size)
        self.encoder: Encoder = Encoder(sizes, encoder_input_size(setup.policy, setup))
        kind = CategoricalPolicy if setup.num_actions else GaussianPolicy
        self.policy: CategoricalPolicy | GaussianPolicy = kind(setup, setup.policy, 2 * sizes.latent)
        critic = setup.policy.critic(settings.critic_hidden_sizes)
        self.critic: Network = build_network(
            CRITIC, critic.network_spec(setup, 1, extra_size=2 * sizes.latent + settings.position_size)
        )
        self._observation_size = setup.observation_size
        self._input_size = setup.observation_size + 2 * sizes.latent

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        return self.policy.learned(params)

    def inputs(self, trials: Trials) -> Array:
        """Return observations and recorded posteriors, through which no gradient reaches the encoder."""
        observations = trials.inputs[..., : self._observation_size]
        return np.concatenate([observations, *(trials.behavior[n] for n in (POSTERIOR_MEAN, POSTERIOR_LOG_STD))], -1)

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        return self.policy.recorded(without_posterior(behavior))

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        rows = of.rows(of.inputs)
        return self.policy.distribution(params, rows[:, : self._input_size]), self.critic(params, rows).squeeze(-1)

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        return self.critic(params, inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2]).squeeze(-1)


class VariBADLearner(TrialLearner[TrialExperience]):
    network: ClassVar[MakeNetwork] = PosteriorNetwork
    optimizer_prefix = "policy."
    settings: VariBAD
    policy: VariBADPolicy

    def __init__(self, settings: VariBAD, setup: Setup) -> None:
        policy = VariBADPolicy(settings, setup)
        super().__init__(settings, setup, policy, policy.critic.shapes, policy.encoder.shapes)
        self._decoders = Decoders(settings, setup)
        self.kernel: Kernel = Kernel("torch", "models of trials have no fused kernel")

    def initialize(self, *, run_seed: int) -> LearnerState:
        rng, settings = generator(run_seed, "initialize"), self.settings
        encoder = self.policy.encoder.initialize(rng)
        policy, critic = self.policy.policy.initialize(rng), self.policy.critic.initialize(rng)
        decoder = self._decoders.initialize(rng)
        optimizer = renamed(initial_state(settings.optimizer, policy | critic), "", self.optimizer_prefix)
        optimizer |= renamed(initial_state(settings.model_optimizer, encoder | decoder), "", MODEL_STATE)
        counters = {CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: np.array(0, np.int64)}
        return LearnerState(encoder | policy, optimizer, {**critic, **decoder, **counters})

    def update(
        self,
        state: LearnerState,
        experience: TrialExperience,
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Train the policy on this iteration's trials, and the model on trials from the buffer."""
        after, metrics = self.improved(state, experience.step, run_seed=run_seed, iteration=iteration)
        settings, buffer = self.settings, experience.buffer
        encoder = {name: state.params[name] for name in self.inferring}
        decoder = renamed(state.extra, DECODER, DECODER)
        rate = settings.model_learning_rate * self.lr_factor(int(state.extra[NUM_UPDATES]))
        flat, kept = FlatTensors(encoder | decoder, self.device), renamed(state.optimizer, MODEL_STATE, "")
        flat.optimize(settings.model_optimizer, kept, epsilon=ADAM_EPSILON)
        size = min(settings.trials_per_model_update, len(buffer))
        parts: list[Tensor] = []
        for n in range(settings.model_updates):
            rng = generator(run_seed, "model", iteration, n)
            trials = self._tensors(buffer.take(rng.choice(len(buffer), size, replace=False)))
            found = elbo(self.policy.encoder, self._decoders, flat.params, trials, self._drawn(trials, rng))
            explained = settings.reward_weight * found.rewards
            if settings.decode_states:
                explained = explained + settings.state_weight * found.states
            flat.down(settings.kl_weight * found.kl - explained, rate)
            parts.append(torch.stack(found).detach())
        model = flat.copies()
        require_finite_params({"the model": model}, stage="meta_optimize", advice="Lower algorithm.model_learning_rate")
        # Read metrics last: reading one waits for the device.
        rewards, states, kl = torch.stack(parts).mean(0).tolist()
        metrics |= {"reward_log_likelihood": rewards, "posterior_kl": kl, "elbo": rewards + states - kl}
        if settings.decode_states:
            metrics["state_log_likelihood"] = states
        params, extra = ({name: model[name] for name in of} for of in (encoder, decoder))
        optimizer = after.optimizer | renamed(flat.optimizer_state, "", MODEL_STATE)
        return LearnerState(after.params | params, optimizer, after.extra | extra), metrics

    def _drawn(self, trials: TrialTensors, rng: np.random.Generator) -> RandomDraws:
        settings, lengths = self.settings, trials.lengths.cpu().numpy()
        L, N, _ = trials.inputs.shape
        K = settings.elbo_steps or L
        # Draw noise first, and uniform numbers that map to indices in a trial of any length.
        noise = rng.standard_normal((K, N, settings.latent_size), np.float32)
        at = None if settings.elbo_steps is None else (rng.random((K, N)) * lengths).astype(np.int64)
        D = settings.decoded_steps
        decoded = None if D is None else (rng.random((N, D)) * lengths[:, None]).astype(np.int64)
        at, decoded = (None if steps is None else self._tensor(steps) for steps in (at, decoded))
        return RandomDraws(at, decoded, self._tensor(noise))

    def _tensors(self, chosen: Sequence[tuple[Trials, int]]) -> TrialTensors:
        lengths = np.array([int(trials.mask[n].sum()) for trials, n in chosen])
        L = int(lengths.max())

        def together(name: str) -> Tensor:
            """Stack the trials' arrays into [N, L, ...], padded with zeros."""
            parts = [getattr(trials, name)[n, :L] for trials, n in chosen]
            stacked = np.zeros((len(parts), L, *parts[0].shape[1:]), np.float32)
            for row, part in zip(stacked, parts, strict=True):
                row[: len(part)] = part
            return self._tensor(stacked)

        inputs, O = together("inputs"), chosen[0][0].next_observations.shape[-1]
        steps = DecodedSteps(inputs[..., :O], together("taken"), together("next_observations"), together("rewards"))
        return TrialTensors(inputs.transpose(0, 1).contiguous(), steps, self._tensor(lengths))

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.device)
