"""Policy settings. This module does not import torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from metaloom.pipeline.nn.cells import CellSpec
from metaloom.pipeline.nn.spec import (
    ACTIVATIONS,
    BUILT_IN_NETWORKS,
    RECURRENT_NETWORKS,
    RESIDUAL,
    NetworkSpec,
    Spaces,
    check_fits,
    check_network_settings,
    is_image,
    of_encoder,
)
from metaloom.pipeline.plugins import Plugins
from metaloom.pipeline.schema import ConfigError, Settings, later, suggestion

ActorKind = Literal["policy", "recurrent", "posterior", "uniform", "tanh_gaussian", "q_values", "recorded"]
"""Kinds of actors. "policy": Gaussian for continuous and categorical for discrete actions. "recurrent": the same with
memory. "posterior": the same, conditioned on an inferred posterior. "uniform": random actions. "tanh_gaussian",
"q_values": for off-policy learners. "recorded": replays stored actions."""

LayerSize = Annotated[int, Field(ge=1)]

POLICIES = Plugins("policy", "metaloom.policies", {})  # registry of custom policies, subclasses of OwnPolicy


class EncoderConfig(Settings):
    """Observation encoder in front of a recurrent network. A bare string sets the name: `--set policy.encoder=cnn`."""

    short_for = "name"
    name: str
    """cnn (for images), mlp, the name of a plug-in, or module:Class of a custom torch.nn.Module."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Network options; see policy.network_options."""
    size: int = Field(default=64, ge=1)
    """Output size of the encoder. Built-in networks have a relu after each layer."""

    @model_validator(mode="after")
    def _network_has_its_options(self) -> "EncoderConfig":
        if self.name in (*RECURRENT_NETWORKS, RESIDUAL):
            raise ValueError(f"got {self.name}; expected cnn, mlp, or module:Class of a torch.nn.Module")
        check_network_settings(self.name, (), self.options)
        return self

    def spec(self, spaces: Spaces) -> NetworkSpec:
        """Return the NetworkSpec of the encoder, or raise ConfigError if it does not support the observations."""
        relu = "relu" if self.name in BUILT_IN_NETWORKS else "identity"
        shape, scale = spaces.observation_shape, spaces.observation_scale
        spec = NetworkSpec(self.name, shape, self.size, (), relu, relu, scale, options=self.options)
        with of_encoder():
            check_fits(spec)
        return spec


