"""Samples for tests of algorithms: the golden ones of the original ProMP code, and small random ones."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import EpisodeBatch, Params, Samples, Step, TaskParams

GOLDEN = Path(__file__).parents[2] / "golden"
ORIGINAL_LOG_STD = "log_std_network.log_std_var"

Arrays = Mapping[str, NDArray]


@pytest.fixture
def golden() -> Callable[[str], Arrays]:
    """The arrays of a golden file by the file's name."""

    def load(name: str) -> Arrays:
        with np.load(GOLDEN / f"{name}.npz") as file:
            return dict(file)

    return load


@pytest.fixture
def golden_params() -> Callable[[Arrays, str], Params]:
    """Parameters stored under a prefix such as "theta", by our names."""

    def params(arrays: Arrays, prefix: str) -> Params:
        found = {k.removeprefix(f"{prefix}."): v for k, v in arrays.items() if k.startswith(f"{prefix}.")}
        log_std = found.pop(ORIGINAL_LOG_STD)
        return {**found, "log_std": log_std[0]}

    return params


@pytest.fixture
def golden_steps() -> Callable[[Arrays], list[Step]]:
    """The rounds of a golden file; a task's rows become one episode."""

    def steps(arrays: Arrays) -> list[Step]:
        return [_golden_step(arrays, k) for k in range(int(arrays.get("num_inner_grad_steps", 1)) + 1)]

    return steps


def _golden_step(arrays: Arrays, k: int) -> Step:
    def rows(name: str) -> list[NDArray]:
        return [arrays[f"step{k}_task{i}_{name}"] for i in range(3)]

    lengths = [len(row) for row in rows("adv")]
    observations = _padded(rows("obs"), max(lengths) + 1)
    actions, mean, log_std, advantages = (
        _padded(rows(name), max(lengths)) for name in ("act", "old_mean", "old_log_std", "adv")
    )
    return build_step(k, observations, actions, mean, log_std, advantages, np.array(lengths)[:, None])


def _padded(rows: Sequence[NDArray], length: int) -> NDArray[np.float32]:
    result = np.zeros((len(rows), 1, length, *rows[0].shape[1:]), np.float32)
    for i, row in enumerate(rows):
        result[i, 0, : len(row)] = row
    return result


def build_step(
    k: int,
    observations: NDArray,
    actions: NDArray,
    mean: NDArray,
    log_std: NDArray,
    advantages: NDArray,
    lengths: NDArray,
    rewards: NDArray | None = None,
) -> Step:
    B, E, T = advantages.shape
    zeros = np.zeros((B, E, T), np.float32)
    episodes = EpisodeBatch(
        observations=observations,
        actions=actions,
        rewards=zeros if rewards is None else rewards,
        terminated=np.zeros((B, E), bool),
        truncated=np.ones((B, E), bool),
        lengths=lengths.astype(np.int32),
        behavior={"mean": mean, "log_std": log_std},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )
    return Step(episodes, Samples(zeros, zeros, advantages, episodes.mask), k)


@pytest.fixture
def random_steps() -> Callable[..., list[Step]]:
    """Small random rounds with ragged episodes; arrays are read-only, as those of a store may be."""

    def steps(
        num_rounds: int = 2,
        *,
        B: int = 3,
        E: int = 2,
        T: int = 5,
        O: int = 3,
        A: int = 2,
        seed: int = 0,
        ragged: bool = True,
        advantage_scale: float = 1.0,
    ) -> list[Step]:
        rng = np.random.default_rng(seed)
        return [
            _random_step(rng, k, (B, E, T, O, A), ragged=ragged, advantage_scale=advantage_scale)
            for k in range(num_rounds)
        ]

    return steps


def _random_step(
    rng: np.random.Generator, k: int, sizes: tuple[int, int, int, int, int], *, ragged: bool, advantage_scale: float
) -> Step:
    B, E, T, O, A = sizes

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    lengths = rng.integers(1, T + 1, (B, E)) if ragged else np.full((B, E), T)
    real = np.arange(T) < lengths[..., None]
    mean = 0.3 * normal(B, E, T, A) * real[..., None]
    arrays = {
        "observations": normal(B, E, T + 1, O),
        "actions": normal(B, E, T, A) * real[..., None],
        "mean": mean,
        "log_std": 0.1 * normal(B, A),
        "advantages": advantage_scale * normal(B, E, T) * real,
        "rewards": normal(B, E, T) * real,
    }
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    for value in arrays.values():
        value.flags.writeable = False
    return build_step(k, **arrays, lengths=lengths)


@pytest.fixture
def on_policy_steps(random_steps) -> Callable[..., list[Step]]:
    """Rounds as an algorithm samples them: every round by the parameters that its inner steps so far gave."""

    def steps(learner, state, **sizes) -> list[Step]:
        inner_steps = learner.settings.inner_steps
        raw = random_steps(inner_steps + 1, **sizes)
        params = learner.acting_params(state, len(raw[0].episodes.lengths))
        rounds: list[Step] = []
        for step in raw:
            rounds.append(_as_if_acted(step, learner.policy, params))
            if step.k < inner_steps:
                params = learner.adapt(state, params, rounds[-1])
        return rounds

    return steps


def _as_if_acted(step: Step, policy: GaussianPolicy, params: TaskParams) -> Step:
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in params.params.items()}
    B, E, T = step.episodes.rewards.shape
    rows = torch.from_numpy(step.episodes.observations[:, :, :T].reshape(B, E * T, -1))
    mean, log_std = policy.distribution(tensors, rows)
    noise = np.random.default_rng(step.k).standard_normal(step.episodes.actions.shape, np.float32)
    mean = mean.numpy().reshape(step.episodes.actions.shape)
    episodes = dataclasses.replace(
        step.episodes,
        actions=mean + noise * log_std[:, :, None].exp().numpy(),
        behavior={"mean": mean, "log_std": log_std[:, 0].numpy()},
    )
    return dataclasses.replace(step, episodes=episodes)
