"""Settings of policies with a memory: RL2, Duan et al. 2016, arXiv:1611.02779, and Wang et al. 2016, arXiv:1611.05763.

RL2 keeps its memory through the episodes of a task; A2C and PPO of a single task keep theirs within an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.actor_critic.settings import RUN_DEFAULTS
from metaloom.pipeline.algorithms.contract import RunSettings
from metaloom.pipeline.algorithms.trials.settings import TrialClipping, TrialSettings, TrialSteps
from metaloom.pipeline.nn.cells import RECURRENT_NETWORKS, CellSpec
from metaloom.pipeline.nn.optimization import NaturalSteps, OptimizerConfig
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.schema import later

_STATE_COPIES = 4
"""Of what trials remember while they are sampled."""


class WithMemory(TrialSettings):
    """A recurrent policy, with values that are a layer on its memory."""

    graph: ClassVar[str] = "on_policy"
    actor: ClassVar[ActorKind] = "recurrent"
    gradient_copies: ClassVar[int] = 3
    """What a gradient keeps of what the memory gives for a step; measured."""

    initial_output_scale: float = Field(default=1.0, ge=0)
    """Multiplies the policy's output layer at the start. Near 0, what is remembered hardly learns at first, since the
    gradient reaches it through this layer."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """One GRU, no baseline, noise that reaches the ends of the action box; see AlgorithmSettings."""
        return {
            "env": {"action_scale": 1.0},
            "policy": {"network": "gru", "hidden_sizes": (128,)},
            "baseline": {"name": "zero"},
            "processing": {"gae_lambda": 0.95},
            "episodes_per_task": self.episodes_per_trial,
        }

    @property
    def trials_at_once(self) -> int:
        """Whole trials, at most, that are differentiated at a time."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many trials it differentiates at a time")

    def model_bytes(
        self, *, trials: int, trial_steps: int, observation_size: int, action_size: int, policy: PolicyConfig
    ) -> int:
        """What the memory gives for all trials, and what torch keeps of those at once; see AlgorithmSettings."""
        if policy.network not in RECURRENT_NETWORKS:
            return 0  # a cell of the user's, of which nobody knows
        seen = observation_size + action_size + 2
        cell = CellSpec(policy.network, seen, policy.hidden_sizes[-1], policy.network_options)
        outputs, pairs = cell.step_outputs, cell.step_pairs(trial_steps)
        of_all = trial_steps * (seen + outputs) + pairs**2 + _STATE_COPIES * cell.state_size
        learned = min(trials, self.trials_at_once) * trial_steps
        return 4 * (trials * of_all + learned * (self.gradient_copies * outputs + 2 * pairs))

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        """See TrialSettings."""
        if run.policy.name is not None:
            yield (
                f"policy.name is {run.policy.name} but {self.name} needs a memory; set policy.network to a class of "
                "your own"
            )
        if run.policy.network in BUILT_IN_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, which has no memory; required "
                f"{', '.join(RECURRENT_NETWORKS)}, or module:Class of a network with a memory for {self.name}"
            )


class WithMemorySteps(WithMemory, TrialSteps):
    """Learns by gradient steps on minibatches of trials."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:MemoryLearner"

    @property
    def trials_at_once(self) -> int:
        """See WithMemory."""
        return self.trials_per_minibatch


class RL2(WithMemorySteps, TrialClipping):
    """A recurrent policy that adapts to a task by what it remembers of its episodes there, trained by PPO."""

    name: Literal["rl2"] = "rl2"


class RL2TRPO(WithMemory, NaturalSteps):
    """RL2 as in its paper: every update is one step within a trust region."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.trust_region:RL2TRPOLearner"
    gradient_copies: ClassVar[int] = 6  # differentiated twice

    name: Literal["rl2-trpo"] = "rl2-trpo"

    critic_regularization: float = Field(default=1e-5, ge=0)
    """Multiple of the identity in the least-squares fit of the values to their targets."""
    trials_per_chunk: int = Field(default=64, ge=1)
    """Whole trials that are differentiated at a time, which bounds the memory of an update."""

    @property
    def trials_at_once(self) -> int:
        """See WithMemory."""
        return self.trials_per_chunk


class WithinEpisode(WithMemorySteps):
    """A memory of the episode alone, on a single task."""

    episodes_per_trial: Literal[1] = 1
    """One: every episode begins with nothing remembered."""

    @property
    def adapts(self) -> bool:
        """No episode knows of another."""
        return False

    @property
    def goes_on(self) -> bool:
        """An episode that its step limit ends has not come to its end; see TrialSettings."""
        return True

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """Those of actor-critics, and one GRU; see AlgorithmSettings."""
        return {**RUN_DEFAULTS, "policy": {"network": "gru", "hidden_sizes": (128,)}}


class RecurrentPPO(WithinEpisode, TrialClipping):
    """PPO of a policy that remembers its episode, on whole episodes."""

    name: Literal["recurrent-ppo"] = "recurrent-ppo"


class RecurrentA2C(WithinEpisode):
    """A2C of a policy that remembers its episode: one pass of policy gradient over whole episodes, by RMSprop."""

    name: Literal["recurrent-a2c"] = "recurrent-a2c"

    num_epochs: Literal[1] = 1
    """One: a second pass would follow the gradient of a policy that no longer acts."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Of policy and values together."""
