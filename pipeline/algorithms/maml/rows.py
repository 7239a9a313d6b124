"""Samples of a chunk of tasks as tensors, one row per environment step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NumericalError, Steps
from metaloom.pipeline.nn.distributions import DiagGaussian, Distribution
from metaloom.pipeline.types import Array, ParallelMap, Samples, Step

CPU = torch.device("cpu")

Recorded = Callable[[Mapping[str, Tensor]], Distribution]
"""Function that rebuilds the behavior policy's distributions from recorded arrays."""


def recorded_gaussian(behavior: Mapping[str, Tensor]) -> DiagGaussian:
    return DiagGaussian(**behavior)


@dataclass(frozen=True)
class Chunk:
    """Rows of consecutive tasks in all rollout batches, and the index of the first task."""

    first_task: int
    rounds: "Sequence[TaskRows]"

    def __len__(self) -> int:
        return len(self.rounds[0].weights)


@dataclass(frozen=True)
class TaskRows:
    """Rows of b tasks, N per task, with the behavior policy's distributions and log-densities of the actions."""

    observations: Tensor  # [b, N, O]
    actions: Tensor  # [b, N, A], or [b, N] int64 if discrete
    advantages: Tensor  # [b, N]
    weights: Tensor  # 1 / (number of the task's real rows) for real rows, 0 for padding, [b, N]
    behavior: Distribution  # [b, N]
    behavior_log_prob: Tensor  # [b, N]
    episodes: "EpisodeRows | None" = None  # rows arranged as episodes, for losses over whole episodes

    def mean(self, values: Tensor) -> Tensor:
        """Return each task's mean of values [b, N] over its real rows, [b]."""
        return (values * self.weights).sum(-1)


@dataclass(frozen=True)
class EpisodeRows:
    """Rows that form whole episodes, one after another and including padding, so that N = E * T."""

    adjusted_rewards: Tensor  # arbitrary in the padding, [b, E, T]
    mask: Tensor  # 1 for real steps, 0 for padding, [b, E, T]

    def split(self, values: Tensor) -> Tensor:
        """Reshape row values [b, N] to [b, E, T], and set the padding to zero."""
        return values.reshape(self.mask.shape) * self.mask

    def mean_over_cells(self, values: Tensor) -> Tensor:
        """Return each task's sum of values [b, E, T] divided by E · T, [b], so that short episodes weigh less."""
        return (values * self.mask).mean((-2, -1))


def chunk_bounds(num_tasks: int, tasks_per_chunk: int) -> list[slice]:
    """Split the tasks into consecutive chunks; return a slice of task indices for each."""
    return [slice(start, min(start + tasks_per_chunk, num_tasks)) for start in range(0, num_tasks, tasks_per_chunk)]


def minibatch_rows(mask: Array, num_minibatches: int, rng: np.random.Generator) -> list[Array]:
    """Partition each task's real rows at random; return one row index array [b, n] per minibatch, with padding last.

    The minibatches of a task differ in size by at most one row. One number is drawn per row of the mask [b, N],
    including padding, so that tasks are partitioned independently.
    """
    keys = np.where(mask == 0, 2.0, rng.random(mask.shape))
    most = int(np.count_nonzero(mask, axis=1).max())
    order = np.argsort(keys, axis=1, kind="stable")[:, : max(most, num_minibatches)]
    return [order[:, part::num_minibatches] for part in range(num_minibatches)]


def minibatches(samples: Samples, num_minibatches: int, rng: np.random.Generator) -> list[Array]:
    """Partition each task's steps (episodes, for DiCE) at random; return a row index array [B, n] per minibatch."""
    B, E, T = samples.mask.shape
    if samples.adjusted_rewards is None:
        return minibatch_rows(samples.mask.reshape(B, E * T), num_minibatches, rng)
    if num_minibatches > E:
        raise ValueError(
            f"got {num_minibatches} minibatches for {E} episodes per task; use at most one per episode, since "
            "the loss takes whole episodes; lower algorithm.num_minibatches"
        )
    order: Array = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.int64), (B, E)), axis=1)
    steps = np.arange(T, dtype=np.int64)
    return [(order[:, part::num_minibatches, None] * T + steps).reshape(B, -1) for part in range(num_minibatches)]


