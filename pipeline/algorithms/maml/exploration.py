"""Credit for exploring before adaptation: the term of E-MAML. Stadie et al. 2018, arXiv:1803.01118."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from metaloom.pipeline.algorithms.maml.losses import LOSS
from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
from metaloom.pipeline.algorithms.maml.rows import Chunk
from metaloom.pipeline.algorithms.maml.settings import Exploration
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Array, Step


def with_exploration(objective: Objective, settings: Exploration, steps: Sequence[Step]) -> Objective:
    """Return the objective with -credit Σ_k mean(log π_{θ^k}(a|o)) added to its loss, where settings ask for it."""
    if not settings.exploration:
        return objective
    credit = exploration_credit(steps)
    if settings.e_maml_scale == "sum":
        credit = credit * steps[-1].samples.mask.shape[1]
    num_rounds = len(steps) - 1 if settings.exploration_rounds == "all" else 1

    def credited(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
        values = objective(current, chunk)
        pairs = list(zip(current, chunk.rounds, strict=True))[:num_rounds]
        log_likelihood = sum(rows.mean(now.log_prob(rows.actions)) for now, rows in pairs)
        of_chunk = credit[chunk.first_task : chunk.first_task + len(chunk)]
        return values | {LOSS: values[LOSS] - values[LOSS].new_tensor(of_chunk) * log_likelihood}

    return credited


def exploration_credit(steps: Sequence[Step]) -> Array:
    """Return how well every task went after adaptation, relative to the others: [B].

    The mean over a task's real steps of rewards with zero mean and unit standard deviation over all tasks.
    """
    rewards, mask = steps[-1].episodes.rewards.astype(np.float64), steps[-1].samples.mask
    real = rewards[mask == 1]
    standardized = (rewards - real.mean()) / (real.std() + 1e-8)
    return (standardized * mask).sum((1, 2)) / mask.sum((1, 2))
