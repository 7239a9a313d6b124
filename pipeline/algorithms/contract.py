"""The contract between stages and algorithms: settings, which are plain data, and the learner built from them.

A learner has no state of its own: everything that persists between iterations is in LearnerState, which is stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from metaloom.pipeline.baselines.config import BaselineSettings
from metaloom.pipeline.device import DeviceName, asks_for_gpu
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.plugins import load_class, path_of
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.schema import ConfigError, PluginSettings, Settings, later
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step, TaskParams

KernelName = Literal["torch", "fused"]
"""Implementation: torch, the reference definition, or fused, which is faster and has hand-written derivatives."""
KernelChoice = Literal["auto", "torch", "fused"]

NUM_UPDATES = "num_updates"  # key in LearnerState.extra for the number of updates so far

_NORMALIZING_LEARNER = "metaloom.pipeline.algorithms.normalizing:NormalizingLearner"

Evidence = TypeVar("Evidence", contravariant=True)
"""Input to one adaptation step: a Step (on_policy graph), an EpisodeBatch (trials and trial_inference), or the
ContextRounds from which tasks are inferred (task_inference)."""
Experience = TypeVar("Experience", contravariant=True)
"""Input to an update: Steps 0 ... K of an iteration (on_policy and trials graphs), a TrialExperience
(trial_inference), or Minibatches of stored transitions (off_policy and task_inference)."""
Steps = Sequence[Step]  # steps 0 ... K of an iteration


@dataclass(frozen=True)
class Setup(Spaces):
    """Environment sizes and run settings from which a learner is built."""

    env_name: str
    max_episode_steps: int
    policy: PolicyConfig
    baseline: BaselineSettings
    processing: ProcessingConfig
    device: DeviceName
    sparse_rewards: Callable[[Array], Array]
    """Function that maps the rewards [...] of real steps to the environment's sparse rewards."""


@dataclass(frozen=True)
class Kernel:
    """Implementation of a learner's updates and the reason for choosing it, as shown by `metaloom show`."""

    name: KernelName
    reason: str  # a short phrase, such as "plain tanh network on the CPU"


