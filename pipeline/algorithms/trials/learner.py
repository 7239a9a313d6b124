"""Base class for learners that adapt within a trial: advantage estimates, and gradient steps on whole trials."""

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import clip_fraction, policy_loss
from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Learner, Setup, require_finite_params
from metaloom.pipeline.algorithms.trials.losses import Batch, Sequences, TrialPolicy, sequence_loss
from metaloom.pipeline.algorithms.trials.settings import TrialSettings, TrialSteps
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.torch_optimizers import LrFactor, lr_factor
from metaloom.pipeline.policies.remembering import CellAndHead, MakeNetwork, Remembering, remembered
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step, TaskParams

Experience = TypeVar("Experience", contravariant=True)

CRITIC_SCALE = "critic.scale"
"""Key for the mean and standard deviation of the last update's targets, [2]. In these units, values quickly reach the
returns of whole trials, and the value gradient does not dominate the policy gradient when rewards are large."""
UNSCALED = np.array([0, 1], np.float32)  # value of CRITIC_SCALE before the first update


class TrialLearner(Learner[EpisodeBatch, Experience], Generic[Experience]):
    """Base class for learners that train a critic and a policy that acts on the history of a trial."""

    network: ClassVar[MakeNetwork] = CellAndHead  # class of the network that acts
    optimizer_prefix: ClassVar[str] = ""  # prefix of the optimizer's state in LearnerState.optimizer

    def __init__(
        self,
        settings: TrialSettings,
        setup: Setup,
        policy: TrialPolicy,
        critic: Iterable[str],  # names of the critic's parameters in LearnerState.extra
        inferring: Collection[str] = (),  # names of policy parameters that gradient steps on trials do not change
    ) -> None:
        self.settings: TrialSettings = settings
        self.setup: Setup = setup
        self.policy: TrialPolicy = policy
        self.device: torch.device = use_device(setup.device)
        self.critic: tuple[str, ...] = tuple(critic)
        self.inferring: Collection[str] = inferring
        if isinstance(settings, TrialSteps):
            self.lr_factor: LrFactor = lr_factor(settings, settings.learning_rate)

    def trials(self, episodes: EpisodeBatch) -> Trials:
        """Arrange episodes as trials."""
        return Trials(episodes, self.settings.episodes_per_trial, self.setup.num_actions)

    def inputs(self, trials: Trials) -> Array:
        """Return the policy's inputs followed by the inputs that only the critic sees, [N, L, in] float32."""
        inputs = self.policy.inputs(trials)
        if not self.settings.position_size:
            return inputs
        position = trials.position(self.setup.max_episode_steps, self.setup.processing.discount)
        return np.concatenate([inputs, position], axis=-1)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Compute values and advantages along trials with the current critic, before this iteration's update."""
        trials, processing = self.trials(episodes), self.setup.processing
        values, behind = self._values(state, trials)
        raw = trials.advantages(values, processing.discount, processing.gae_lambda, behind)
        advantages = trials.by_episode(raw)
        mask = episodes.mask
        # Statistics are over all tasks: a task may have a single short trial.
        together = (-1, mask.shape[2])
        scaled = scale(advantages.reshape(together), mask.reshape(together), processing)
        return Samples(
            returns=trials.by_episode(discounted_returns(trials.rewards, processing.discount)).astype(np.float32),
            values=trials.by_episode(values).astype(np.float32),
            advantages=scaled.reshape(mask.shape).astype(np.float32),
            mask=mask,
        )

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: EpisodeBatch, *, parallel: ParallelMap = map
    ) -> TaskParams:
        remembering = Remembering(self.setup.policy, self.setup, params, num_rows=1, network=type(self).network)
        return remembered(remembering, params, evidence)

    def batch(self, state: LearnerState, step: Step) -> Batch:
        """Return the trials of a step as training data; `process` must have used the same state."""
        trials = self.trials(step.episodes)
        behind = self._values(state, trials)[1] if self.settings.trial_end == "bootstrapped" else None
        inputs = self.inputs(trials)
        return Batch(trials, step.samples, inputs, self.policy, self.setup.processing, self.device, behind)

    def described(self, episodes: EpisodeBatch, batch: Batch) -> Metrics:
        """Return the mean returns of a trial's first and last episodes.

        If the critic sees the end of a trial, also return metrics of the advantages near it.
        """
        by_place = episodes.episode_returns.reshape(len(episodes.lengths), self.settings.episodes_per_trial, -1)
        ends = {"first_episode_return": by_place[:, 0], "last_episode_return": by_place[:, -1]}
        found = {name: float(returns.mean()) for name, returns in ends.items()}
        return found | (batch.end_advantages if self.settings.position_size else {})

    def _values(self, state: LearnerState, trials: Trials) -> tuple[Array, Array | None]:
        """Return values [N, L] along trials and, if bootstrapped, those credited after their ends, [N] (else None)."""
        bootstrapped = self.settings.trial_end == "bootstrapped"
        # One pass: the state after the last step follows from the state before it.
        inputs = trials.inputs_to_end if bootstrapped else self.inputs(trials)
        # The critic may be a layer on the policy's memory, so values may depend on the policy's parameters.
        arrays = {name: state.extra[name] for name in self.critic} | state.params
        params = {name: torch.tensor(value, device=self.device) for name, value in arrays.items()}
        rows = torch.from_numpy(np.ascontiguousarray(inputs.swapaxes(0, 1))).to(self.device)
        with torch.no_grad():
            found = self.policy.values(params, rows)
        mean, std = state.extra[CRITIC_SCALE]
        values: Array = np.ascontiguousarray(found.t().cpu().numpy()) * std + mean
        if not bootstrapped:
            return values, None
        behind = values[np.arange(len(trials)), trials.lengths]
        return values[:, :-1], np.where(trials.cut, behind, 0)

    def improved(
        self, state: LearnerState, step: Step, *, run_seed: int, iteration: int
    ) -> tuple[LearnerState, Metrics]:
        """Run epochs of gradient steps on minibatches of trials; return the next state and metrics."""
        settings, num_updates = self.settings, int(state.extra[NUM_UPDATES])
        assert isinstance(settings, TrialSteps), "other settings override update"
        clip_eps, value, entropy = settings.policy_clip, settings.value_coeff, settings.entropy_coeff
        rate = settings.learning_rate * self.lr_factor(num_updates)
        params = {name: value for name, value in state.params.items() if name not in self.inferring}
        critic = {name: state.extra[name] for name in self.critic}
        batch = self.batch(state, step)
        flat = FlatTensors(params | critic, self.device, [*self.policy.learned(params), *critic])
        flat.optimize(settings.optimizer, renamed(state.optimizer, self.optimizer_prefix, ""))
        norms: list[Tensor] = []
        for epoch in range(settings.num_epochs):
            order = generator(run_seed, "minibatches", iteration, epoch).permutation(len(batch))
            for rows in np.array_split(order, -(-len(batch) // settings.trials_per_minibatch)):
                of = batch.sequences(rows)
                judged = self.policy.judged(flat.params, of)
                loss = sequence_loss(*judged, of, clip_eps=clip_eps, value=value, entropy=entropy)
                norms.append(flat.down(loss, rate, settings.max_grad_norm))
        after = flat.copies()
        params, critic = ({name: after[name] for name in of} for of in (params, critic))
        require_finite_params(
            {"the policy": params, "the critic": critic},
            stage="meta_optimize",
            advice="Lower algorithm.learning_rate or set algorithm.max_grad_norm",
        )
        metrics = {
            **self._losses(flat.params, batch, settings.policy_clip),
            **self.described(step.episodes, batch),
            # Read metrics last: reading one waits for the device.
            "gradient_norm": float(torch.stack(norms).mean()),
            "learning_rate": rate,
        }
        optimizer = state.optimizer | renamed(flat.optimizer_state, "", self.optimizer_prefix)
        counter = np.array(num_updates + 1, np.int64)
        extra = {**state.extra, **critic, CRITIC_SCALE: batch.scale, NUM_UPDATES: counter}
        return LearnerState(state.params | params, optimizer, extra), metrics

    @torch.no_grad()
    def _losses(self, params: Mapping[str, Tensor], batch: Batch, clip_eps: float | None) -> Metrics:
        all_trials = np.arange(len(batch))
        of: Sequences = batch.sequences(all_trials)
        now, values = self.policy.judged(params, of)
        log_prob = now.log_prob(of.actions)
        described = {
            "loss_after": policy_loss(log_prob, of.old_log_prob, of.advantages, clip_eps),
            "value_loss_after": 0.5 * (values - of.targets).square().mean() * float(batch.scale[1]) ** 2,
            "kl": batch.recorded(all_trials).kl(now).mean(),
            "entropy_after": now.entropy().mean(),
        }
        if clip_eps is not None:
            described["clip_fraction"] = clip_fraction(log_prob, of.old_log_prob, clip_eps)
        return {name: float(value) for name, value in described.items()}
