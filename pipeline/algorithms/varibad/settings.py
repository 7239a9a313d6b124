"""Settings for VariBAD (Zintgraf et al. 2020, arXiv:1910.08348) with PPO."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.algorithms.trials.settings import TrialClipping, TrialSteps
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.spec import RECURRENT_NETWORKS
from metaloom.pipeline.policies.config import ActorKind, LayerSize
from metaloom.pipeline.schema import MOST_REPEATS, later


class VariBAD(TrialClipping, TrialSteps, AlgorithmSettings):
    """VariBAD: a policy conditioned on a posterior over its task, inferred by a variational autoencoder."""

    graph: ClassVar[str] = "trial_inference"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.varibad.learner:VariBADLearner"
    actor: ClassVar[ActorKind] = "posterior"
    sizes: ClassVar[tuple[str, ...]] = ("episodes_per_trial", "latent_size")

    name: Literal["varibad"] = "varibad"

    trial_end: Literal["seen", "unseen"] = later("seen", before="unseen")
    """The value after a trial's last step is 0. seen: the critic sees the position in the trial; unseen: it does
    not."""

    # Networks.
    latent_size: int = Field(default=5, ge=1)
    """Dimension of a task's latent variable m."""
    embedding_size: int = Field(default=32, ge=1)
    """Units in the encoder's embedding of a step."""
    encoder_size: int = Field(default=64, ge=1)
    """Units in the encoder's GRU."""
    decoder_layers: tuple[LayerSize, ...] = Field(default=(64, 64), min_length=1)
    """Units in each hidden layer of every decoder."""
    critic_hidden_sizes: tuple[LayerSize, ...] = (64, 64)
    """Units in each hidden layer of the critic, which has the policy's inputs."""

    # Likelihood of trials.
    reward_decoder: Literal["network", "heads"] = "network"
    """Prediction of a reward. network: from m, observation, action and next observation. heads: a linear
    function of the next observation whose weights are predicted from m; with one-hot cells, one output per cell."""
    reward_likelihood: Literal["gaussian", "bernoulli"] = "gaussian"
    """Distribution of a reward: a Gaussian with variance 1, or a Bernoulli for whether the reward is positive."""
    decode_states: bool = False
    """Also predict next observations. Needed if tasks differ in dynamics."""
    reward_weight: float = Field(default=1.0, ge=0)
    """Weight of the log-likelihood of rewards."""
    state_weight: float = Field(default=1.0, ge=0)
    """With decode_states: weight of the log-likelihood of next observations."""
    kl_weight: float = Field(default=0.1, ge=0)
    """Weight of the KL divergence of each posterior from the previous one."""

    # Gradient steps of the model.
    model_learning_rate: float = Field(default=1e-3, gt=0)
    """Step size for the encoder and the decoders, before the schedule's factor."""
    model_optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Joint optimizer for the encoder and the decoders; adam and rmsprop use ε = 1e-8."""
    model_updates: int = Field(default=10, ge=1, le=MOST_REPEATS)
    """Gradient steps of the encoder and the decoders per iteration."""
    trials_per_model_update: int = Field(default=25, ge=1)
    """Trials from the buffer per gradient step."""
    buffer_iterations: int = Field(default=20, ge=1)
    """Number of recent iterations, including this one, whose trials train the model."""
    elbo_steps: int | None = Field(default=None, ge=1, le=MOST_REPEATS)
    """Number of posteriors per trial and gradient step, redrawn in each step; null: all."""
    decoded_steps: int | None = Field(default=None, ge=1)
    """Number of steps decoded from each posterior, redrawn in each gradient step; null: all."""

    @property
    def earlier_iterations(self) -> int:
        return self.buffer_iterations - 1

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        if run.policy.name is not None:
            yield (
                f"policy.name is {run.policy.name} but varibad has its own policy, conditioned on a posterior; set "
                "policy.network to a custom class"
            )
        if run.policy.network in RECURRENT_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, but varibad keeps its memory in its encoder "
                "(algorithm.encoder_size); use a network without memory, such as mlp"
            )
        if self.state_weight != 1 and not self.decode_states:
            yield f"algorithm.state_weight is {self.state_weight} but algorithm.decode_states is off; remove it"
