"""Network specifications. This module does not import torch."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from metaloom.pipeline.plugins import Plugins
from metaloom.pipeline.schema import ConfigError, Settings, describe
from metaloom.pipeline.types import Shapes

MLP, CNN, RESIDUAL = "mlp", "cnn", "residual"
BUILT_IN_NETWORKS = (MLP, CNN, RESIDUAL)
GRU, LSTM, LINEAR_ATTENTION = "gru", "lstm", "linear-attention"
RECURRENT_NETWORKS = (GRU, LSTM, LINEAR_ATTENTION)
"""Networks with memory, for algorithms whose actors keep a memory."""
SIZED_NETWORKS = (*BUILT_IN_NETWORKS, *RECURRENT_NETWORKS)
"""Networks whose layers are sized by hidden_sizes."""
WITHOUT_MEMORY = (
    f"one of {', '.join(BUILT_IN_NETWORKS)}, or an algorithm that keeps a memory: recurrent-a2c, recurrent-ppo, rl2, "
    "rl2-trpo"
)
"""Alternatives to a recurrent network with an algorithm that keeps no memory, for messages."""

NETWORKS = Plugins(
    "network",
    "metaloom.networks",
    {
        MLP: "metaloom.pipeline.nn.networks:MLP",
        CNN: "metaloom.pipeline.nn.networks:CNN",
        RESIDUAL: "metaloom.pipeline.nn.networks:ResidualMLP",
        GRU: "metaloom.pipeline.nn.recurrent:GRU",
        LSTM: "metaloom.pipeline.nn.recurrent:LSTM",
        LINEAR_ATTENTION: "metaloom.pipeline.nn.recurrent:LinearAttention",
    },
)
"""Registry of networks. Custom networks are subclasses of torch.nn.Module."""

TORCH_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish",
    "ReLU", "ReLU6", "SELU", "Sigmoid", "SiLU", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip
"""Elementwise torch.nn activations without parameters or randomness."""
ACTIVATIONS = ("identity", "tanh", "relu", *TORCH_ACTIVATIONS)


@dataclass(frozen=True)
class Spaces:
    """Observation and action sizes of an environment.

    Attributes:
        observation_shape: Shape of one observation from the environment. Batches store observations flattened, size O.
        observation_scale: Divisor applied to observations before they enter a network; 255 for byte images.
        action_size: Action dimension A; 0 for discrete actions.
        num_actions: Number of discrete actions; 0 for continuous actions.
    """

    observation_shape: tuple[int, ...]
    observation_scale: float
    action_size: int
    num_actions: int

    @property
    def observation_size(self) -> int:
        """Size O of one observation."""
        return math.prod(self.observation_shape)


@dataclass(frozen=True)
class NetworkSpec:
    """Specification of a network that maps an observation, followed by any extra inputs, to outputs."""

    name: str  # mlp, cnn, residual, another registered name, or module:Class of a torch.nn.Module
    input_shape: tuple[int, ...]  # shape of one observation; inputs are stored flattened, with size `input_size`
    output_size: int
    hidden_sizes: tuple[int, ...] = (64, 64)  # sizes of the hidden layers; in a cnn, those after the convolutions
    activation: str = "tanh"  # after each hidden layer, one of ACTIVATIONS
    output_activation: str = "identity"  # after the last layer
    input_scale: float = 1.0  # divisor applied to observations; 255 for byte images
    extra_size: int = 0  # size of extra inputs after the flattened observation, such as actions or a latent variable
    # Options of a cnn, or keyword arguments of a module's class.
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    @property
    def observation_size(self) -> int:
        return math.prod(self.input_shape)

    @property
    def input_size(self) -> int:
        """Size of one input: the observation and the extra inputs."""
        return self.observation_size + self.extra_size

    @property
    def is_plain(self) -> bool:
        """True for unscaled tanh or relu MLPs with a linear last layer, which fused kernels support."""
        activations = self.activation in ("tanh", "relu") and self.output_activation == "identity"
        return self.name == MLP and activations and self.input_scale == 1


class AttentionOptions(Settings):
    """Options of linear-attention."""

    key_size: int = Field(default=16, ge=1)
    """Number of memory slots, K."""
    value_size: int = Field(default=16, ge=1)
    """Size V of the value in each memory slot."""
    reading: Literal["linear", "asinh"] = "linear"
    """Value read from memory: y itself, or asinh y, which grows logarithmically for large y."""


class ConvolutionOptions(Settings):
    """Options of a cnn: unpadded convolutions before the layers of `hidden_sizes`."""

    channels: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(16, 32), min_length=1)
    """Output channels of each convolution."""
    kernel_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (3, 3)
    """Kernel size of each convolution, in pixels."""
    strides: tuple[Annotated[int, Field(ge=1)], ...] = (2, 2)
    """Stride of each convolution, in pixels."""
    channels_first: bool = False
    """Images are [channels, height, width], as in gymnasium's stacked grayscale frames, instead of [height, width,
    channels]."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> "ConvolutionOptions":
        lengths = {len(self.channels), len(self.kernel_sizes), len(self.strides)}
        if len(lengths) > 1:
            raise ValueError(
                f"channels {self.channels}, kernel_sizes {self.kernel_sizes}, strides {self.strides} differ in length; "
                "give one entry of each per convolution"
            )
        return self


