"""Trained policies as safetensors files: arrays by name, and a JSON description."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import metaloom
from metaloom.flows.errors import UsageError
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.flows.trust import StoredSettings
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, TaskParams

FORMAT = "metaloom-policy-1"
_PARTS = ("params", "optimizer", "extra")
"""Fields of LearnerState, which are prefixes of names in the file; task parameters have the prefix `task`."""


@dataclass(frozen=True)
class PolicyFile:
    """Contents of a policy's file.

    Attributes:
        blueprint: Blueprint of the policy.
        state: Learner state.
        params: Parameters of every task.
        adapted: True if the policy has adapted.
        seed: Seed of all draws.
        particle: As in TrainedPolicy.
    """

    blueprint: Blueprint
    state: LearnerState
    params: TaskParams
    adapted: bool
    seed: int
    particle: int = 0

    def write(self, path: Path) -> None:
        """Write the file."""
        arrays = {f"{part}.{name}": value for part in _PARTS for name, value in getattr(self.state, part).items()}
        arrays |= {f"task.{name}": value for name, value in self.params.params.items()}
        numbers = {"adapted": self.adapted, "seed": self.seed, "particle": self.particle}
        described = json.dumps({**numbers, **self.blueprint.to_json()})
        metadata = {"format": FORMAT, "version": metaloom.__version__, "policy": described}
        # Separate from the settings, which are searched for names of modules.
        metadata["origin"] = json.dumps(dict(self.blueprint.origin))
        metadata["sha256"] = digest_of(metadata, arrays)
        # The writer has already imported the modules it names.
        StoredSettings.of_policy(path, described).trust()
        save_file({name: np.array(value, order="C") for name, value in arrays.items()}, path, metadata)

    @classmethod
    def read(cls, path: str | Path, *, trust: bool = False) -> PolicyFile:
        """Read a file.

        Raises:
            UntrustedRun: it names modules that the user has not trusted.
            UsageError: the file does not exist or is not a policy.
            ConfigError: its settings are not valid for a run.
        """
        metadata, arrays = _contents(path)
        try:
            described, settings = json.loads(metadata["policy"]), StoredSettings.of_policy(path, metadata["policy"])
            if trust:
                settings.trust()
            settings.require_trust()
            blueprint, seed, adapted = Blueprint.from_json(described), int(described["seed"]), described["adapted"]
            origin = {str(name): str(value) for name, value in dict(json.loads(metadata.get("origin", "{}"))).items()}
            particle = range(blueprint.config.algorithm.num_policies).index(int(described.get("particle", 0)))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise UsageError(
                f"{path}: found a description that is damaged ({problem}); save the policy again"
            ) from None
        state = LearnerState(**{part: renamed(arrays, f"{part}.", "") for part in _PARTS})
        try:
            params = TaskParams(renamed(arrays, "task.", ""))
        except ValueError as problem:
            raise UsageError(f"{path}: {problem}; save the policy again") from None
        return cls(replace(blueprint, origin=origin), state, params, adapted, seed, particle)


def digest_of(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 of everything in a file except this digest.

    Without it, a flipped bit would go unnoticed and change the policy.
    """
    state = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        state.update(f"{name} {text}\n".encode() if name != "sha256" else b"")
    for name, value in sorted(arrays.items()):
        state.update(f"{name} {value.dtype.str} {list(value.shape)}\n".encode() + value.tobytes())
    return state.hexdigest()


def _contents(path: str | Path) -> tuple[Mapping[str, str], Mapping[str, Array]]:
    if Path(path).is_dir():
        raise UsageError(
            f"{path}: found a folder; required a file that `policy.save` wrote. A run's policy is "
            f"`metaloom.open_run({str(path)!r}).policy()`"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UsageError(f"{path}: found no such file; required one that `policy.save` wrote") from None
    except (OSError, SafetensorError) as problem:
        raise UsageError(
            f"{path}: found no safetensors file ({problem}); required one that `policy.save` wrote with the suffix "
            ".safetensors; ONNX and .pt2 are for other programs"
        ) from None
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path}: found a safetensors file with format {metadata.get('format')!r}; required {FORMAT!r}, as "
            "`policy.save` writes it"
        )
    if metadata.get("sha256") != digest_of(metadata, arrays):
        raise UsageError(f"{path}: found contents other than `policy.save` wrote; save the policy again")
    return metadata, arrays
