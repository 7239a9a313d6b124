"""Starting a run from the learner of another one, found by name and pinned by digest."""

import logging

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.flows.runs import RunAt, run_folder
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.config.sections import WarmStart
from metaloom.pipeline.types import LearnerState, Update

log = logging.getLogger(__name__)

_VIEWS = ("@best", "@latest")


def pinned(config: RunConfig, *, step_timeout_seconds: float | None = None) -> RunConfig:
    """A new run's configuration with nothing left open: its environment, and the learner it starts from.

    Args:
        config: as asked for.
        step_timeout_seconds: how long the rehearsal of the environment may take, 60 if left out.

    Raises:
        EnvError: the environment does not do the same twice.
        UsageError: the run that it starts from has had fewer updates.
        storage.StoreError: there is no such run.
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
        raise UsageError(f"init_from: found {place}@{updates}, but that run has had {len(run.iterations)} updates")
    found = WarmStart(run=place, updates=updates, digest=run.record(ref).digest)
    _require_same(start, found)
    return config.model_copy(update={"init_from": found})


def as_pinned(asked: RunConfig, stored: RunConfig) -> RunConfig:
    """A configuration with the warm start of a stored run, if its own is what that one's was before it was pinned."""
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
    """The learner that a pinned warm start names.

    Raises:
        UsageError: it is no longer the one that was pinned.
        storage.StoreError: it is no longer there.
    """
    run = storage.open_run(run_folder(start.run))
    ref = run.learner_ref(len(run.iterations) if start.updates is None else start.updates)
    _require_same(start, WarmStart(run=start.run, updates=start.updates, digest=run.record(ref).digest))
    update = run.load(ref)
    assert isinstance(update, Update)
    return update.learner


def _require_same(pinned: WarmStart, found: WarmStart) -> None:
    if pinned.digest not in (None, found.digest):
        raise UsageError(
            f"init_from: the learner of {found.run} after {found.updates} updates has the digest {found.digest}; "
            f"required {pinned.digest}, the one that the run was started from"
        )
