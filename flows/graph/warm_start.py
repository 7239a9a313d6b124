"""Warm starts from another run's learner, which is located by the run's name and pinned by the learner's digest."""

import logging
from collections.abc import Mapping
from typing import Any

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.runs import RunAt, learner_after, run_folder
from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.config.sections import WarmStart
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import LearnerState

log: logging.Logger = logging.getLogger(__name__)

_VIEWS = ("@best", "@latest")
_DECIDE_FUNCTION = (
    "name",
    "options",
    "network",
    "network_options",
    "output_activation",
    "min_std",
    "normalize_observations",
)


def pinned(config: RunConfig, *, step_timeout_seconds: float | None = None) -> RunConfig:
    """Return a new run's configuration with its environment and warm start resolved.

    Raises UsageError if the learner of a warm start does not exist, and ConfigError if its parameters would define a
    different policy or value function with these settings.
    """
    env, notes = settled(config.env, config.max_episode_steps, step_timeout_seconds or 60)
    for note in notes:
        log.warning("%s", note)
    config = config.model_copy(update={"env": env})
    start = config.init_from
    if start is None:
        return config
    named = start.run.endswith(_VIEWS)
    at = RunAt.parse(start.run, learner=True) if named else RunAt(run_folder(start.run), start.updates)
    run = storage.open_run(at.path)
    place = storage.url_of(run.path) or str(run.path.resolve())
    updates = len(run.iterations) if at.iteration is None else at.iteration
    ref = run.learner_ref(updates)
    if not run.contains(ref):
        done = plural(len(run.iterations), "update")
        raise UsageError(f"init_from: learner {place}@{updates} does not exist; the run has completed only {done}")
    found = WarmStart(run=place, updates=updates, digest=run.record(ref).digest)
    _require_same(start, found)
    _require_same_function(config, run.config_of(ref), f"{place}@{updates}")
    return config.model_copy(update={"init_from": found})


def as_pinned(asked: RunConfig, stored: RunConfig) -> RunConfig:
    """Return the requested configuration with the stored run's pinned warm start, if both name the same learner."""
    start, found = asked.init_from, stored.init_from
    if start is None or found is None:
        return asked
    name = next((start.run.removesuffix(view) for view in _VIEWS if start.run.endswith(view)), start.run)
    same = (
        run_folder(name).resolve() == run_folder(found.run).resolve()
        and start.updates in (None, found.updates)
        and start.digest in (None, found.digest)
    )
    return asked.model_copy(update={"init_from": found}) if same else asked


def read_learner(start: WarmStart) -> LearnerState:
    """Return the learner of a pinned warm start; raise UsageError if it has changed since it was pinned."""
    run = storage.open_run(run_folder(start.run))
    updates = len(run.iterations) if start.updates is None else start.updates
    digest = run.record(run.learner_ref(updates)).digest
    _require_same(start, WarmStart(run=start.run, updates=start.updates, digest=digest))
    return learner_after(run, updates)


def _require_same_function(config: RunConfig, stored: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if stored parameters would define a different policy here; shapes are checked later."""
    given, algorithm = PolicyConfig.model_validate(stored.get("policy", {})), stored["algorithm"]["name"]
    actor = config.algorithm.actor
    # Only built-in classes are checked, since importing others requires trust.
    known = ALGORITHMS.find(algorithm, AlgorithmSettings).actor if algorithm in ALGORITHMS.builtin else actor
    pairs: dict[str, tuple[object, object]] = {"the actor of algorithm": (actor, known)}
    pairs |= {f"policy.{name}": (getattr(config.policy, name), getattr(given, name)) for name in _DECIDE_FUNCTION}
    pairs["policy.activation"] = (_activation(config.policy, actor), _activation(given, known))
    scales = stored.get("processing", {}).get("scale_rewards", False)
    pairs["processing.scale_rewards"] = (config.processing.scale_rewards, scales)
    if (env := stored["env"])["name"] == config.env.name:
        pairs["env.action_scale"] = (config.env.action_scale, EnvConfig.model_validate(env).action_scale)
    for name, (here, there) in pairs.items():
        if here != there:
            raise ConfigError(
                f"init_from: {name} is {here} here and {there} in {where}, so the stored parameters would define a "
                f"different policy or value function; use {there}"
            )


def _activation(policy: PolicyConfig, actor: ActorKind) -> str:
    return policy.activation or ("relu" if actor in ("tanh_gaussian", "q_values") else "tanh")


def _require_same(pinned: WarmStart, found: WarmStart) -> None:
    if pinned.digest not in (None, found.digest):
        raise UsageError(
            f"init_from: the learner of {found.run} after {found.updates} updates has the digest {found.digest}; "
            f"expected {pinned.digest}, its digest when the run was started"
        )
