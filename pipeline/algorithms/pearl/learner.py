"""PEARL as the stages use it: acting, inference of tasks, and learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import Kernel, Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.learner import GradientSteps, OffPolicyLearner
from metaloom.pipeline.algorithms.off_policy.parts import transitions_like
from metaloom.pipeline.algorithms.pearl import definition
from metaloom.pipeline.algorithms.pearl.definition import METRICS, Noise, PEARLDefinition
from metaloom.pipeline.algorithms.pearl.networks import (
    POLICY_OUTPUT_LIMIT,
    TRAINED,
    PEARLArrays,
    PEARLNetworks,
    initialize,
)
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.actors.off_policy import BELIEF_MEAN, BELIEF_VARIANCE
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Minibatch, ParallelMap, Params, TaskParams, Transitions


class PEARLLearner(OffPolicyLearner[ContextRounds, Noise]):
    """Inference of tasks, and soft actor-critic given the inferred posterior; see Learner."""

    metrics: ClassVar[tuple[str, ...]] = METRICS
    lower = "algorithm.reward_scale or the learning rates of algorithm"

    def __init__(self, settings: PEARL, setup: Setup) -> None:
        super().__init__(settings.name, setup, discrete=False)
        self.settings: PEARL = settings
        self.networks: PEARLNetworks = PEARLNetworks.build(settings, setup)
        rates = self._rates = {
            "policy": settings.policy_learning_rate,
            "encoder": settings.encoder_learning_rate,
            "q1": settings.q_learning_rate,
            "q2": settings.q_learning_rate,
            "v": settings.v_learning_rate,
        }
        self._lr_factors = {name: lr_factor(settings, rates[name]) for name in TRAINED}
        networks = self.networks.policy, self.networks.encoder, self.networks.q, self.networks.v
        others = ["network is an mlp of tanh"] if networks[0].spec.activation == "tanh" else []
        self.kernel: Kernel = self.choose_kernel(settings.kernel, settings.optimizer, *networks, others=others)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return networks that have learned nothing; the target V is a copy of V, the Q-functions differ."""
        rng, networks = generator(run_seed, "initialize"), self.networks
        policy = initialize(networks.policy, rng, output_limit=POLICY_OUTPUT_LIMIT)
        encoder, q1, q2, v = (initialize(of, rng) for of in (networks.encoder, networks.q, networks.q, networks.v))
        params: dict[str, Params] = {
            "policy": unprefixed(policy, networks.policy.prefix),
            "encoder": unprefixed(encoder, networks.encoder.prefix),
            "q1": unprefixed(q1, networks.q.prefix),
            "q2": unprefixed(q2, networks.q.prefix),
            "v": unprefixed(v, networks.v.prefix),
        }
        params["target_v"] = {name: value.copy() for name, value in params["v"].items()}
        optimizers = {name: initial_state(self.settings.optimizer, params[name]) for name in TRAINED}
        return PEARLArrays(params, optimizers, num_updates=0).state()

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the policy, and the prior: N(0, I) over the latent variables, without the bottleneck the point 0."""
        prefix = self.networks.policy.prefix
        policy = {name: value for name, value in state.params.items() if name.startswith(f"{prefix}.")}
        shared = TaskParams.broadcast(policy, num_tasks).params
        mean = np.zeros((num_tasks, self.settings.latent_size), np.float32)
        variance = np.ones_like(mean) if self.settings.use_information_bottleneck else np.zeros_like(mean)
        return TaskParams({**shared, BELIEF_MEAN: mean, BELIEF_VARIANCE: variance})

    def infer(self, state: LearnerState, contexts: Iterable[Transitions]) -> TaskParams:
        """Return every task's posterior given its context [1, C], belief.mean and belief.variance [B, Z]."""
        encoder = PEARLArrays.of(state).params["encoder"]
        means: list[Array] = []
        variances: list[Array] = []
        # Task by task: C may differ, and the bits of a task must not depend on the number of tasks.
        for context in contexts:
            if self.kernel.name == "fused":
                found = fused(definition.infer)(self.settings, encoder, context)
                means.append(found.mean)
                variances.append(found.variance)
                continue
            network = self.networks.encoder
            flat = FlatTensors(prefixed(encoder, network.prefix), self._device)
            with torch.no_grad():
                seen = transitions_like(flat.vector, context)
                inferred = definition.infer(self.settings, network, flat.params, seen)
            means.append(inferred.mean.cpu().numpy())
            variances.append(inferred.variance.cpu().numpy())
        return TaskParams({BELIEF_MEAN: np.concatenate(means), BELIEF_VARIANCE: np.concatenate(variances)})

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: ContextRounds, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Return the posterior given transitions of some rollout batches, replacing the one in `params`; see Learner.

        After training all transitions count, once there are `num_exp_traj_eval` episodes.
        """
        if evidence.position is None and evidence.num_episodes < self.settings.num_exp_traj_eval:
            return params
        contexts = evidence.transitions(self.settings.embedding_batch_size)
        return TaskParams({**params.params, **self.infer(state, map(self._shown, contexts)).params})

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[Noise]:
        num_updates, discount = PEARLArrays.of(state).num_updates, self._setup.processing.discount
        rates: dict[str, float] = {name: self._rates[name] * self._lr_factors[name](num_updates) for name in TRAINED}
        if self.kernel.name == "fused":
            of = (self.settings, state)
            return fused(PEARLDefinition)(*of, discount=discount, learning_rates=rates, parallel=parallel)
        return PEARLDefinition(
            self.settings, self.networks, state, discount=discount, learning_rates=rates, device=self._device
        )

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Noise:
        shape = minibatch.transitions.actions.shape
        latent = rng.standard_normal((shape[0], self.settings.latent_size), np.float32)
        return Noise(latent, rng.standard_normal(shape, np.float32))

    def networks_of(self, state: LearnerState) -> Mapping[str, Params]:
        return PEARLArrays.of(state).params

    def shown(self, minibatch: Minibatch) -> Minibatch:
        """Return the minibatch with the context as the encoder sees it."""
        return replace(minibatch, context=self._shown(minibatch.context))

    def _shown(self, context: Transitions | None) -> Transitions:
        """Return the transitions as the encoder sees them, with sparse rewards if enabled."""
        if context is None:
            raise ValueError("update: a minibatch has no context; PEARL requires one to infer its tasks from")
        if not self.settings.sparse_rewards:
            return context
        return replace(context, rewards=self._setup.sparse_rewards(context.rewards))
