"""Value-network baseline: a small tanh network of observations and time, trained on the episodes that it predicts.

It uses only NumPy, for bitwise identical results: NumPy computes stacked products matrix by matrix, so a task's fit
does not depend on the other tasks in its chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from metaloom.pipeline.baselines.contract import Baseline, BaselineError, require_finite
from metaloom.pipeline.baselines.linear import TIME_SCALE
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.linearization import LinearizedMLP
from metaloom.pipeline.nn.optimizers import Adam
from metaloom.pipeline.nn.spec import layer_paths
from metaloom.pipeline.types import Array, ParallelMap, Params

TASKS_PER_CHUNK = 4
EPSILON = 1e-8
PREFIX = "value"  # name prefix of the parameters


@dataclass(frozen=True)
class ValueNetworkBaseline(Baseline):
    """Network of observations and time, fitted to each rollout batch. It keeps no state between calls.

    Inputs and targets are standardized over the real steps; Adam's step size decays linearly to zero. BaselineConfig
    describes the options.
    """

    hidden_sizes: tuple[int, ...] = (32, 32)
    num_epochs: int = 20
    learning_rate: float = 0.02
    steps_per_minibatch: int = 250
    shared: bool = False

    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        fits = self._fit_chunks(observations, targets, mask, seed, parallel)
        return np.concatenate([predicted for _, predicted in fits]).reshape(targets.shape)

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        """Return the parameters of each network and its standardization, [B, ...] ([1, ...] if shared), by name."""
        fits = [params for params, _ in self._fit_chunks(observations, targets, mask, seed, parallel)]
        return {name: np.concatenate([params[name] for params in fits]) for name in fits[0]}

    def _fit_chunks(
        self, observations: Array, targets: Array, mask: Array, seed: int, parallel: ParallelMap
    ) -> list[tuple[Params, Array]]:
        if self.shared:
            merged = (values.reshape(1, -1, *values.shape[2:]) for values in (observations, targets, mask))
            return [self._fit_chunk(*merged, seed=seed, first_task=0)]

        def work(start: int) -> tuple[Params, Array]:
            tasks = slice(start, start + TASKS_PER_CHUNK)
            return self._fit_chunk(observations[tasks], targets[tasks], mask[tasks], seed=seed, first_task=start)

        return list(parallel(work, range(0, len(mask), TASKS_PER_CHUNK)))

    def _fit_chunk(
        self, observations: Array, targets: Array, mask: Array, *, seed: int, first_task: int
    ) -> tuple[Params, Array]:
        """Fit b networks; return their parameters [b, ...] and predictions [b, E, T]."""
        b, E, T = mask.shape
        for task, real in enumerate(mask != 0):
            try:
                require_finite(observations[task][real], targets[task][real])
            except BaselineError as error:
                raise BaselineError(f"task {first_task + task}: {error}") from error
        weights = mask.reshape(b, E * T).astype(np.float32)
        # As in the linear baseline, observations are clipped to ±10 and time is appended.
        O = observations.shape[3]
        timed = np.empty((b, E, T, O + 1))
        np.clip(observations, -10, 10, out=timed[..., :O])
        timed[..., O] = np.arange(T) / TIME_SCALE
        inputs, input_mean, input_std = _standardized(timed.reshape(b, E * T, -1), weights)
        standardized, mean, std = _standardized(targets.reshape(b, E * T, 1), weights)
        rngs = [
            np.random.Generator(np.random.Philox(key=np.array([seed, task], np.uint64)))
            for task in range(first_task, first_task + b)
        ]
        params = self._train(inputs, standardized, weights, rngs)
        predicted = (self._network(params, inputs).outputs * std + mean)[..., 0]
        if not np.isfinite(predicted).all():
            task = first_task + int((~np.isfinite(predicted)).any(axis=1).argmax())
            raise BaselineError(f"task {task}: the value network diverged; lower baseline.learning_rate")
        scales = {"input_mean": input_mean, "input_std": input_std, "target_mean": mean, "target_std": std}
        return {**params, **scales}, (predicted * weights).reshape(b, E, T)

    def _train(self, inputs: Array, targets: Array, weights: Array, rngs: Sequence[np.random.Generator]) -> Params:
        networks = [_initial(inputs.shape[-1], self.hidden_sizes, rng) for rng in rngs]
        params = {name: np.stack([network[name] for network in networks]) for name in networks[0]}
        state = Adam(self.learning_rate).initialize(params)
        num_minibatches = -(-weights.shape[1] // self.steps_per_minibatch)
        total, done = self.num_epochs * num_minibatches, 0
        for _ in range(self.num_epochs):
            # Row indices [b, N] in random order, padding last, so that strided parts divide the real rows evenly.
            keys = np.stack([rng.random(weights.shape[1]) for rng in rngs])
            order = np.argsort(np.where(weights == 0, 2.0, keys), axis=1, kind="stable")
            for part in range(num_minibatches):
                rows = order[:, part::num_minibatches]
                seen, goals = (np.take_along_axis(values, rows[..., None], 1) for values in (inputs, targets))
                gradients = _gradient(self._network(params, seen), goals, np.take_along_axis(weights, rows, 1))
                params, state = Adam(self.learning_rate * (1 - done / total)).step(params, gradients, state)
                done += 1
        return params

    def _network(self, params: Params, inputs: Array) -> LinearizedMLP:
        return LinearizedMLP(PREFIX, len(self.hidden_sizes), params, inputs)


def _standardized(values: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Standardize values [b, N, F] over rows with weight 1, and set others to 0; return them, their mean and std."""
    real = weights[..., None].astype(np.float64)
    count = real.sum(axis=1, keepdims=True)
    mean = (values * real).sum(axis=1, keepdims=True) / count
    centred = (values - mean) * real
    std = np.sqrt(np.square(centred).sum(axis=1, keepdims=True) / count)
    return (centred / (std + EPSILON)).astype(np.float32), mean, std


def _gradient(network: LinearizedMLP, goals: Array, weights: Array) -> Params:
    """Return the gradient of each network's ½ mean squared error over rows with weight 1."""
    share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    return network.pull((network.outputs - goals) * share[..., None])


def _initial(num_inputs: int, hidden_sizes: Sequence[int], rng: np.random.Generator) -> Params:
    """Draw Glorot-uniform kernels with zero biases. The output layer is zero, so it predicts the mean target."""
    params: Params = {}
    sizes = [*pairwise([num_inputs, *hidden_sizes, 1])]
    require_room({f"layer {n}": shape for n, shape in enumerate(sizes)}, setting="baseline.hidden_sizes")
    for name, (fan_in, fan_out) in zip(layer_paths(PREFIX, len(hidden_sizes)), sizes, strict=True):
        limit = 0.0 if name.endswith(".output") else np.sqrt(6 / (fan_in + fan_out))
        params[f"{name}.kernel"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        params[f"{name}.bias"] = np.zeros(fan_out, np.float32)
    return params
