"""Where a run's records come from: its own sessions, or the runs that it was forked from.

A fork shares the records of its parent. The chain then goes: the first run's run.json, its records, the fork's run.json
(which names the newest of them), the fork's records. So none of them can be moved from one fork to another.
"""

from collections.abc import Mapping
from typing import Any


def boundaries(info: Mapping[str, Any]) -> dict[int, str]:
    """By position in the history: the hash of the run.json that the record there follows."""
    own = {first_sequence(info): str(info["sha256"])}
    return {int(run["first_sequence"]): str(run["sha256"]) for run in info.get("ancestors", [])} | own


def first_sequence(info: Mapping[str, Any]) -> int:
    """Position in the history of the first record that the run's own sessions wrote."""
    return int(info.get("first_sequence", 0))


def configs(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configurations that decided the numbers of a run's records, by their digest."""
    shared = {str(run["config_digest"]): run["config"] for run in info.get("ancestors", [])}
    return shared | {str(info["config_digest"]): info["config"]}


def as_ancestor(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a fork keeps of the run.json of the run that it was made from."""
    kept = ("id", "sha256", "config", "config_digest", "environment", "versions")
    return {name: info[name] for name in kept} | {"first_sequence": first_sequence(info)}
