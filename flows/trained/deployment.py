"""Trained policies as safetensors files, and as self-contained torch modules that can be exported to other formats."""

import hashlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

import metaloom
from metaloom.flows.errors import ExtraMissing, UsageError
from metaloom.flows.streams import quiet
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.flows.trust import StoredSettings
from metaloom.pipeline.envs.wrappers import ActionSpace, sizes_of
from metaloom.pipeline.estimation.normalization import CLIP, MEAN, STD, without_normalization
from metaloom.pipeline.nn.flat_networks import renamed
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK, Q_NETWORK
from metaloom.pipeline.policies.build import build_own_policy, build_policy
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, Params, TaskParams

FORMAT = "metaloom-policy-1"
_PARTS = ("params", "optimizer", "extra")
"""Fields of LearnerState, which prefix the array names in the file. Task parameters have the prefix `task`."""


@dataclass(frozen=True)
class PolicyFile:
    """Contents of a policy file; `particle` is the index of the policy, as in TrainedPolicy."""

    blueprint: Blueprint
    state: LearnerState
    params: TaskParams
    adapted: bool
    seed: int
    particle: int = 0

    def write(self, path: Path) -> None:
        """Write the file, and trust the modules that it names."""
        arrays = {f"{part}.{name}": value for part in _PARTS for name, value in getattr(self.state, part).items()}
        arrays |= {f"task.{name}": value for name, value in self.params.params.items()}
        numbers = {"adapted": self.adapted, "seed": self.seed, "particle": self.particle}
        described = json.dumps({**numbers, **self.blueprint.to_json()})
        metadata = {"format": FORMAT, "version": metaloom.__version__, "policy": described}
        # Kept separate from the settings, which are searched for module names.
        metadata["origin"] = json.dumps(dict(self.blueprint.origin))
        metadata["sha256"] = digest_of(metadata, arrays)
        # The writer has already imported the modules it names.
        StoredSettings.of_policy(path, described).trust()
        save_file({name: np.array(value, order="C") for name, value in arrays.items()}, path, metadata)

    @classmethod
    def read(cls, path: str | Path, *, trust: bool = False) -> "PolicyFile":
        """Return the contents of a policy file; raise the errors that `load_policy` describes."""
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
                f"{path}: the policy's description is damaged ({problem}); save the policy again"
            ) from None
        state = LearnerState(**{part: renamed(arrays, f"{part}.", "") for part in _PARTS})
        try:
            params = TaskParams(renamed(arrays, "task.", ""))
        except ValueError as problem:
            raise UsageError(f"{path}: {problem}; save the policy again") from None
        return cls(replace(blueprint, origin=origin), state, params, adapted, seed, particle)


def digest_of(metadata: Mapping[str, str], arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 of a policy file's contents except this digest, to detect changes such as a flipped bit."""
    state = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        state.update(f"{name} {text}\n".encode() if name != "sha256" else b"")
    for name, value in sorted(arrays.items()):
        state.update(f"{name} {value.dtype.str} {list(value.shape)}\n".encode() + value.tobytes())
    return state.hexdigest()


def _contents(path: str | Path) -> tuple[Mapping[str, str], Mapping[str, Array]]:
    if Path(path).is_dir():
        raise UsageError(
            f"{path} is a folder; pass a file that `policy.save` wrote. A run's policy is "
            f"`metaloom.open_run({str(path)!r}).policy()`"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; pass one that `policy.save` wrote") from None
    except (OSError, SafetensorError) as problem:
        raise UsageError(
            f"{path} is not a safetensors file ({problem}); pass one that `policy.save` wrote with the suffix "
            ".safetensors. ONNX and .pt2 are for other programs"
        ) from None
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path}: the safetensors file has format {metadata.get('format')!r}; expected {FORMAT!r}, as "
            "`policy.save` writes it"
        )
    if metadata.get("sha256") != digest_of(metadata, arrays):
        raise UsageError(f"{path}: the contents differ from what `policy.save` wrote; save the policy again")
    return metadata, arrays


class DeployedPolicy(nn.Module):
    """Torch module that returns a single-task policy's most likely actions in the environment's action space.

    It maps observations [N, ...] to the actions that `TrainedPolicy.__call__` returns, [N, A] or, if discrete, [N]. A
    policy that infers its task uses the latent variable of its current episode.
    """

    def __init__(self, blueprint: Blueprint, params: Params, latent: Array | None) -> None:
        super().__init__()
        if blueprint.config.algorithm.trial is not None:
            raise UsageError(
                f"the policy of {blueprint.config.algorithm.name} keeps a memory from step to step, which such a "
                "module cannot do. Use .safetensors, which `metaloom.load_policy` reads"
            )
        self.observation_shape: tuple[int, ...] = blueprint.spaces.observation_shape
        self._normalizes = MEAN in params
        if self._normalizes:
            self.register_buffer("mean", torch.tensor(params[MEAN]))
            self.register_buffer("std", torch.tensor(params[STD]))
        params = without_normalization(params)
        self._names = list(params)
        for n, name in enumerate(self._names):
            self.register_buffer(f"param_{n}", torch.tensor(params[name]))
        self.register_buffer("latent", torch.zeros(0) if latent is None else torch.tensor(latent))
        self._head = _head(blueprint, 0 if latent is None else len(latent))
        self._map = _ActionMap(blueprint.actions, blueprint.config.env.action_scale)

    def forward(self, observations: Tensor) -> Tensor:
        params = {name: cast(Tensor, getattr(self, f"param_{n}")) for n, name in enumerate(self._names)}
        rows = observations.flatten(1).float()
        if self._normalizes:
            rows = ((rows - cast(Tensor, self.mean)) / cast(Tensor, self.std)).clamp(-CLIP, CLIP)
        latent = cast(Tensor, self.latent)
        seen = torch.cat([rows, latent.expand(rows.shape[0], -1)], -1) if latent.numel() else rows
        return self._map(self._head(params, seen))


