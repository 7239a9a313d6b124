"""Checks of a custom policy before a run: its distributions must be usable for acting and learning."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.device import ON_DEVICE, asks_for_gpu
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.modules import seeded
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.contract import OwnDistribution, OwnPolicy
from metaloom.pipeline.schema import ConfigError

T = TypeVar("T")

_METHODS = {
    "log_prob": "log_prob(actions): [...], joint over the dimensions of an action",
    "kl": "kl(other): [...]",
    "entropy": "entropy(): [...]",
    "detach": "detach(): the same distributions as constants of a graph",
    "sample": "sample(): actions drawn with torch's own generator",
    "mode": "mode(): the most likely actions, which evaluations take",
    "parameters": "parameters(): what `recorded` rebuilds the distributions from, by name",
}
_TASKS, _ROWS = 2, 4


def require_policy(policy: OwnPolicy, name: str, spaces: Spaces) -> None:
    """Reject a policy whose distributions cannot act, or differ between acting, recording and learning.

    Raises:
        ConfigError: names the violation, the requirement and a remedy.
    """
    with torch.no_grad():
        _Check(policy, name, spaces).all()


class _Check:
    def __init__(self, policy: OwnPolicy, name: str, spaces: Spaces) -> None:
        self._policy, self._name, self._spaces = policy, name, spaces
        rng = np.random.default_rng(0)
        initial = self._call("initialize", lambda: policy.initialize(np.random.default_rng(0)))
        for parameter, value in initial.items():
            if value.dtype != np.float32:
                self._refuse(f"returns the parameter {parameter} as {value.dtype}", "float32")
        # Away from initial values, since a mistake in a logarithm or factor may not show at 0 or 1.
        self._params = {
            parameter: torch.from_numpy(value + 0.1 * rng.standard_normal(value.shape, np.float32))
            for parameter, value in initial.items()
        }
        size = (_ROWS, spaces.observation_size)
        self._observations = torch.from_numpy(spaces.observation_scale * rng.random(size, np.float32))

    def all(self) -> None:
        of_rows = self._distribution(self._params, self._observations)
        actions = self._actions(of_rows)
        log_prob = self._log_prob(of_rows, actions, "log_prob")
        again = self._distribution(self._params, self._observations)
        if not torch.equal(log_prob, again.log_prob(actions)):
            self._refuse(
                "returns different distributions when called again", "a function of parameters and observations"
            )
        self._check_recorded(of_rows, actions, log_prob)
        params = {name: value.expand(_TASKS, *value.shape) for name, value in self._params.items()}
        of_tasks = self._distribution(params, self._observations.expand(_TASKS, -1, -1))
        self._log_prob(of_tasks, actions.expand(_TASKS, *actions.shape), "log_prob of parameters with a task axis")
        for what, measured, shapes in (
            ("kl", lambda: of_rows.kl(again), [(_ROWS,)]),
            ("entropy", of_rows.entropy, [(_ROWS,), (1,), ()]),  # a scale shared by all rows
        ):
            shape = tuple(self._call(what, measured).shape)
            if shape not in shapes:
                self._refuse(
                    f"returns {what} of shape {shape} for {_ROWS} rows", f"{(_ROWS,)}, summed over the actions"
                )

    def _distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> OwnDistribution:
        state = torch.get_rng_state()
        found = self._call("distribution", lambda: self._policy.distribution(params, observations))
        for method, required in _METHODS.items():
            if not callable(getattr(found, method, None)):
                self._refuse(f"returns distributions ({type(found).__name__}) without {method}", required)
        if not torch.equal(torch.get_rng_state(), state):
            self._refuse("draws random numbers in `distribution`", "draws only in the distributions' `sample`")
        return found

    def _actions(self, of_rows: OwnDistribution) -> Tensor:
        """Draw actions with a fixed seed."""
        drawn: list[Tensor] = []
        for _ in range(2):
            with seeded(0):
                drawn.append(self._call("sample", of_rows.sample))
        discrete = bool(self._spaces.num_actions)
        shape = (_ROWS,) if discrete else (_ROWS, self._spaces.action_size)
        actions: Any
        for name, actions in (("sample", drawn[0]), ("mode", self._call("mode", of_rows.mode))):
            is_kind = isinstance(actions, Tensor) and (
                actions.dtype == torch.int64 if discrete else actions.is_floating_point()
            )
            if not is_kind or tuple(actions.shape) != shape:
                kind = "int64" if discrete else "floating-point"
                self._refuse(f"returns {_form(actions)} in `{name}` for {_ROWS} rows", f"actions {shape}, {kind}")
        if not torch.equal(*drawn):
            self._refuse(
                "draws different actions from the same seed of torch's generator",
                "draws with torch's own generator, such as torch.randn, which is seeded for each task and step",
            )
        return drawn[0]

    def _log_prob(self, distribution: Distribution, actions: Tensor, what: str) -> Tensor:
        found: Any = self._call(what, lambda: distribution.log_prob(actions))
        shape = tuple(actions.shape[: actions.ndim - (not self._spaces.num_actions)])
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            keeps = isinstance(found, Tensor) and tuple(found.shape) == tuple(actions.shape) != shape
            cure = ": sum over the last axis, the dimensions of the action" if keeps else ""
            self._refuse(f"returns {_form(found)} in `{what}` for actions {tuple(actions.shape)}", f"{shape}{cure}")
        return found

    def _check_recorded(self, of_rows: OwnDistribution, actions: Tensor, log_prob: Tensor) -> None:
        parameters = self._call("parameters", of_rows.parameters)
        value: Any
        for name, value in parameters.items():
            if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != _ROWS:
                self._refuse(f"returns parameters()[{name!r}] as {_form(value)}", f"a tensor ({_ROWS}, ...)")
        stored = {name: value.float() for name, value in parameters.items()}
        rebuilt = self._call("recorded", lambda: self._policy.recorded(stored))
        if not callable(getattr(rebuilt, "log_prob", None)):
            self._refuse(f"returns {type(rebuilt).__name__} in `recorded`", "distributions, with log_prob")
        found = self._log_prob(rebuilt, actions, "log_prob of `recorded`")
        if not torch.allclose(found, log_prob, rtol=1e-3, atol=1e-3):
            self._refuse(
                f"rebuilds distributions in `recorded` that differ from those it acted with: log_prob {found[0]:g} "
                f"where it was {log_prob[0]:g}, so likelihood ratios would not start at 1",
                "that recorded(distribution.parameters()) is the distribution",
            )

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ConfigError:
            raise
        except Exception as problem:
            required = ON_DEVICE if asks_for_gpu(problem) else "required a result (the call used random parameters)"
            raise ConfigError(
                f"policy.name: `{what}` of {self._name} raised {type(problem).__name__}: {problem}; {required}"
            ) from problem

    def _refuse(self, found: str, required: str) -> None:
        raise ConfigError(f"policy.name: {self._name} {found}; required {required}")


def _form(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
