"""An actor's belief about its task: a Gaussian posterior over a latent variable."""

import numpy as np

from metaloom.pipeline.policies.actors.contract import ActorSetup
from metaloom.pipeline.policies.inference import check_shapes
from metaloom.pipeline.types import Array, Params

BELIEF_MEAN, BELIEF_VARIANCE = "belief.mean", "belief.variance"


def draw_latents(setup: ActorSetup) -> Array | None:
    """Draw a latent for each episode from its task's posterior, [B, E, Z] float32; None where there is no posterior.

    Also the most likely actions are those under a draw: an episode without it would not be one of PEARL's.
    """
    params = setup.params.params
    if BELIEF_MEAN not in params:
        return None
    mean, std = params[BELIEF_MEAN], np.sqrt(params[BELIEF_VARIANCE])
    B, Z = mean.shape
    noise = np.empty((B, setup.num_rows, Z), np.float32)
    for b, e in np.ndindex(B, setup.num_rows):
        noise[b, e] = setup.belief_rng(b, e).standard_normal(Z, np.float32)
    return mean[:, None] + std[:, None] * noise


def latent_size(params: Params) -> int:
    """Return Z of the posterior [B, Z] among the parameters; 0 where they hold none.

    Raises:
        ValueError: a part of it is missing, has another shape or is not finite, or a variance is negative.
    """
    named = [params[name] for name in (BELIEF_MEAN, BELIEF_VARIANCE) if name in params]
    if not named:
        return 0
    size = named[0].shape[-1]
    check_shapes(params, {BELIEF_MEAN: (size,), BELIEF_VARIANCE: (size,)})
    smallest = params[BELIEF_VARIANCE].min()
    if smallest < 0:
        raise ValueError(f"policy parameter {BELIEF_VARIANCE}: found {smallest}; required variances of 0 or more")
    return size
