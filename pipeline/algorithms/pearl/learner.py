"""The learner of PEARL: acting, task inference and updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.learner import OffPolicyLearner, TorchGradientSteps
from metaloom.pipeline.algorithms.off_policy.parts import transitions_like
from metaloom.pipeline.algorithms.pearl.definition import (
    LAYOUT,
    METRICS,
    POLICY_OUTPUT_LIMIT,
    TWINS,
    Noise,
    PEARLDefinition,
    PEARLNetworks,
    initialize,
)
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.policies.actors.off_policy import BELIEF_MEAN, BELIEF_VARIANCE
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Minibatch, ParallelMap, TaskParams, Transitions


class PEARLLearner(OffPolicyLearner[ContextRounds, Noise]):
    """Learner that infers tasks and runs soft actor-critic given the posterior; see Learner."""

    definition: ClassVar[type[TorchGradientSteps[Any]]] = PEARLDefinition
    metrics: ClassVar[tuple[str, ...]] = METRICS
    counters: ClassVar[tuple[str, ...]] = (NUM_UPDATES,)
    finite: ClassVar[Mapping[str, str]] = {name: name for name in LAYOUT}
    lower = "algorithm.reward_scale or the learning rates of algorithm"
    settings: PEARL

    def __init__(self, settings: PEARL, setup: Setup) -> None:
        super().__init__(settings, setup, discrete=False)
        self.networks: PEARLNetworks = PEARLNetworks.build(settings, setup)
        rates = {
            "policy": settings.policy_learning_rate,
            "encoder": settings.encoder_learning_rate,
            "q1": settings.q_learning_rate,
            "q2": settings.q_learning_rate,
            "v": settings.v_learning_rate,
        }
        others = ["network is an mlp of tanh"] if self.networks.policy.spec.activation == "tanh" else []
        networks = self.networks.policy, self.networks.encoder, self.networks.q, self.networks.v
        self.set_up(rates, *networks, others=others)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return the initial networks; the target V is a copy of V."""
        rng, networks = generator(run_seed, "initialize"), self.networks
        parts = {"policy": initialize(networks.policy, rng, output_limit=POLICY_OUTPUT_LIMIT)}
        parts |= {name: initialize(networks.of(name), rng) for name in ("encoder", "q1", "q2", "v")}
        parts["q2"] = renamed(parts["q2"], *TWINS)
        parts["target_v"] = {name: value.copy() for name, value in parts["v"].items()}
        return self.first_state(parts)

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the policy and the prior: N(0, I), or without the bottleneck the point 0."""
        shared = TaskParams.broadcast(LAYOUT["policy"].of(state), num_tasks).params
        mean = np.zeros((num_tasks, self.settings.latent_size), np.float32)
        variance = np.ones_like(mean) if self.settings.use_information_bottleneck else np.zeros_like(mean)
        return TaskParams({**shared, BELIEF_MEAN: mean, BELIEF_VARIANCE: variance})

    def infer(self, state: LearnerState, contexts: Iterable[Transitions]) -> TaskParams:
        """Return every task's posterior given its context [1, C], belief.mean and belief.variance [B, Z]."""
        network, encoder = self.networks.encoder, LAYOUT["encoder"].of(state)
        means: list[Array] = []
        variances: list[Array] = []
        # Task by task: C may differ, and the bits of a task must not depend on the number of tasks.
        for context in contexts:
            if self.kernel.name == "fused":
                found = fused(infer)(self.settings, network, encoder, context)
                means.append(found.mean)
                variances.append(found.variance)
                continue
            flat = FlatTensors(encoder, self._device)
            with torch.no_grad():
                seen = transitions_like(flat.vector, context)
                inferred = infer(self.settings, network, flat.params, seen)
            means.append(inferred.mean.cpu().numpy())
            variances.append(inferred.variance.cpu().numpy())
        return TaskParams({BELIEF_MEAN: np.concatenate(means), BELIEF_VARIANCE: np.concatenate(variances)})

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: ContextRounds, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Return the posterior given transitions of some rollout batches, replacing the one in `params`; see Learner.

        After training, all transitions count, but only once there are `num_exp_traj_eval` episodes.
        """
        if evidence.position is None and evidence.num_episodes < self.settings.num_exp_traj_eval:
            return params
        contexts = evidence.transitions(self.settings.embedding_batch_size)
        return TaskParams({**params.params, **self.infer(state, map(self._shown, contexts)).params})

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Noise:
        shape = minibatch.transitions.actions.shape
        latent = rng.standard_normal((shape[0], self.settings.latent_size), np.float32)
        return Noise(latent, rng.standard_normal(shape, np.float32))

    def shown(self, minibatch: Minibatch) -> Minibatch:
        """Convert the minibatch's context for the encoder; see `_shown`."""
        return replace(minibatch, context=self._shown(minibatch.context))

    def _shown(self, context: Transitions | None) -> Transitions:
        """Replace rewards by sparse rewards if enabled."""
        if context is None:
            raise ValueError("update: a minibatch has no context; PEARL requires one to infer its tasks")
        if not self.settings.sparse_rewards:
            return context
        return replace(context, rewards=self._setup.sparse_rewards(context.rewards))
