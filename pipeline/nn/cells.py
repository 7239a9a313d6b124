"""Built-in recurrent cells: names, sizes and parameter shapes. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from metaloom.pipeline.nn.spec import GRU, LINEAR_ATTENTION, LSTM, AttentionOptions, NetworkSpec
from metaloom.pipeline.types import Shapes

ATTENTION_STEPS = 256  # block length within which linear-attention computes all pairs of steps at once

CELL, ENCODER = "cell", "encoder"  # parameter prefixes of a cell and its encoder


@dataclass(frozen=True)
class CellSpec:
    """Specification of a recurrent network, which maps an input and a state to features and the next state."""

    name: str  # gru, lstm, linear-attention, another registered name, or module:Class of a torch.nn.Module
    input_size: int  # input size of the cell; with an encoder, the encoder's output replaces the observation
    hidden_size: int  # number of features of a built-in cell, which is also the width of its layers
    # Options of linear-attention, or keyword arguments of a module's class.
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    encoder: NetworkSpec | None = None  # encodes observations; None if the cell reads observations directly

    @property
    def seen_size(self) -> int:
        """Size of one input before encoding: observation, last action, last reward and end-of-episode flag."""
        return self.input_size + (self.encoder.input_size - self.encoder.output_size if self.encoder else 0)

    @property
    def attention(self) -> AttentionOptions:
        """Options of linear-attention."""
        return AttentionOptions.model_validate(dict(self.options))

    @property
    def state_size(self) -> int:
        """Size of a built-in cell's state.

        In an lstm, the cell state follows the features; in linear-attention, the last input follows the memory.
        """
        if self.name == LINEAR_ATTENTION:
            return self.attention.key_size * self.attention.value_size + self.input_size
        return {GRU: 1, LSTM: 2}[self.name] * self.hidden_size


@dataclass(frozen=True)
class BuiltInCell:
    """Base class for built-in cells; see Cell in pipeline.nn.recurrent."""

    spec: CellSpec

    @property
    def shapes(self) -> Shapes:
        return cell_shapes(self.spec)

    @property
    def state_size(self) -> int:
        return self.spec.state_size

    @property
    def feature_size(self) -> int:
        return self.spec.hidden_size


def cell_shapes(spec: CellSpec) -> Shapes:
    """Return the shapes of a built-in cell's parameters, in order. Kernels are (in, out), with gates concatenated."""
    if spec.name != LINEAR_ATTENTION:
        gates = {GRU: 3, LSTM: 4}[spec.name] * spec.hidden_size
        return {
            f"{CELL}.input_kernel": (spec.input_size, gates),
            f"{CELL}.hidden_kernel": (spec.hidden_size, gates),
            f"{CELL}.input_bias": (gates,),
            f"{CELL}.hidden_bias": (gates,),
        }
    N, H, sizes = spec.input_size, spec.hidden_size, spec.attention
    layers = {
        "event": (2 * N, H),
        "value": (H, sizes.value_size),
        "key": (2 * N, sizes.key_size),
        "query": (N, sizes.key_size),
        "reading": (sizes.value_size + N, H),
        "features": (H, H),
    }
    shapes: Shapes = {}
    for name, (size_in, size_out) in layers.items():
        shapes[f"{CELL}.{name}.kernel"] = (size_in, size_out)
        shapes[f"{CELL}.{name}.bias"] = (size_out,)
    return shapes