class Learner(ABC, Generic[Evidence, Experience]):
    """Interface between the stages and an algorithm. By default, an algorithm does not adapt."""

    kernel: Kernel = Kernel("torch", "the algorithm has no fused kernel")

    @property
    def unwrapped(self) -> "Learner[Any, Any]":
        """The algorithm's learner, without the normalizing wrapper."""
        return self

    @abstractmethod
    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return the state before the first iteration."""

    def at_start(self, state: LearnerState, *, run_seed: int) -> LearnerState:
        """Return the state from which an iteration starts, given the stored state; by default, the stored state."""
        return state

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return each task's parameters before adaptation. By default, they are the same for all tasks."""
        return TaskParams.broadcast(state.params, num_tasks)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Compute returns, values and advantages for a rollout batch. Off-policy graphs do not call this method.

        Args:
            state: State at the start of the iteration; actor-critics use its critic.
            episodes: Episodes of the rollout batch, [B, E, T].
            seed: Seed for the baseline's random draws.
            parallel: Map over tasks; the result does not depend on it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `process`, which process_samples calls; define it")

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Evidence, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Return each task's parameters after one adaptation step on its evidence. By default, they do not change.

        Training, evaluations and trained policies all call this method. Evaluations may take more steps than training.
        Raise NumericalError if an array is not finite.
        """
        return params

    @abstractmethod
    def update(
        self, state: LearnerState, experience: Experience, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        """Return the state for the next iteration, and the metrics of this update.

        Args:
            state: State returned by `at_start`; its arrays are not changed.
            experience: Episodes or transitions to learn from.
            run_seed: Seed of the run; with the iteration, it determines all random draws.
            iteration: Index of the iteration.
            parallel: Map over chunks of work; the result does not depend on it.

        Raises:
            NumericalError: an array is not finite; the message names it.
        """


AnyLearner = Learner[Any, Any]  # learner of any algorithm


class NumericalError(ArithmeticError):
    """Raised if an input, loss, gradient or parameter is not finite."""


def require_finite_params(params: Mapping[str, Mapping[str, Array]], *, stage: str, advice: str) -> None:
    """Raise NumericalError, naming the network, if a parameter is not finite after an update."""
    for name, arrays in params.items():
        if not all(np.isfinite(value).all() for value in arrays.values()):
            raise NumericalError(f"{stage}: parameters of {name} are not finite after the update. {advice}")


class RunSettings(Protocol):
    """Run settings that an algorithm checks for conflicts with its own settings."""

    algorithm: "AlgorithmSettings"
    policy: PolicyConfig
    baseline: BaselineSettings
    processing: ProcessingConfig
    num_tasks: int
    episodes_per_task: int
    max_episode_steps: int

    @property
    def samples_until_enough(self) -> bool: ...
    @property
    def starts_warm(self) -> bool: ...


class AlgorithmSettings(PluginSettings, Settings):
    """Base class for algorithm settings. They do not import torch, so reading a configuration is fast.

    A subclass specifies its graph and its learner. Base classes that hold settings shared by several algorithms come
    first: `class ProMP(MetaAdam, GradientBased, AlgorithmSettings)`.
    """

    graph: ClassVar[str] = ""
    """Stage graph: on_policy, off_policy, task_inference, trials, trial_inference, or module:NAME of a custom Graph."""
    learner: ClassVar[str] = ""
    """Learner as module:Class; its constructor takes these settings and a Setup."""

    actor: ClassVar[ActorKind] = "policy"
    """Kind of actor that selects actions with the learner's parameters."""
    sizes: ClassVar[tuple[str, ...]] = ()
    """Names of settings that determine the shapes of stored arrays, apart from the number of adaptation steps."""
    decides_episodes: ClassVar[tuple[str, ...]] = ()
    """Names of settings that affect only which episodes are collected."""

    # A subclass may define these as properties, which depend on its settings.
    networks: ClassVar[tuple[str, ...]] = ()
    """Names of the algorithm's networks other than the policy's."""
    adaptation_steps: ClassVar[int] = 0
    """Number of adaptation steps per iteration."""
    trial: ClassVar[int | None] = None
    """Number of consecutive episodes of a task that share an actor's memory; None for actors without memory.

    If a task has several trials, its episodes are interleaved: the first of each trial, then the second, and so on.
    """
    earlier_iterations: ClassVar[int] = 0
    """Number of earlier iterations whose episodes are reused in an update, if the graph supports it."""
    num_policies: ClassVar[int] = 1
    """Number of policies trained in parallel and assigned to tasks round-robin."""

    kernel: KernelChoice = later("auto")
    """Implementation of updates. torch: the reference definition; fused: hand-written derivatives for plain networks
    on the CPU; auto: fused where supported."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """Defaults that this algorithm sets for other run settings; sections may be partial."""
        return {}

    @property
    def adapts(self) -> bool:
        """Return True if a task's parameters depend on its episodes."""
        return bool(self.adaptation_steps) or self.trial is not None

    @property
    def evaluation_steps(self) -> int:
        """Default number of adaptation steps in an evaluation; with memory, the episodes per trial minus one."""
        return self.adaptation_steps if self.trial is None else self.trial - 1

    def problems(self, run: RunSettings) -> Iterator[str]:
        """Yield conflicts with the run's other settings, each with a remedy."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        """Yield warnings about combinations that are allowed but known to go wrong, each with a remedy."""
        yield from ()

    def build(self, setup: Setup) -> AnyLearner:
        """Build the learner for a run.

        Raises ConfigError if the algorithm does not support the environment or network, if it lacks the requested
        kernel, or if its learner is invalid.
        """
        # Loaded here because importing torch takes ten times as long as reading settings.
        if not self.learner:
            raise ConfigError(f"{path_of(type(self))} names no learner; set learner = 'module:Class' in it")
        found: Any = load_class(self.learner, Learner)
        _require_methods(found, self.learner)
        with normal_numerics(setup.device):
            try:
                learner: AnyLearner = found(self, setup)
            except Exception as problem:
                if setup.device == "cuda" or isinstance(problem, ConfigError) or not asks_for_gpu(problem):
                    raise
                raise ConfigError(
                    f"the constructor of {self.learner} asks for a GPU ({problem}); create tensors on setup.device, "
                    f"which is {setup.device}, or pass --device cuda"
                ) from problem
        if self.kernel == "fused" and learner.kernel.name != "fused":
            raise ConfigError(
                f"algorithm.kernel is fused, but {self.name} has no fused kernel ({learner.kernel.reason}); use "
                "auto or torch"
            )
        if not (setup.policy.normalize_observations or setup.processing.scale_rewards):
            return learner
        around: Any = load_class(_NORMALIZING_LEARNER, Learner)
        return around(learner, setup)


def _require_methods(learner: type[Any], name: str) -> None:
    """Raise ConfigError if a method of a learner class is missing or has the wrong parameters."""
    contract = {each: signature(of) for each, of in vars(Learner).items() if callable(of) and not each.startswith("_")}
    if missing := sorted(learner.__abstractmethods__):
        required = ", ".join(_as_called(method, contract[method]) for method in missing)
        raise ConfigError(f"{name} lacks the method {missing[0]}; define {required}")
    by_position = [Parameter(of, Parameter.POSITIONAL_OR_KEYWORD) for of in ("self", "settings", "setup")]
    for method, required in {"__init__": Signature(by_position), **contract}.items():
        given = [p for p in required.parameters.values() if p.kind != p.KEYWORD_ONLY]
        named = dict.fromkeys(p.name for p in required.parameters.values() if p.kind == p.KEYWORD_ONLY)
        try:
            signature(getattr(learner, method)).bind(*given, **named)
        except TypeError as problem:
            raise ConfigError(
                f"stages cannot call {method} of {name} ({problem}); its signature must be "
                f"{_as_called(method, required)}"
            ) from problem


def _as_called(method: str, contract: Signature) -> str:
    parameters = [p.replace(annotation=p.empty, default=p.empty) for p in contract.parameters.values()]
    return f"{method}{Signature(parameters)}"