class PolicyConfig(Settings):
    """Settings of a policy and its network, which outputs means for continuous actions or logits for discrete ones.

    Gaussian policies have one state-independent standard deviation per action dimension.
    A bare string sets the name: `--set policy=my_policies:Beta`.
    """

    short_for = "name"
    name: str | None = later(None)
    """module:Class of a custom policy, or the name of a plug-in; null: the Gaussian or categorical policy."""
    options: dict[str, JsonValue] = later({})
    """Options of a custom policy."""
    hidden_sizes: tuple[LayerSize, ...] = (64, 64)
    """Units in each hidden layer of the policy network, [] for a linear network; in a cnn, the layers after the
    convolutions."""
    init_std: float = Field(default=1.0, gt=0)
    """Initial standard deviation of each action dimension."""
    min_std: float = Field(default=1e-6, gt=0)
    """Lower bound of the standard deviation in acting, recording and losses."""
    learn_std: bool = True
    """Learn the standard deviation in adaptation and meta-training; false: keep init_std."""
    network: str = later("mlp")
    """mlp, cnn (for images), residual, the name of a plug-in, or module:Class of a custom torch.nn.Module. Critics use
    the same kind of network. For algorithms with memory: gru, lstm, linear-attention, or module:Class."""
    network_options: dict[str, JsonValue] = later({})
    """For cnn: channels, kernel_sizes, strides, channels_first. For linear-attention: key_size, value_size, reading
    (linear or asinh). For module:Class: keyword arguments of the class."""
    encoder: EncoderConfig | None = later(None)
    """Observation encoder in front of a recurrent network; needed for images."""
    activation: str | None = later(None)
    """Activation after each hidden layer: tanh, relu, identity, or a torch.nn class such as SiLU; null: tanh, or relu
    for off-policy algorithms."""
    output_activation: str = later("identity")
    """Activation after the policy network's last layer; not for critics."""
    normalize_observations: bool = later(False)
    """Normalize observations for policy and critic with a running mean and standard deviation, and clip them to ±10.
    The statistics are part of the learner state and constant within an iteration."""

    @field_validator("activation", "output_activation")
    @classmethod
    def _activation_is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in ACTIVATIONS:
            raise ValueError(f"got {value!r}; expected one of {', '.join(ACTIVATIONS)}{suggestion(value, ACTIVATIONS)}")
        return value

    @model_validator(mode="after")
    def _floor_is_below_start(self) -> "PolicyConfig":
        if self.min_std > self.init_std:
            raise ValueError(f"min_std is {self.min_std} but init_std is {self.init_std}; use min_std <= init_std")
        return self

    @model_validator(mode="after")
    def _network_has_its_options(self) -> "PolicyConfig":
        check_network_settings(self.network, self.hidden_sizes, self.network_options)
        if self.name is not None:
            POLICIES.path(self.name)
            return self
        if self.options:
            raise ValueError(f"options are {self.options} but name is not set, and only a custom policy reads them")
        if self.network not in BUILT_IN_NETWORKS:
            for name in ("activation", "output_activation"):
                if (value := getattr(self, name)) != _DEFAULTS[name]:
                    raise ValueError(f"{name} is {value} but network is {self.network}, which has its own; remove it")
        return self

    @property
    def std_options(self) -> dict[str, object]:
        """Settings of the standard deviation that differ from their defaults, keyed by name."""
        names = ("init_std", "min_std", "learn_std")
        return {name: getattr(self, name) for name in names if getattr(self, name) != _DEFAULTS[name]}

    def network_spec(
        self, spaces: Spaces, output_size: int, *, extra_size: int = 0, activation: str = "tanh"
    ) -> NetworkSpec:
        """Return the NetworkSpec of the policy network, or raise ConfigError if it does not support the observations.

        Args:
            spaces: Observation and action sizes of the environment.
            output_size: Number of outputs.
            extra_size: Size of extra inputs after the observation: a latent variable, or actions for a critic.
            activation: Default activation: tanh, or relu for off-policy algorithms.
        """
        spec = NetworkSpec(
            self.network,
            spaces.observation_shape,
            output_size,
            self.hidden_sizes,
            self.activation or activation,
            self.output_activation,
            spaces.observation_scale,
            extra_size,
            self.network_options,
        )
        check_fits(spec)
        return spec

    def cell_spec(self, spaces: Spaces) -> CellSpec:
        """Return the CellSpec of the recurrent network, or raise ConfigError if images have no encoder."""
        encoder = None if self.encoder is None else self.encoder.spec(spaces)
        if encoder is None and is_image(spaces.observation_shape, spaces.observation_scale):
            raise ConfigError(
                f"policy.network is {self.network}, but observations are images of shape {spaces.observation_shape}; "
                "use policy.encoder=cnn or module:Class of a torch.nn.Module, or flatten images with "
                "--set 'env.wrappers=[FlattenObservation]'"
            )
        seen = encoder.output_size if encoder else spaces.observation_size
        action_size = spaces.num_actions or spaces.action_size
        return CellSpec(self.network, seen + action_size + 2, self.hidden_sizes[-1], self.network_options, encoder)

    def critic(self, hidden_sizes: tuple[int, ...]) -> "PolicyConfig":
        """Return settings for a critic network: the policy's kind, with these hidden layers and a linear last layer."""
        return self.model_copy(update={"hidden_sizes": hidden_sizes, "output_activation": "identity"})


_DEFAULTS: dict[str, Any] = {name: about.default for name, about in PolicyConfig.model_fields.items()}
