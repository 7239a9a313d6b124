"""Classes with a loose object: reach, push, pick-place, basketball, shelf-place, peg-insert-side, sweeping."""

import numpy as np

from metaloom.pipeline.envs.metaworld.rows.caging import cage_and_grip, pick_up, sweep_along
from metaloom.pipeline.envs.metaworld.rows.scene import Moment, RowsEvaluation
from metaloom.pipeline.envs.metaworld.rows.shaping import fraction_of_box, hamacher, long_tail, norm
from metaloom.pipeline.types import Array

_RADIUS = 0.05
"""Default radius in m around the target within which an object has reached it."""

_NEAR = 0.03
"""m, between fingertips and object, where a class calls nothing else near."""


def reach(moment: Moment) -> RowsEvaluation:
    """Bring the fingertips to the target."""
    target = moment.start["target"]
    gap = norm(moment.fingertips - target)
    in_place = long_tail(gap - _RADIUS, norm(moment.start["hand"] - target))
    return RowsEvaluation(10 * in_place, gap <= _RADIUS, gap, in_place, grasp_reward=gap, near_object=gap)


def push(moment: Moment) -> RowsEvaluation:
    """Push the puck to the target."""
    gap, (distance, in_place) = _gap(moment), _in_place(moment, moment.start["target"], _RADIUS)
    caged = cage_and_grip(moment, radius=0.015, reach=0.05, level=0.005)
    held = (gap < 0.02) & (moment.opened > 0)
    rewards = 2 * caged + np.where(held, 1 + 2 * caged + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    grasped = _lifted(moment, 0.02)
    return RowsEvaluation(rewards, distance <= _RADIUS, distance, in_place, caged, gap <= _NEAR, grasped)


def pick_place(moment: Moment) -> RowsEvaluation:
    """Lift the puck to the target."""
    gap, (distance, in_place) = _gap(moment), _in_place(moment, moment.start["target"], _RADIUS)
    picked = pick_up(moment)
    carried = (gap < 0.02) & _lifted(moment, 0.01)
    rewards = hamacher(picked, in_place) + np.where(carried, 1 + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    return RowsEvaluation(rewards, distance <= 0.07, distance, in_place, picked, gap <= _NEAR, _lifted(moment, 0.02))


def basketball(moment: Moment) -> RowsEvaluation:
    """Drop the ball into the basket: the target is above it, and height counts double."""
    radius, gap = 0.08, _gap(moment)
    target = moment.scene["target"].copy()
    target[:, 2] = 0.3
    distance, in_place = _in_place(moment, target, radius, np.array([1.0, 1.0, 2.0]))
    caged = cage_and_grip(moment, radius=0.025, reach=0.06, level=0.005)
    caged, rewards = _carry(caged, in_place, (gap < 0.035) & _lifted(moment, 0.01))
    rewards = np.where(distance < radius, 10, rewards)
    return RowsEvaluation(rewards, distance <= radius, distance, in_place, caged, gap <= 0.05, _lifted(moment, 0.03))


def peg_insert_side(moment: Moment) -> RowsEvaluation:
    """Put the peg's head into the hole at the box's side; y and z count double."""
    radius, scale, scene, gap = 0.07, np.array([1.0, 2.0, 2.0]), moment.scene, _gap(moment)
    head, target, first = scene["peg_head"], moment.start["target"], moment.start["peg_head"]
    distance = norm((head - target) * scale)
    in_place = long_tail(distance - radius, norm((first - target) * scale))
    # Two boxes around the hole, into which the head does not go.
    one, two = (fraction_of_box(head, scene[f"empty_{box}"], scene[f"full_{box}"]) for box in ("1", "2"))
    in_place = hamacher(in_place, hamacher(two, one))
    lifted = _lifted(moment, 0.01)
    caged = cage_and_grip(moment, radius=0.0075, reach=0.03, level=0.005)
    caged, rewards = _carry(caged, in_place, (gap < 0.08) & lifted)
    success = distance <= radius
    rewards = np.where(success, 10, rewards)
    return RowsEvaluation(rewards, success, distance, in_place, caged, gap <= _NEAR, (gap < 0.02) & lifted)


def shelf_place(moment: Moment) -> RowsEvaluation:
    """Put the puck onto the shelf, past the space under it."""
    gap, target, (x, y, z) = _gap(moment), moment.start["target"], moment.object.T
    distance, in_place = _in_place(moment, target, _RADIUS)
    caged = cage_and_grip(moment, radius=0.02, reach=0.05, level=0.01, dense=False)
    rewards = hamacher(caged, in_place)
    # Under the shelf's board, reaching the target counts less the deeper and lower the puck is; past it, nothing.
    depth = y - (target[:, 1] - 3 * _RADIUS)
    low = (z > 0) & (z < 0.24) & (target[:, 0] - 0.15 < x) & (x < target[:, 0] + 0.15)
    under = low & (depth > 0) & (y < target[:, 1])
    loss = hamacher(np.where(under, depth / (3 * _RADIUS), 0), np.where(under, (0.24 - z) / 0.24, 0))
    in_place = np.where(low & (y > target[:, 1]), 0, np.maximum(in_place - loss, 0))
    rewards += np.where((gap < 0.025) & _lifted(moment, 0.01), 1 + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    return RowsEvaluation(rewards, distance <= 0.07, distance, in_place, caged, gap <= _NEAR, _lifted(moment, 0.02))


def sweep(moment: Moment) -> RowsEvaluation:
    """Sweep the cube off the table, to the target beside it."""
    return _sweep(moment, moment.start["target"], slack=0.01, level=0.005)


def sweep_into(moment: Moment) -> RowsEvaluation:
    """Sweep the cube into the hole in the table; its height does not count."""
    target = moment.start["target"].copy()
    target[:, 2] = moment.object[:, 2]
    return _sweep(moment, target, slack=0.005, level=0.01)


def _sweep(moment: Moment, target: Array, *, slack: float, level: float) -> RowsEvaluation:
    distance, in_place = _in_place(moment, target, _RADIUS)
    swept = sweep_along(moment, radius=0.02, slack=slack, level=level)
    rewards = np.where(distance < _RADIUS, 10, 2 * swept + 6 * hamacher(swept, in_place))
    near = _gap(moment) <= _NEAR
    return RowsEvaluation(rewards, distance <= _RADIUS, distance, in_place, swept, near, moment.opened > 0)


def _gap(moment: Moment) -> Array:
    """Return the distance between fingertips and object, [n] m."""
    return norm(moment.object - moment.fingertips)


def _in_place(moment: Moment, target: Array, radius: float, scale: Array | float = 1.0) -> tuple[Array, Array]:
    """Return the object's distances to the target on stretched axes, and their reward relative to the first one."""
    distance = norm((moment.object - target) * scale)
    return distance, long_tail(distance - radius, norm((moment.start["object"] - target) * scale))


def _lifted(moment: Moment, height: float) -> Array:
    """Return True where the object is more than a height (m) above its start and the gripper not quite closed, [n]."""
    return (moment.opened > 0) & (moment.object[:, 2] - height > moment.start["object"][:, 2])


def _carry(caged: Array, in_place: Array, lifted: Array) -> tuple[Array, Array]:
    """Return the reward for caging the object, full where it is lifted, and for that and reaching the target."""
    caged = np.where(lifted, 1, caged)
    return caged, hamacher(caged, in_place) + np.where(lifted, 1 + 5 * in_place, 0)
