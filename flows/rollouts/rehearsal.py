"""Rehearsal of an environment before a run: child processes try the environment to resolve unset settings."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium

from metaloom.flows.rollouts.guard import MARK, end_marked
from metaloom.pipeline.envs import rehearsal
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError


class Settled(NamedTuple):
    """An environment configuration with all settings resolved, and the rehearsal's findings as sentences."""

    config: EnvConfig
    notes: tuple[str, ...] = ()


def settled(config: EnvConfig, max_episode_steps: int, timeout_seconds: float = 60, *, always: bool = False) -> Settled:
    """Determine whether to scale actions and reuse environment copies across episodes; return the resolved settings.

    Built-in environments and explicit settings stay unchanged. So does an environment that cannot be built or fails:
    training reports the error. `timeout_seconds` limits each episode; `always` rehearses even if nothing is unset.
    """
    asks_scale = "action_scale" not in config.model_fields_set and config.action_scale is not None
    asks_scale = asks_scale and not config.is_built_in
    if not (asks_scale or config.copies == "auto" or config.wrappers or always):
        return Settled(config)
    plain = config.model_copy(update={"action_scale": None}) if asks_scale else config
    steps = max_episode_steps if config.copies == "auto" or always else 0
    found = _rehearsed(plain.model_dump_json(), steps, timeout_seconds)
    if "unknown" in found and config.name in gymnasium.registry:
        raise EnvError(
            f"env.name: {config.name!r} is registered only in this process, so the run could not be "
            "continued or replayed; use module:Id, with the module that registers it"
        )
    if "refusal" in found:
        raise EnvError(f"{config.name}: {found['refusal']}")
    update: dict[str, Any] = {}
    if asks_scale and "discrete" in found:
        update["action_scale"] = None if found["discrete"] else config.action_scale
    if config.copies == "auto":
        update["copies"] = found.get("copies", "kept")
    config = config.model_copy(update=update)
    misses = [found["misses"]] if config.action_scale is None and found.get("misses") else []
    return Settled(config, tuple(f"{config.name}: {note}" for note in (*found.get("notes", ()), *misses)))


@lru_cache(maxsize=64)  # the runs of a sweep share an environment
def _rehearsed(settings: str, steps: int, timeout_seconds: float) -> Mapping[str, Any]:
    """Rehearse the environment in two processes with different hash seeds, and return the combined findings."""
    found = _in_process(settings, [str(steps), "1"], timeout_seconds)
    if "copies" not in found:
        return found
    again = _in_process(settings, [str(found["steps"]), "0"], timeout_seconds)
    if "alone" not in again:
        return {**found, **again, "notes": [*found.get("notes", ()), *again.get("notes", ())]}
    differs = [n for n, (one, other) in enumerate(zip(found["alone"], again["alone"], strict=False)) if one != other]
    return {"refusal": rehearsal.refusal(f"two processes (in episode {differs[0]})")} if differs else found


def _in_process(settings: str, arguments: list[str], timeout_seconds: float) -> dict[str, Any]:
    mark = secrets.token_hex(8)
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    limit, problem = timeout_seconds + 30 * rehearsal.SECONDS, ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        try:
            ended = subprocess.run(
                # Without -P, modules of the working directory would be found before installed ones.
                [sys.executable, "-P", "-m", rehearsal.__name__, *arguments, str(timeout_seconds)],
                input=settings,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": arguments[-1], MARK: mark},
                text=True,
                # Not a pipe, since the environment's leftover processes would hold it open.
                stdout=answer,
                stderr=subprocess.DEVNULL,
                timeout=limit,
            )
            problem = f"the rehearsal's process ended with status {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"the rehearsal did not end within {limit:g} s"
        finally:
            end_marked(mark)
        if not problem:
            answer.seek(0)
            return json.load(answer)
    return {"notes": [f"{problem}; environment copies are reused across episodes"]}
