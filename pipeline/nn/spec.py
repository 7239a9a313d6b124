"""Which network, between which sizes, as plain data: workers read it without importing torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

MLP = "mlp"


@dataclass(frozen=True)
class NetworkSpec:
    """A network from observations (and whatever is put behind them) to outputs.

    Attributes:
        name: `mlp`, another registered name, or module:Class of a torch.nn.Module.
        input_shape: of one input as the network takes it; inputs are stored flattened, math.prod(input_shape) numbers.
        input_scale: what inputs are divided by; 255 for images of bytes.
        output_size: outputs.
        hidden_sizes: units of every hidden layer of an mlp.
        activation: behind hidden layers: tanh, relu, or any class of torch.nn by name, such as SiLU.
        output_activation: behind the last layer; identity for none.
        options: keyword arguments of a module's class.
    """

    name: str
    input_shape: tuple[int, ...]
    output_size: int
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    output_activation: str = "identity"
    input_scale: float = 1.0
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    @property
    def input_size(self) -> int:
        """Numbers in one input."""
        return math.prod(self.input_shape)

    @property
    def is_plain(self) -> bool:
        """Whether it is a multilayer perceptron that kernels know: tanh or relu, and a linear last layer."""
        return self.name == MLP and self.activation in ("tanh", "relu") and self.output_activation == "identity"
