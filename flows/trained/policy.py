"""Trained policies, which act in tasks or a custom environment and can adapt to them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.graph.changes import warn_changed_sources
from metaloom.flows.graph.run_stages import config_of, require_stored_sizes
from metaloom.flows.graph.tables import graph_of
from metaloom.flows.runs import learner_after, updates_at
from metaloom.flows.trained.acting import Acting
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.flows.trained.deployment import DeployedPolicy, PolicyFile, save_onnx, save_program
from metaloom.pipeline.config.sources import loaded_sources, plugin_paths
from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.loop_batch import LoopBatch
from metaloom.pipeline.envs.spaces import observation_dtype, spaces_of
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.policies.remembering import TRIAL_LAST, TRIAL_STATE
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.shown import arrays_in, as_html
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.rollouts.faults import RolloutError, describe
from metaloom.stages.rollouts.sampler import UNWATCHED, RolloutWatch, episodes_together
from metaloom.stages.tools import Adaptation
from metaloom.storage import Run


def collect_in(
    robot: gymnasium.Env[Any, Any],
    blueprint: Blueprint,
    params: TaskParams,
    position: RolloutPosition,
    *,
    episodes: int,
    max_episode_steps: int,
) -> EpisodeBatch:
    """Collect E complete episodes with the policy's exploration noise, and return them as a batch [1, E, T]."""
    # A policy with a memory keeps it across episodes.
    in_trial = episodes if blueprint.config.algorithm.trial is not None else 1
    sampler = _InOneEnv(robot, blueprint, max_episode_steps, in_trial)
    env = sampler.wrapped
    task = np.array(env.task, np.float64) if env.task_fields else np.zeros(0)
    names, units = (tuple(getattr(field, name) for field in env.task_fields) for name in ("name", "unit"))
    tasks = TaskBatch(task[None], np.array([-1], np.int64), names, units)
    try:
        return episodes_together(
            [
                play_episodes(sampler, params, tasks, position=replace(position, first_episode=episode))
                for episode in range(0, episodes, in_trial)
            ]
        )
    except RolloutError as fault:
        # The fault's position does not belong to a run.
        about = {**fault.about, "adaptation": position.step}
        raise RolloutError(describe(about), about, fault.arrays) from fault


class _InOneEnv(Sampler):
    """Sampler that collects episodes in an environment object that the user created."""

    def __init__(
        self, robot: gymnasium.Env[Any, Any], blueprint: Blueprint, max_episode_steps: int, in_trial: int
    ) -> None:
        config = blueprint.config
        self._wrap = lambda: blueprint.wrap(robot)
        self.wrapped = env = self._wrap()
        super().__init__(
            # The name appears in messages about faults.
            config.env.model_copy(update={"name": type(env.unwrapped).__name__, "options": {}}),
            config.policy,
            episodes_per_task=in_trial,
            episodes_per_trial=in_trial,
            max_episode_steps=max_episode_steps,
            actor=config.algorithm.actor,
        )
        self._env = LoopBatch(lambda: env, 1)
        self.spaces = spaces_of(env)
        self.observation_dtype = observation_dtype(env.observation_space, config.env)
        self.facts = declared_facts(env)

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> LoopBatch:
        if self.env.copies == "fresh":
            # There is only one robot, so wrap it again instead of building a new copy.
            self._env = LoopBatch(self._wrap, 1)
        self._env.watch_row = watch.row
        return self._env


