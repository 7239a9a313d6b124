"""Rewards for closing the gripper around an object."""

import numpy as np

from metaloom.pipeline.envs.metaworld.rows.scene import Moment
from metaloom.pipeline.envs.metaworld.rows.shaping import beyond, hamacher, long_tail
from metaloom.pipeline.types import Array

# Left pad, right pad: the object lies at smaller y than the one and at greater y than the other.
_SIDES = np.array([1.0, -1.0])


def closing(moment: Moment) -> Array:
    """Return how hard the action closes the gripper, from 0 to 1, [n]."""
    return np.minimum(np.maximum(moment.actions[:, 3], 0), 1)


def cage_and_grip(moment: Moment, *, radius: float, reach: float, level: float, dense: bool = True) -> Array:
    """Return the reward for caging and gripping that most classes use, [n].

    Sideways, the pads are compared with the object by distances that grow on either side, and the margin of that
    comparison is how far a pad is from where the object lay at first.

    Args:
        moment: The rows.
        radius: m, of the object.
        reach: m, up to which a pad is close to the object.
        level: m, up to which the fingertips are at the object in x and z.
        dense: True if caging without gripping is worth half.
    """
    pads = moment.scene["pads_y"]
    gaps = np.abs(pads - moment.object[:, 1:2])
    margins = np.abs(pads - moment.start["object"][:, 1:2]) - reach
    sides = long_tail(beyond(gaps, radius, reach), margins)
    caging = hamacher(hamacher(sides[:, 0], sides[:, 1]), _level_with(moment, level))
    both = hamacher(caging, np.where(caging > 0.97, closing(moment), 0))
    return (both + caging) / 2 if dense else both


def pick_up(moment: Moment) -> Array:
    """Return the reward for caging and gripping as in pick-place, [n]."""
    caging = hamacher(_between_pads(moment, 0.015, 0.05), _level_with(moment, 0.005))
    return (hamacher(caging, np.where(caging > 0.97, closing(moment), 0)) + caging) / 2


def sweep_along(moment: Moment, *, radius: float, slack: float, level: float) -> Array:
    """Return the reward as in the sweeping classes, [n]: gripping is for the pads to be close, not to press.

    Args:
        moment: The rows.
        radius: m, of the object.
        slack: m, between the object and a pad that still grips it.
        level: Level as of `cage_and_grip`.
    """
    caging = hamacher(_between_pads(moment, radius, 0.05), _level_with(moment, level))
    return (caging + np.where(caging > 0.95, _between_pads(moment, radius, radius + slack), 0)) / 2


def _between_pads(moment: Moment, near: float, far: float) -> Array:
    """Return how well both pads are from `near` to `far` beside the object, each on its side, [n].

    The margin should be how far the pads were from the object when the episode began. The official classes keep a view
    of the pads' present positions under the name of the first ones, so it is how far they are now; rewards differ by up
    to 0.09 per step from the intended ones. This function computes what the package computes.
    """
    gaps = (moment.scene["pads_y"] - moment.object[:, 1:2]) * _SIDES
    margins = np.abs(gaps) - 0.05
    sides = long_tail(beyond(gaps, near, far), margins)
    return hamacher(sides[:, 0], sides[:, 1])


def _level_with(moment: Moment, level: float) -> Array:
    """Return how close the fingertips are to the object in x and z, relative to their first distance, [n]."""
    first = _length_xz(moment.start["object"] - moment.start["fingertips"])
    return long_tail(_length_xz(moment.fingertips - moment.object) - level, first - level)


def _length_xz(vectors: Array) -> Array:
    x, z = vectors[:, 0], vectors[:, 2]
    return np.sqrt(x * x + z * z)
