"""Policies built from settings: Gaussian, categorical, recurrent and custom, with checks of custom ones."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.device import ON_DEVICE, asks_for_gpu
from metaloom.pipeline.nn.distributions import Categorical, DiagGaussian, Distribution
from metaloom.pipeline.nn.modules import seeded
from metaloom.pipeline.nn.networks import Network, build_network, initialize_shapes
from metaloom.pipeline.nn.recurrent import Cell, build_cell
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.policies.contract import OwnDistribution, OwnPolicy, Policy
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, MEAN_NETWORK
from metaloom.pipeline.policies.remembering import policy_prefix
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Params

T = TypeVar("T")

_METHODS = {
    "log_prob": "log_prob(actions): [...], joint over the dimensions of an action",
    "kl": "kl(other): [...]",
    "entropy": "entropy(): [...]",
    "detach": "detach(): the same distributions as constants of a graph",
    "sample": "sample(): actions drawn with torch's own generator",
    "mode": "mode(): the most likely actions, which evaluations take",
    "parameters": "parameters(): the arrays from which `recorded` rebuilds the distributions, keyed by name",
}
_TASKS, _ROWS = 2, 4


class _Check:
    """Check that a custom policy gives the same distributions in acting, recording and learning, and can be sampled."""

    def __init__(self, policy: OwnPolicy, name: str, spaces: Spaces) -> None:
        self._policy, self._name, self._spaces = policy, name, spaces
        rng = np.random.default_rng(0)
        initial = self._call("initialize", lambda: policy.initialize(np.random.default_rng(0)))
        for parameter, value in initial.items():
            if value.dtype != np.float32:
                self._refuse(f"returns the parameter {parameter} as {value.dtype}", "float32")
        # Perturb the initial values, since a mistake in a logarithm or factor may not show at 0 or 1.
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
            found = "returns different distributions when called again"
            self._refuse(found, "a function of parameters and observations")
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
                found = f"returns {what} of shape {shape} for {_ROWS} rows"
                self._refuse(found, f"{(_ROWS,)}, summed over the actions")

    def _distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> OwnDistribution:
        state = torch.get_rng_state()
        found = self._call("distribution", lambda: self._policy.distribution(params, observations))
        for method, required in _METHODS.items():
            if not callable(getattr(found, method, None)):
                self._refuse(f"returns distributions ({type(found).__name__}) without {method}", required)
        if not torch.equal(torch.get_rng_state(), state):
            self._refuse("draws random numbers in `distribution`", "random draws only in the distributions' `sample`")
        return found

    def _actions(self, of_rows: OwnDistribution) -> Tensor:
        """Return actions sampled with a fixed seed, or raise ConfigError if they are invalid or not reproducible."""
        drawn: list[Tensor] = []
        for _ in range(2):
            with seeded(0):
                drawn.append(self._call("sample", of_rows.sample))
        discrete = bool(self._spaces.num_actions)
        shape = (_ROWS,) if discrete else (_ROWS, self._spaces.action_size)
        actions: Any
        for name, actions in (("sample", drawn[0]), ("mode", self._call("mode", of_rows.mode))):
            fits = isinstance(actions, Tensor) and tuple(actions.shape) == shape
            if not (fits and (actions.dtype == torch.int64 if discrete else actions.is_floating_point())):
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
                f"rebuilds other distributions in `recorded` than it acted with (log_prob is {found[0]:g} but was "
                f"{log_prob[0]:g}), so likelihood ratios would not start at 1",
                "recorded(distribution.parameters()) to equal the distribution",
            )

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ConfigError:
            raise
        except Exception as problem:
            required = ON_DEVICE if asks_for_gpu(problem) else "return a result (the call used random parameters)"
            raise ConfigError(
                f"policy.name: `{what}` of {self._name} raised {type(problem).__name__}: {problem}; {required}"
            ) from problem

    def _refuse(self, found: str, required: str) -> None:
        raise ConfigError(f"policy.name: {self._name} {found}; expected {required}")


def _form(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


LOG_STD = "log_std"


class GaussianPolicy(Policy):
    """Gaussian policy for continuous actions. `extra_size` is the size of inputs after the observation."""

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        self.action_size: int = spaces.action_size
        self.config: PolicyConfig = config
        spec = config.network_spec(spaces, spaces.action_size, extra_size=extra_size)
        self.network: Network = build_network(MEAN_NETWORK, spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw initial float32 parameters: those of the mean network, followed by log_std [A]."""
        params = self.network.initialize(rng)
        params[LOG_STD] = np.full(self.action_size, math.log(self.config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(params) if self.config.learn_std else tuple(name for name in params if name != LOG_STD)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> DiagGaussian:
        """Return distributions with mean [..., N, A] and log_std [..., 1, A], which is at least log min_std."""
        return self.head(self.network(params, observations), params[LOG_STD])

    def head(self, mean: Tensor, log_std: Tensor) -> DiagGaussian:
        """Return the action distributions for the network's output and log_std [..., A]."""
        # The reference implementation clamps only on some paths, not in acting and per-task losses.
        return DiagGaussian(mean, log_std.clamp(min=math.log(self.config.min_std)).unsqueeze(-2))

    def recorded(self, behavior: Mapping[str, Tensor]) -> DiagGaussian:
        return DiagGaussian(**behavior)


class CategoricalPolicy(Policy):
    """Categorical policy for discrete actions. `extra_size` is the size of inputs after the observation."""

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        spec = config.network_spec(spaces, spaces.num_actions, extra_size=extra_size)
        self.network: Network = build_network(LOGITS_NETWORK, spec)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Categorical:
        return self.head(self.network(params, observations))

    def head(self, logits: Tensor) -> Categorical:
        """Return the action distributions for the network's output."""
        return Categorical.of_logits(logits)

    def recorded(self, behavior: Mapping[str, Tensor]) -> Categorical:
        return Categorical(**behavior)


def build_policy(config: PolicyConfig, spaces: Spaces) -> Policy:
    """Build a Gaussian policy for continuous actions, a categorical one for discrete actions, or a custom one.

    Raises ConfigError if the settings do not suit the spaces, or if a custom policy fails its checks.
    """
    if config.name is not None:
        policy = build_own_policy(config, spaces)
        with torch.no_grad():
            _Check(policy, config.name, spaces).all()
        return policy
    check_std(config, spaces)
    return CategoricalPolicy(spaces, config) if spaces.num_actions else GaussianPolicy(spaces, config)


def check_std(config: PolicyConfig, spaces: Spaces) -> None:
    """Raise ConfigError if actions are discrete, but settings for the standard deviation are given."""
    if spaces.num_actions and (options := config.std_options):
        raise ConfigError(
            f"policy: {options} sets a standard deviation, but the environment has {spaces.num_actions} discrete "
            "actions; remove it"
        )


def build_own_policy(config: PolicyConfig, spaces: Spaces) -> OwnPolicy:
    """Build the custom policy that `config.name` selects, or raise ConfigError if this fails."""
    assert config.name is not None
    try:
        # a concrete subclass
        return POLICIES.find(config.name, OwnPolicy)(spaces, config)  # pyright: ignore[reportAbstractUsage]
    except ConfigError as problem:
        raise ConfigError(f"policy.name: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"policy.name: {config.name}(spaces, config) raised {type(problem).__name__}: {problem}; its "
            "constructor must take the environment's Spaces and the PolicyConfig"
        ) from problem


class RecurrentPolicy:
    """Recurrent policy as functions of explicit parameters and the inputs of whole trials."""

    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None:
        self.cell: Cell = build_cell(config.cell_spec(spaces))
        self._config, self._spaces, self._head = config, spaces, f"{policy_prefix(spaces)}.output"

    def initialize(self, rng: np.random.Generator, output_scale: float) -> Params:
        """Draw initial float32 parameters, with the output kernel scaled by `output_scale`."""
        A = self._spaces.num_actions or self._spaces.action_size
        shapes = {f"{self._head}.kernel": (self.cell.feature_size, A), f"{self._head}.bias": (A,)}
        params = self.cell.initialize(rng) | initialize_shapes(shapes, rng)
        params[f"{self._head}.kernel"] *= np.float32(output_scale)
        if not self._spaces.num_actions:
            params[LOG_STD] = np.full(A, math.log(self._config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that learning updates, in order."""
        return tuple(name for name in params if self._config.learn_std or name != LOG_STD)

    def features(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return features [L, N, F] for the inputs of N trials [L, N, in], starting from zero states."""
        return self.cell(params, inputs, inputs.new_zeros(inputs.shape[1], self.cell.state_size))[0]

    def distribution(self, params: Mapping[str, Tensor], features: Tensor) -> Distribution:
        """Return the action distributions [n] for features [n, F]."""
        outputs = torch.addmm(params[f"{self._head}.bias"], features, params[f"{self._head}.kernel"])
        if self._spaces.num_actions:
            return Categorical.of_logits(outputs)
        return DiagGaussian(outputs, params[LOG_STD].clamp(min=math.log(self._config.min_std)))

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the behavior policy's distributions [...] from recorded arrays."""
        return Categorical(**behavior) if self._spaces.num_actions else DiagGaussian(**behavior)
