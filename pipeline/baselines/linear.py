"""Linear baselines, fitted by ridge regression on features of observations and time, and the zero baseline."""

from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.baselines.contract import Baseline, BaselineError, by_task, require_finite
from metaloom.pipeline.types import Array, ParallelMap, Params

TIME_SCALE = 100.0
MAX_FIT_ATTEMPTS = 5


@dataclass(frozen=True)
class LinearTimeBaseline(Baseline):
    """Linear regression on τ, τ², τ³ and 1, with τ = t / 100."""

    regularization: float = 1e-5

    def features(self, observations: Array) -> Array:
        """Return the features [E, T, F] float64 of one task's observations [E, T, O]."""
        return np.broadcast_to(time_features(observations.shape[1]), (*observations.shape[:2], 4))

    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        def task(observations: Array, targets: Array, mask: Array) -> Array:
            rows, coefficients = self._fit_task(observations, targets, mask)
            return (rows @ coefficients).reshape(targets.shape)

        return by_task(task, observations, targets, mask, parallel)

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        """Return each task's coefficients [B, ...], keyed by feature; `time` covers τ, τ² and τ³."""
        coefficients = by_task(lambda *task: self._fit_task(*task)[1], observations, targets, mask, parallel)
        O = (coefficients.shape[1] - 4) // 2
        of_observation = {"observation": coefficients[:, :O], "observation_squared": coefficients[:, O : 2 * O]}
        return {**(of_observation if O else {}), "time": coefficients[:, -4:-1], "constant": coefficients[:, -1:]}

    def _fit_task(self, observations: Array, targets: Array, mask: Array) -> tuple[Array, Array]:
        """Return the features of all steps, [E · T, F], zero in the padding, and their coefficients, [F]."""
        features = self.features(observations)
        rows = features.reshape(-1, features.shape[-1])
        rows = rows if mask.all() else rows * mask.reshape(-1, 1)
        return rows, fit(rows, targets.reshape(-1) * mask.reshape(-1), self.regularization)


class LinearFeatureBaseline(LinearTimeBaseline):
    """Linear regression on observations clipped to ±10, their squares, τ, τ², τ³ and 1, with τ = t / 100."""

    def features(self, observations: Array) -> Array:
        E, T, O = observations.shape
        features = np.empty((E, T, 2 * O + 4))
        clipped = features[..., :O]
        np.clip(observations, -10, 10, out=clipped)
        np.square(clipped, out=features[..., O : 2 * O])
        features[..., 2 * O :] = time_features(T)
        return features


def time_features(num_steps: int) -> Array:
    """Return τ, τ², τ³ and 1 for each step of an episode, [T, 4]."""
    tau = np.arange(num_steps) / TIME_SCALE
    return np.stack([tau, tau**2, tau**3, np.ones(num_steps)], axis=-1)


def fit(features: Array, targets: Array, regularization: float) -> Array:
    """Return the coefficients w [F] that solve (ΦᵀΦ + ρI) w = Φᵀy in the least-squares sense, for features Φ [N, F].

    ρ is multiplied by ten until all coefficients are finite. After five failed attempts, BaselineError is raised; the
    reference instead keeps the last attempt.
    """
    require_finite(features, targets)
    return solve(features.T @ features, features.T @ targets, regularization, setting="baseline.regularization")


def solve(gram: Array, moments: Array, regularization: float, *, setting: str) -> Array:
    """Return the coefficients w [F] that solve (G + ρI) w = m in the least-squares sense, with ρ raised as in `fit`.

    If the last attempt fails, raise a BaselineError that names the `setting` for ρ.
    """
    for attempt in range(MAX_FIT_ATTEMPTS):
        ridge = regularization * 10**attempt * np.eye(len(gram))
        coefficients = np.linalg.lstsq(gram + ridge, moments, rcond=None)[0]
        if np.isfinite(coefficients).all():
            return coefficients
    raise BaselineError(
        f"the baseline has no finite fit with regularization up to {regularization * 10 ** (MAX_FIT_ATTEMPTS - 1):g}; "
        f"raise {setting}"
    )


@dataclass(frozen=True)
class ZeroBaseline(Baseline):
    """Baseline that always predicts zero."""

    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        return np.zeros_like(targets, dtype=np.float64)
