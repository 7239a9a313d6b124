"""SAC's gradient steps for plain networks on the CPU, from derivatives that are written down."""

from __future__ import annotations

import numpy as np

from metaloom.pipeline.algorithms.off_policy.sac import SAC
from metaloom.pipeline.estimation.returns import EPSILON
from metaloom.pipeline.kernels.flat_networks import Activation, FlatNetwork, FlatParams, layer_paths
from metaloom.pipeline.kernels.tanh_gaussian import TanhGaussianSample
from metaloom.pipeline.kernels.twin_q import TwinQ
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Transitions


class SACKernel:
    """Policy, Q-functions, targets and temperature while an iteration changes them: the same as SACDefinition."""

    def __init__(
        self,
        settings: SAC,
        discount: float,
        state: LearnerState,
        optimizers,
        learning_rate: float,
        activation: Activation,
        *,
        parallel: ParallelMap = map,
    ) -> None:
        ...
