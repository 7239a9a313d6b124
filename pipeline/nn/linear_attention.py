"""A memory that is a table: every step adds to it, every step reads from it. Learned over many steps at once."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.cells import ATTENTION_STEPS, CELL, BuiltInCell
from metaloom.pipeline.types import Params


class LinearAttention(BuiltInCell):
    """Linear attention over the steps of a trial, Katharopoulos et al. 2020, arXiv:2006.16236, eq. 16 to 20.

    Of the last two inputs u = (x, x before) follow a key k = softmax(u K), over K places, and a value
    v = relu(u E) V. They are added to the memory, S' = S + k vᵀ. The input reads from it, y = qᵀ S' with
    q = softmax(x Q), and the features are relu(relu((y, x) R) F), or with `reading: asinh` those of (asinh y, x). All
    layers have biases. The state is (S, x). See Cell.

    Unlike in eq. 20, nothing is divided by a sum of keys, so that the memory can count. But then y grows with every
    step that is like those before, and with it all that a small change of parameters changes; asinh y hardly does.
    """

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw kernels and biases from U(±1/√in), as torch does; see Cell."""
        sizes = self.spec.attention
        memory = {"the memory of a trial": (sizes.key_size, sizes.value_size)}
        require_room(self.shapes | memory, setting="policy.hidden_sizes or policy.network_options")
        params: Params = {}
        for name, shape in self.shapes.items():
            limit = 1 / np.sqrt(self.shapes[f"{name.rpartition('.')[0]}.kernel"][0])
            params[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
        return params

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """By products over all pairs of so many steps, then of the next ones, with the state handed on; see Cell."""
        features: list[Tensor] = []
        for part in inputs.split(ATTENTION_STEPS):
            of_part, state = self._together(params, part, state)
            features.append(of_part)
        return torch.cat(features), state

    def _together(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The same over all pairs of steps, of which those with later steps count nothing."""
        sizes = self.spec.attention
        written, last = state.split([state.shape[-1] - inputs.shape[-1], inputs.shape[-1]], -1)
        memory = written.unflatten(-1, (sizes.key_size, sizes.value_size))

        def layer(name: str, x: Tensor) -> Tensor:
            return x @ params[f"{CELL}.{name}.kernel"] + params[f"{CELL}.{name}.bias"]

        events = torch.cat([inputs, torch.cat([last.unsqueeze(0), inputs[:-1]])], -1)
        values = layer("value", torch.relu(layer("event", events))).transpose(0, 1)  # [N, L, V]
        keys = torch.softmax(layer("key", events), -1).transpose(0, 1)  # [N, L, K]
        queries = torch.softmax(layer("query", inputs), -1).transpose(0, 1)  # [N, L, K]
        read = torch.tril(queries @ keys.mT) @ values + queries @ memory
        if sizes.reading == "asinh":
            read = torch.asinh(read)
        features = layer("reading", torch.cat([read.transpose(0, 1), inputs], -1))
        features = torch.relu(layer("features", torch.relu(features)))
        memory = memory + keys.mT @ values
        return features, torch.cat([memory.flatten(1), inputs[-1]], -1)
