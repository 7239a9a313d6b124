"""A policy with a memory: a categorical or Gaussian one on the features of a recurrent network."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.distributions import Categorical, DiagGaussian, Distribution
from metaloom.pipeline.nn.mlp import initialize_shapes
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.build import LOG_STD
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.remembering import head_name
from metaloom.pipeline.types import Params


class RecurrentPolicy:
    """Functions of explicit parameters; holds neither them nor a memory.

    Attributes:
        cell: the network with the memory.
    """

    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None:
        self.cell = build_cell(config.cell_spec(spaces))
        self._config, self._spaces, self._head = config, spaces, head_name(spaces)

    def initialize(self, rng: np.random.Generator, output_scale: float) -> Params:
        """Draw float32 parameters by name, in order; `output_scale` multiplies the output layer."""
        A = self._spaces.num_actions or self._spaces.action_size
        shapes = {f"{self._head}.kernel": (self.cell.feature_size, A), f"{self._head}.bias": (A,)}
        params = self.cell.initialize(rng) | initialize_shapes(shapes, rng)
        params[f"{self._head}.kernel"] *= np.float32(output_scale)
        if not self._spaces.num_actions:
            params[LOG_STD] = np.full(A, math.log(self._config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that learning changes, in order."""
        return tuple(name for name in params if self._config.learn_std or name != LOG_STD)

    def features(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return features [L, N, F] of N trials [L, N, in] from their beginnings on, where the state is zero."""
        return self.cell(params, inputs, inputs.new_zeros(inputs.shape[1], self.cell.state_size))[0]

    def distribution(self, params: Mapping[str, Tensor], features: Tensor) -> Distribution:
        """Return the distributions of actions [n] at features [n, F]."""
        outputs = torch.addmm(params[f"{self._head}.bias"], features, params[f"{self._head}.kernel"])
        if self._spaces.num_actions:
            return Categorical.of_logits(outputs)
        return DiagGaussian(outputs, params[LOG_STD].clamp(min=math.log(self._config.min_std)))

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the distributions that acted from what was recorded of them, [...] each."""
        return Categorical(**behavior) if self._spaces.num_actions else DiagGaussian(**behavior)
