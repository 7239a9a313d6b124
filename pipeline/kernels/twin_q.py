"""Two Q-functions of observation and action, the smaller of which is believed, with derivatives written down.

Fujimoto et al. 2018, arXiv:1802.09477, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.algorithms.off_policy.sac_state import TWINS
from metaloom.pipeline.nn.flat_networks import ALL, FlatNetwork, FlatParams
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.types import Array, ParallelMap


class TwinQ:
    """Two networks whose parameters are one vector.

    Attributes:
        flat: the parameters and their gradient.
    """

    def __init__(self, params: Mapping[str, Array], spec: NetworkSpec, *, parallel: ParallelMap = map) -> None:
        """From parameters q1.* and q2.*, which are copied; `parallel` maps over the two networks."""
        self.flat = FlatParams(params)
        self._networks = [FlatNetwork.of(name, spec, self.flat) for name in TWINS]
        self._parallel = parallel

    def values(self, observations: Array, actions: Array) -> Array:
        """[2, n] of observations [n, O] and actions [n, A]; the next derivatives are about them."""
        inputs = np.concatenate([observations, actions], axis=1)

        def work(network: FlatNetwork) -> Array:
            return network.forward(inputs)[:, 0]

        return np.stack(list(self._parallel(work, self._networks)))

    def backward(self, value_gradient: Array) -> None:
        """Write the gradient with respect to the parameters of a loss from that to the values, [2, n]."""

        def work(network: FlatNetwork, slopes: Array) -> None:
            network.backward(slopes[:, None])

        list(self._parallel(work, self._networks, value_gradient))

    def gradient_of_smaller(self, values: Array, columns: slice = ALL) -> Array:
        """The gradient of every row's smaller value with respect to columns of the row's inputs, [n, columns].

        Args:
            values: [2, n], what `values` gave last.
            columns: of the inputs.
        """
        first = values[0] <= values[1]
        by_network = [np.nonzero(first)[0], np.nonzero(~first)[0]]

        def work(network: FlatNetwork, rows: Array) -> Array:
            return network.input_gradient(np.ones((len(rows), 1), values.dtype), columns, rows)

        parts = list(self._parallel(work, self._networks, by_network))
        gradient = np.empty((values.shape[1], parts[0].shape[1]), values.dtype)
        for rows, part in zip(by_network, parts, strict=True):
            gradient[rows] = part
        return gradient
