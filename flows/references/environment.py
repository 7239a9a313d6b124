"""What a run records of its environment: commands tell returns by it, and no digest of an output covers it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from metaloom.flows.graph.run_stages import config_of
from metaloom.flows.results.class_returns import classes_of
from metaloom.pipeline.envs.fact_checks import described_facts
from metaloom.pipeline.envs.facts import component_facts, env_facts
from metaloom.pipeline.envs.registry import make_env
from metaloom.storage import Run

_MAY_MOVE = "class"  # the module of an environment, from version to version


def false_facts(run: Run) -> Iterator[str]:
    """Give the names of what a run records of its environment and this declares otherwise.

    What is recorded by versions that know less is no matter.

    Raises:
        UntrustedRun: the settings name modules that the user has not agreed to import.
    """
    config, classes = config_of(run), classes_of(run)
    env = make_env(config.env)
    declared = {
        "env": env_facts(config.env, env),
        "components": component_facts(env),
        "facts": described_facts(env),
        "task_classes": env.task_classes.facts() if env.task_classes is not None else {},
    }
    env.close()
    recorded = {name: run.info["environment"].get(name, {}) for name in ("env", "components", "facts")}
    if isinstance(recorded["env"], dict):
        recorded["env"] = {name: fact for name, fact in recorded["env"].items() if name != _MAY_MOVE}
    recorded["task_classes"] = {} if classes is None else classes.facts()
    yield from _differing(recorded, json.loads(json.dumps(declared)))
    yield from (name for name in _emptied(run) if declared[name])


def _emptied(run: Run) -> list[str]:
    """Names under which nothing is recorded: every version leaves out such names themselves."""
    environments = [run.info["environment"], *(session.environment for session in run.sessions())]
    return [
        name
        for name in ("components", "facts", "task_classes")
        if any(name in environment and not environment[name] for environment in environments)
    ]


def _differing(recorded: Mapping[str, Any], declared: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for name, told in recorded.items():
        found = declared.get(name)
        # Classes go together: without one of them, the others have other tasks.
        if isinstance(told, dict) and isinstance(found, dict) and name != "task_classes":
            yield from _differing(cast(dict[str, Any], told), cast(dict[str, Any], found), f"{inside}{name}.")
        elif told != found and (told or inside):
            yield f"{inside}{name}"