def build_chunks(
    steps: Steps,
    tasks_per_chunk: int,
    rows: Sequence[Array] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    recorded: Recorded = recorded_gaussian,
    parallel: ParallelMap = map,
) -> Sequence[Chunk]:
    """Split the tasks into chunks, and return the rows of each chunk as tensors.

    `rows` contains the row indices [B, n] to use from each rollout batch; the default is all rows except padding.
    """

    def chunk(tasks: slice) -> Chunk:
        chosen = [None] * len(steps) if rows is None else [indices[tasks] for indices in rows]
        pairs = zip(steps, chosen, strict=True)
        return Chunk(tasks.start, [task_rows(step, tasks, n, dtype, device, recorded) for step, n in pairs])

    return list(parallel(chunk, chunk_bounds(len(steps[0].episodes.lengths), tasks_per_chunk)))


def task_rows(
    step: Step,
    tasks: slice,
    rows: Array | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    recorded: Recorded = recorded_gaussian,
) -> TaskRows:
    """Return the rows of a slice of tasks as tensors.

    `rows` [b, n] selects from the E * T rows of each task; None selects all real rows. If the samples have adjusted
    rewards, the selected rows must form whole episodes, and None selects all episodes.
    """
    episodes, samples = step.episodes, step.samples
    E, T = episodes.rewards.shape[1:]
    mask = samples.mask[tasks].reshape(-1, E * T)
    if rows is None and samples.adjusted_rewards is None and not mask.all():
        # Take the real rows; tasks with fewer than the maximum are padded.
        most = int(np.count_nonzero(mask, axis=1).max())
        rows = np.argsort(mask == 0, axis=1, kind="stable")[:, :most]

    def select(values: Array, kind: torch.dtype = dtype) -> Tensor:
        chosen = values[tasks]
        b, _, T, *rest = chosen.shape
        flat = chosen.reshape(b, E * T, *rest)
        if rows is not None:
            flat = np.take_along_axis(flat, rows.reshape(*rows.shape, *(1 for _ in rest)), axis=1)
        return to_tensor(flat, kind, device)

    # Discrete actions index the log-probabilities, whatever their dtype.
    actions = select(episodes.actions, torch.int64 if episodes.actions.dtype == np.int64 else dtype)
    mask_rows = select(samples.mask)
    # State-independent parameters, such as a standard deviation, are stored once per task.
    acted = {
        name: to_tensor(value[tasks, None], dtype, device) if value.ndim == 2 else select(value)
        for name, value in episodes.behavior.items()
    }
    behavior = recorded(acted)
    adjusted = None
    if samples.adjusted_rewards is not None:
        shape = (len(mask_rows), -1, T)
        adjusted = EpisodeRows(select(samples.adjusted_rewards).reshape(shape), mask_rows.reshape(shape))
    observations, advantages = select(episodes.observations[:, :, :T]), select(samples.advantages)
    named = {"observations": observations, "actions": actions, "advantages": advantages}
    named |= {f"behavior {name}": value for name, value in acted.items()}
    if adjusted:
        named["adjusted rewards"] = adjusted.adjusted_rewards
    require_finite(named, tasks.start, "Look at its rollouts.", of=f"rollout batch {step.k}: ")
    weights = mask_rows / mask_rows.sum(1, keepdim=True).clamp(min=1)
    return TaskRows(observations, actions, advantages, weights, behavior, behavior.log_prob(actions), adjusted)


def require_finite(values: Mapping[str, Tensor], first_task: int, advice: str, *, of: str = "") -> None:
    """Raise NumericalError if a value is not finite; the message names its array, prefixed with `of`, and its task."""
    for name, value in values.items():
        finite = torch.isfinite(value.detach())
        if not finite.all():
            bad = int((~finite).reshape(len(value), -1).any(1).nonzero()[0])
            found = value.detach()[bad][~finite[bad]].reshape(-1)[0].item()
            task = first_task + bad
            raise NumericalError(f"{of}{name} of task {task} holds {found}; expected finite numbers. {advice}")


def to_tensor(array: Array, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Copy an array to a tensor; stored arrays may be read-only or broadcast views."""
    # Convert before moving: not every device supports float64.
    return torch.as_tensor(np.array(array, order="C")).to(dtype).to(device)