def is_image(observation_shape: tuple[int, ...], observation_scale: float) -> bool:
    """Return True if observations are images: 3-D arrays, or 2-D arrays of bytes, whose scale is not 1."""
    return len(observation_shape) == 3 or (len(observation_shape) == 2 and observation_scale != 1)


def check_network_settings(name: str, hidden_sizes: tuple[int, ...], options: Mapping[str, JsonValue]) -> None:
    """Raise ValueError if a network's name, hidden layer sizes or options are invalid, whatever the environment."""
    NETWORKS.path(name)
    if name in _OPTIONS:
        try:
            _OPTIONS[name].model_validate(dict(options))
        except ValidationError as problem:
            found = problem.errors()[0]
            where = ".".join(map(str, found["loc"])) or dict(options)
            raise ValueError(
                f"network_options: {where}: {describe(found)}; the options of {name} are {_names(_OPTIONS[name])}"
            ) from None
    elif name in SIZED_NETWORKS and options:
        others = "; ".join(f"{other} takes {_names(of)}" for other, of in _OPTIONS.items())
        raise ValueError(f"network {name} has no options, got {dict(options)}; {others}")
    if name == RESIDUAL and len(set(hidden_sizes)) > 1:
        raise ValueError(f"hidden_sizes of network residual must be equal, got {hidden_sizes}")
    if name in RECURRENT_NETWORKS and len(hidden_sizes) != 1:
        raise ValueError(f"network {name} has a single layer; hidden_sizes must be one size, got {hidden_sizes}")


def check_fits(spec: NetworkSpec) -> None:
    """Raise ConfigError if a built-in network does not suit the observations or is recurrent; suggest one that fits."""
    shape = spec.input_shape
    if spec.name in RECURRENT_NETWORKS:
        raise ConfigError(
            f"policy.network is {spec.name}, which has a memory, but the algorithm's actor has none; use "
            f"{WITHOUT_MEMORY}"
        )
    if spec.name == CNN:
        convolutions(spec)
    elif spec.name in BUILT_IN_NETWORKS and is_image(shape, spec.input_scale):
        options = _fitting_options(shape)
        others = f" with policy.network_options={options}" if options else ""
        raise ConfigError(
            f"policy.network is {spec.name}, but observations are images of shape {shape}, whose pixels it would "
            f"treat as unrelated numbers; use policy.network=cnn{others}, module:Class of a torch.nn.Module, or "
            "--set 'env.wrappers=[FlattenObservation]' to flatten them anyway"
        )


@contextmanager
def of_encoder() -> Generator[None]:
    """Within the block, convert errors about policy.network to errors about policy.encoder."""
    try:
        yield
    except ConfigError as problem:
        named = str(problem).replace("policy.network_options", "policy.encoder.options")
        raise ConfigError(named.replace("policy.network", "policy.encoder")) from problem


@dataclass(frozen=True)
class Convolution:
    """One unpadded convolution: [channels_in, height, width] -> [channels_out, ...]."""

    name: str
    channels_in: int
    channels_out: int
    kernel_size: int
    stride: int


@dataclass(frozen=True)
class Convolutions:
    """The convolutions of a cnn, which map an image of height x width pixels to a vector [features]."""

    layers: tuple[Convolution, ...]
    height: int
    width: int
    channels: int
    channels_first: bool
    features: int


