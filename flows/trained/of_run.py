"""The policies of a stored run."""

import json
from dataclasses import replace

from metaloom.flows.graph.run_stages import config_of, require_stored_sizes
from metaloom.flows.runs import learner_after, updates_at
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.flows.trained.policy import TrainedPolicy
from metaloom.storage import Run


def policy_of(run: Run, iteration: int = -1, *, seed: int = 0) -> TrainedPolicy:
    """Return the policy that an iteration starts from; see flows.opened.Run.policy."""
    updates = updates_at(run, iteration)
    state, config = learner_after(run, updates), config_of(run, run.learner_ref(updates))
    origin = {
        "run": run.name,
        "run_id": str(run.info["id"]),
        "iteration": str(updates),
        "learner_sha256": run.record(run.learner_ref(updates)).digest,
    }
    for axis in ("observation", "action"):
        if units := run.components(axis):
            origin |= {f"{axis}_names": json.dumps([*units]), f"{axis}_units": json.dumps([*units.values()])}
    blueprint = replace(Blueprint.of(config), origin=origin)
    learner = blueprint.learner()
    require_stored_sizes(run, learner)
    return TrainedPolicy(blueprint, learner.at_start(state, run_seed=config.seed), seed=seed)