class _ActionMap(nn.Module):
    """Maps a policy's actions [N, ...] to environment actions, like `pipeline.envs.wrappers.action_map`."""

    def __init__(self, actions: ActionSpace, scale: float | None) -> None:
        super().__init__()
        self._scale = scale
        self._discrete, self._shape = not isinstance(actions, Box), actions.shape or ()
        if isinstance(actions, Box):
            bounds = actions.low, actions.high
        else:
            start = np.zeros(actions.shape) if isinstance(actions, MultiBinary) else actions.start
            bounds = start, start
        kind = torch.int64 if self._discrete else torch.float64
        for name, value in zip(("low", "high"), bounds, strict=True):
            self.register_buffer(name, torch.tensor(value, dtype=kind))
        if isinstance(actions, MultiDiscrete | MultiBinary):
            sizes = np.array(sizes_of(actions))
            self.register_buffer("sizes", torch.tensor(sizes))
            self.register_buffer("weights", torch.tensor(np.cumprod(sizes[::-1])[::-1] // sizes))
        self._dtype = torch.tensor(np.zeros(0, actions.dtype)).dtype if isinstance(actions, Box) else torch.int64

    def forward(self, actions: Tensor) -> Tensor:
        low, high = cast(Tensor, self.low), cast(Tensor, self.high)
        if self._discrete and not self._shape:
            return actions + low
        if self._discrete:
            parts = actions[:, None] // cast(Tensor, self.weights) % cast(Tensor, self.sizes)
            return parts.unflatten(1, self._shape) + low
        mapped = actions.double()
        if self._scale is not None:
            mapped = (mapped + self._scale) * ((high - low) / (2 * self._scale)) + low
        return mapped.clamp(low, high).to(self._dtype)


Head = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Function from parameters and inputs [N, in] to the policy's most likely actions [N, ...]."""


def _head(blueprint: Blueprint, latent_size: int) -> Head:
    config, spaces = blueprint.config.policy, blueprint.spaces

    def network(prefix: str, output_size: int, *, extra_size: int = 0) -> Network:
        return build_network(prefix, config.network_spec(spaces, output_size, extra_size=extra_size, activation="relu"))

    match blueprint.config.algorithm.actor:
        case "tanh_gaussian":
            means = network(POLICY_NETWORK, 2 * spaces.action_size, extra_size=latent_size)
            return lambda params, seen: means(params, seen)[..., : spaces.action_size].tanh()
        case "q_values":
            values = network(Q_NETWORK, spaces.num_actions)
            return lambda params, seen: values(params, seen).argmax(-1)
        case _ if config.name is not None:
            own = build_own_policy(config, spaces)
            return lambda params, seen: own.distribution(params, seen).mode()
        case _:
            outputs = build_policy(config, spaces).network
            if spaces.num_actions:
                return lambda params, seen: outputs(params, seen).argmax(-1)
            return outputs


def save_program(policy: DeployedPolicy, path: Path) -> None:
    """Write a torch.export program that accepts any number N of observations; see TrainedPolicy.save."""
    program = _program(policy)
    program.example_inputs = None  # they would be pickled
    torch.export.save(program, path)


def save_onnx(policy: DeployedPolicy, path: Path, about: Mapping[str, str]) -> None:
    """Write an ONNX model that maps `observations`, [N, ...] float32, to `actions`; see TrainedPolicy.save."""
    if importlib.util.find_spec("onnxscript") is None:
        raise ExtraMissing("onnx", "onnxscript")
    # The exporter warns about missing packages and its own use of torch.
    with quiet(logging.ERROR, "torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.onnx.export(
            _program(policy), input_names=["observations"], output_names=["actions"], dynamo=True, verbose=False
        )
    assert model is not None
    model.model.metadata_props.update({f"metaloom.{name}": value for name, value in about.items()})
    model.save(path)


def _program(policy: DeployedPolicy) -> torch.export.ExportedProgram:
    rows, example = torch.export.Dim("N"), (torch.zeros(2, *policy.observation_shape),)
    policy(*example)  # a custom network first makes a copy per thread, which cannot be traced
    try:
        return torch.export.export(policy, example, dynamic_shapes=({0: rows},), strict=False)
    except Exception as problem:
        raise UsageError(
            f"the policy's network cannot be traced by torch.export: {type(problem).__name__}: {problem}; "
            "save it as .safetensors"
        ) from problem