def convolutions(spec: NetworkSpec) -> Convolutions:
    """Return the layout of a cnn's convolutions, or raise ConfigError if options or observations do not suit it."""
    try:
        options = ConvolutionOptions.model_validate(dict(spec.options))
    except ValidationError as problem:
        raise ConfigError(f"policy.network_options for cnn: {problem.errors()[0]['msg']}; {_CNN_OPTIONS}") from None
    if len(spec.input_shape) not in (2, 3):
        raise ConfigError(
            f"policy.network is cnn, but observations have the shape {spec.input_shape}; expected images, [height, "
            "width] or [height, width, channels]; for other observations, use policy.network=mlp"
        )
    first = options.channels_first and len(spec.input_shape) == 3
    height, width = spec.input_shape[1:] if first else spec.input_shape[:2]
    channels = 1 if len(spec.input_shape) == 2 else spec.input_shape[0] if first else spec.input_shape[2]
    layers: list[Convolution] = []
    rows, columns = height, width
    ins = (channels, *options.channels[:-1])
    for i, sizes in enumerate(zip(ins, options.channels, options.kernel_sizes, options.strides, strict=True)):
        layers.append(Convolution(f"conv_{i}", *sizes))
        rows, columns = ((length - sizes[2]) // sizes[3] + 1 for length in (rows, columns))
        if rows < 1 or columns < 1:
            fitting = _fitting_options(spec.input_shape)
            advice = f"such as --set 'policy.network_options={fitting}'" if fitting else "or the defaults"
            raise ConfigError(
                f"policy.network_options: nothing is left of an image of {height} x {width} pixels after convolution "
                f"{i} of kernel_sizes {options.kernel_sizes} and strides {options.strides}; use smaller or fewer "
                f"ones, {advice}"
            )
    features = options.channels[-1] * rows * columns
    return Convolutions(tuple(layers), height, width, channels, first, features)


def _fitting_options(shape: tuple[int, ...]) -> str:
    """Return cnn options, as YAML, that suit images of this shape; "" if the default options do."""
    if min(shape[:2]) >= _SMALLEST:
        return ""
    if len(shape) == 3 and min(shape[1:]) >= _SMALLEST:
        return "{channels_first: true}"
    return f"{{channels: [32], kernel_sizes: [{min(3, *shape[:2])}], strides: [1]}}"


@cache
def layer_paths(prefix: str, num_hidden: int) -> tuple[str, ...]:
    """Return the names of a network's dense layers, in order: prefix.hidden_0, ..., prefix.output."""
    return (*(f"{prefix}.hidden_{i}" for i in range(num_hidden)), f"{prefix}.output")


def parameter_shapes(prefix: str, spec: NetworkSpec) -> Shapes:
    """Return the shapes of a built-in network's parameters, in order. Kernels are (in, out) or (out, in, k, k)."""
    shapes: Shapes = {}
    inputs = spec.input_size
    if spec.name == CNN:
        found = convolutions(spec)
        inputs = found.features + spec.extra_size
        for layer in found.layers:
            k = layer.kernel_size
            shapes[f"{prefix}.{layer.name}.kernel"] = (layer.channels_out, layer.channels_in, k, k)
            shapes[f"{prefix}.{layer.name}.bias"] = (layer.channels_out,)
    sizes = pairwise([inputs, *spec.hidden_sizes, spec.output_size])
    for name, (size_in, size_out) in zip(layer_paths(prefix, len(spec.hidden_sizes)), sizes, strict=True):
        shapes[f"{name}.kernel"] = (size_in, size_out)
        shapes[f"{name}.bias"] = (size_out,)
    return shapes


def _names(options: type[Settings]) -> str:
    return ", ".join(options.model_fields)


def _smallest() -> int:
    options, pixels = ConvolutionOptions(), 1
    for kernel, stride in zip(reversed(options.kernel_sizes), reversed(options.strides), strict=True):
        pixels = (pixels - 1) * stride + kernel
    return pixels


_SMALLEST = _smallest()
"""Smallest image side in pixels for the default convolutions."""
_CNN_OPTIONS = _names(ConvolutionOptions)
_OPTIONS: Mapping[str, type[Settings]] = {CNN: ConvolutionOptions, LINEAR_ATTENTION: AttentionOptions}