class TrainedPolicy(Acting):
    """A trained policy for B tasks; B is 1 unless the policy has adapted to a batch of several tasks.

    Instances are immutable except that they count episodes and steps, which determine random streams. `adapt` returns a
    new policy.

        policy = metaloom.open_run("runs/first").policy()
        mine = policy.adapt(env, episodes=20)
        action = mine(observation)

    Args:
        blueprint: Description from which the policy is built.
        state: Learner state, as used in an iteration.
        params: Per-task parameters; None uses the learner's parameters for a single task.
        rounds: Episodes used for adaptation, one batch per adaptation step.
        seed: Seed for all random draws.
        particle: Index of the policy for algorithms with several policies (SVPG's particles), otherwise 0.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        state: LearnerState,
        params: TaskParams | None = None,
        rounds: Sequence[EpisodeBatch] = (),
        seed: int = 0,
        particle: int = 0,
    ) -> None:
        self.state = state
        self.particle = particle
        self.adapted: bool = params is not None  # True if the policy has adapted
        if params is None:
            # SVPG assigns its policies to tasks in turn.
            params = blueprint.learner().acting_params(state, particle + 1).slice(particle, particle + 1)
        self._rounds = tuple(rounds)
        super().__init__(blueprint, params, seed)

    def __repr__(self) -> str:
        config = self.blueprint.config
        steps = f" by {plural(len(self._rounds), 'step')}" if self._rounds else ""
        adapted = f", adapted{steps}" if self.adapted else ""
        tasks = f", {self.num_tasks} tasks" if self.num_tasks > 1 else ""
        n = config.algorithm.num_policies
        particle = f", particle {self.particle} of {n}" if n > 1 else ""
        return f"TrainedPolicy({config.algorithm.name} in {config.env.name}{particle}{adapted}{tasks})"

    def _repr_html_(self) -> str:
        return as_html(repr(self), [*arrays_in(self.params)])

    @property
    def params(self) -> Mapping[str, Array]:
        """Per-task parameters keyed by name, [B, ...] float32."""
        return self._params.params

    @property
    def unadapted(self) -> "TrainedPolicy":
        """The policy before any adaptation."""
        return TrainedPolicy(self.blueprint, self.state, seed=self.seed, particle=self.particle)

    def task(self, b: int) -> "TrainedPolicy":
        """Return the policy for task b; for unadapted SVPG, the policy of particle b, which acts in task b."""
        count = self.num_tasks if self.adapted else self.blueprint.config.algorithm.num_policies
        if not -count <= b < count:
            raise IndexError(f"task {b} is out of range; expected 0 to {count - 1}")
        b %= count
        if not self.adapted:
            return TrainedPolicy(self.blueprint, self.state, seed=self.seed, particle=b)
        rounds = [episodes.slice(b, b + 1) for episodes in self._rounds]
        return TrainedPolicy(self.blueprint, self.state, self._params.slice(b, b + 1), rounds, self.seed)

    def __call__(self, observations: Any, *, deterministic: bool = True) -> Array:
        """Return actions in the environment's action space.

        Args:
            observations: Observations, as for `act`.
            deterministic: True returns the most likely actions; False samples actions as in training.
        """
        actions = self.blueprint.action_map(self.act(observations, deterministic=deterministic))
        return actions.astype(self.blueprint.actions.dtype)

    def adapt(
        self,
        to: gymnasium.Env[Any, Any] | EpisodeBatch,
        *,
        episodes: int | None = None,
        steps: int = 1,
        max_episode_steps: int | None = None,
    ) -> "TrainedPolicy":
        """Adapt to a task with the run's algorithm, and return the adapted policy.

        MAML and related algorithms take gradient steps on the episodes, PEARL infers the task from them, and RL2 and
        VariBAD process them in order with their memory. A2C, PPO and other single-task learners raise UsageError.

        Args:
            to: Environment with the run's spaces, in which to collect episodes, or episodes [B, E, T] that this policy
                collected, such as stored ones.
            episodes: Number of episodes to collect per adaptation step. The default is the run's evaluation setting.
                Only allowed with an environment.
            steps: Number of adaptation steps, each on new episodes. Only allowed with an environment.
            max_episode_steps: Maximum episode length; the default is the run's. Only allowed with an environment.

        Raises:
            UsageError: the algorithm does not adapt, or the arguments are incompatible.
            GraphError: the algorithm's adaptation stages need outputs that only exist during training.
            TypeError: `to` is neither an environment nor episodes.
            ValueError: the environment or the episodes do not match the run.
            RolloutError: the environment failed.
        """
        config = self.blueprint.config
        if not config.algorithm.adapts:
            raise UsageError(f"{config.algorithm.name} does not adapt; use the policy as it is")
        if self.adapted and not self._rounds:
            raise UsageError(
                "the policy was saved after it had adapted, without its episodes; use `policy.unadapted.adapt`"
            )
        if isinstance(to, EpisodeBatch):
            if (episodes, steps, max_episode_steps) != (None, 1, None):
                raise UsageError(
                    "episodes, steps and max_episode_steps cannot be combined with a batch of episodes; omit them, "
                    "since a batch is always used in a single adaptation step"
                )
            return self._adapted_to(to)
        if self.num_tasks != 1:
            raise UsageError(
                f"a policy for {self.num_tasks} tasks cannot adapt to one environment; use `policy.task(b).adapt`"
            )
        episodes = EvaluationPlan.of(config).episodes if episodes is None else episodes
        max_episode_steps = config.max_episode_steps if max_episode_steps is None else max_episode_steps
        for name, number in (("episodes", episodes), ("steps", steps), ("max_episode_steps", max_episode_steps)):
            if number < 1:
                raise UsageError(f"{name} must be at least 1, got {number}")
        policy = self
        for _ in range(steps):
            at = RolloutPosition(self.seed, 0, len(policy._rounds))
            batch = collect_in(
                to, self.blueprint, policy._params, at, episodes=episodes, max_episode_steps=max_episode_steps
            )
            policy = policy._adapted_to(batch)
        return policy

    def save(self, path: str | Path) -> None:
        """Write the policy to a new file in the format that the suffix indicates.

        A .safetensors file contains everything but the episodes used for adaptation, and `metaloom.load_policy` reads
        it without the run. .onnx and .pt2 (torch.export) files contain a single-task model that returns the most likely
        actions, like `policy(observations)`. ONNX metadata include the run, the iteration, the learner's digest, and
        the components with units.

        Raises:
            UsageError: the file exists or cannot be written, the suffix is unknown, or the network does not support the
                format.
            ExtraMissing: packages for ONNX are not installed.
        """
        path = Path(path)
        if path.suffix not in _FORMATS:
            raise UsageError(f"{path}: unsupported suffix {path.suffix!r}; use one of {', '.join(_FORMATS)}")
        # Write to a temporary file first, so that nobody loads an incomplete one.
        part = path.with_name(f".{path.stem}.part{path.suffix}")
        try:
            if path.exists():
                raise UsageError(f"{path} already exists; choose a new path")
            part.touch()
            mode = part.stat().st_mode  # the usual permissions; a library may set others
        except OSError as problem:
            raise UsageError(f"{path} cannot be written ({problem.strerror}); choose a writable folder") from None
        try:
            _FORMATS[path.suffix](self, part)
            part.chmod(mode)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def deployed(self) -> DeployedPolicy:
        """Return a torch module that maps observations [N, ...] to the most likely actions in the environment's space.

        Raises:
            UsageError: the policy has several tasks.
        """
        if self.num_tasks != 1:
            raise UsageError(f"the policy is for {self.num_tasks} tasks; select one with `policy.task(b)`")
        latent = self.latent
        params = {name: value[0] for name, value in self.params.items()}
        return DeployedPolicy(self.blueprint, params, None if latent is None else latent[0]).eval()

    def _adapted_to(self, batch: EpisodeBatch) -> "TrainedPolicy":
        B = len(batch.lengths)
        if self.num_tasks not in (1, B):
            raise UsageError(f"got episodes of {B} tasks and a policy for {self.num_tasks}; the numbers must match")
        self._check_like_ours(batch)
        config, setup = self.blueprint.config, self.blueprint.setup()
        learner, params = config.algorithm.build(setup), self._params
        if B > 1 and self.num_tasks == 1:
            if self.adapted:
                raise UsageError(f"got episodes of {B} tasks; expected those of the task the policy adapted to")
            params = learner.acting_params(self.state, B)
        rounds = [*self._rounds, batch]
        tools = {"config": config, "setup": setup, "learner": learner, "parallel": map}
        adaptation = Adaptation(graph_of(config), config, tools)
        with normal_numerics(config.device):
            adapted = adaptation.adapt(self.state, params, rounds, run_seed=self.seed)
        return TrainedPolicy(self.blueprint, self.state, adapted, rounds, self.seed)

    def _check_like_ours(self, batch: EpisodeBatch) -> None:
        found = (batch.observations.shape[-1], 0 if batch.actions.dtype == np.int64 else batch.actions.shape[-1])
        required = (self.blueprint.spaces.observation_size, self.blueprint.spaces.action_size)
        if found != required:
            raise ValueError(f"got episodes with {_sizes(*found)}; expected {_sizes(*required)}")
        # Likelihood ratios need the acting distribution; inferring a task does not.
        if self.latent is None and {*batch.behavior} != (recorded := self._recorded):
            raise ValueError(
                f"the episodes record {', '.join(sorted(batch.behavior)) or 'nothing'} of the behavior policy; "
                f"expected {', '.join(sorted(recorded))}, which this kind of policy records"
            )


def _sizes(observation_size: int, action_size: int) -> str:
    actions = f"actions of {plural(action_size, 'value')}" if action_size else "discrete actions"
    return f"observations of {plural(observation_size, 'value')} and {actions}"


def load_policy(path: str | Path, *, trust: bool = False) -> TrainedPolicy:
    """Load a policy saved by `TrainedPolicy.save`, without its run; only adaptation needs an environment.

    Args:
        path: Path of the file.
        trust: Trust the modules that the file names, now and later; not needed for policies that you saved.

    Raises:
        UntrustedRun: the file names modules that you have not trusted.
        UsageError: the file does not exist, is not a policy, or is damaged.
        ConfigError: the settings are not valid for a run, or need a module that cannot be imported.
    """
    found = PolicyFile.read(path, trust=trust)
    try:
        params = found.params if found.adapted else None
        policy = TrainedPolicy(found.blueprint, found.state, params, seed=found.seed, particle=found.particle)
        required = {*policy.unadapted.params}
    except ConfigError:
        raise
    except ValueError as problem:
        raise UsageError(f"{path}: {problem}; save the policy again") from None
    if found.adapted and found.blueprint.config.algorithm.trial is not None:
        required |= {TRIAL_STATE, TRIAL_LAST}  # the policy's memory
    if found.params.params.keys() != required:
        wrong = ", ".join(sorted(found.params.params.keys() ^ required))
        raise UsageError(f"{path}: parameters are unexpected or missing: {wrong}; save the policy again")
    return policy


_FORMATS: dict[str, Callable[[TrainedPolicy, Path], None]] = {
    ".safetensors": lambda policy, path: PolicyFile(
        policy.blueprint, policy.state, TaskParams(dict(policy.params)), policy.adapted, policy.seed, policy.particle
    ).write(path),
    ".onnx": lambda policy, path: save_onnx(
        policy.deployed(), path, {**policy.blueprint.origin, "adapted": str(policy.adapted).lower()}
    ),
    ".pt2": lambda policy, path: save_program(policy.deployed(), path),
}
"""Functions that write a policy, keyed by file suffix."""


def policy_of(run: Run, iteration: int, *, seed: int = 0) -> TrainedPolicy:
    """Return the policy with which an iteration starts; see Run.policy."""
    updates = updates_at(run, iteration)
    ref = run.learner_ref(updates)
    state, config = learner_after(run, updates), config_of(run, ref)
    origin = {
        "run": run.name,
        "run_id": str(run.info["id"]),
        "iteration": str(updates),
        "learner_sha256": run.record(ref).digest,
    }
    for axis in ("observation", "action"):
        if units := run.components(axis):
            origin |= {f"{axis}_names": json.dumps([*units]), f"{axis}_units": json.dumps([*units.values()])}
    blueprint = replace(Blueprint.of(config), origin=origin)
    learner = blueprint.learner()
    require_stored_sizes(run, learner)
    warn_changed_sources(run, ref, loaded_sources(plugin_paths(config)))
    return TrainedPolicy(blueprint, learner.at_start(state, run_seed=config.seed), seed=seed)
