"""The classes whose object is fixed to the scene: doors, drawers, a button, a window, a lever."""

import numpy as np

from metaloom.pipeline.envs.metaworld.rows.caging import closing
from metaloom.pipeline.envs.metaworld.rows.scene import Moment, RowsEvaluation
from metaloom.pipeline.envs.metaworld.rows.shaping import beyond, gaussian, hamacher, long_tail, norm
from metaloom.pipeline.types import Array


def door_open(moment: Moment) -> RowsEvaluation:
    """Pull the door open by its handle; the angle is negative where it is open."""
    angle, ready = moment.scene["angle"], _ready_to_pull(moment)
    opened = 0.2 * (angle < -np.pi / 90) + 0.8 * long_tail(beyond(2 / 3 * np.pi + angle, 0, 0.5), np.pi / 3)
    grab = (np.minimum(np.maximum(moment.actions[:, 3], -1), 1) + 1) / 2
    success = np.abs(moment.object[:, 0] - moment.start["target"][:, 0]) <= 0.08
    rewards = np.where(success, 10, 2 * hamacher(ready, grab) + 8 * opened)
    return RowsEvaluation(rewards, success, 0.0, opened, grab, ready, grab >= 0.5)


def _ready_to_pull(moment: Moment) -> Array:
    """Return how well the hand is between handle and door, and above a funnel that protects the handle, [n]."""
    from_handle = moment.hand - moment.object - np.array([-0.05, 0, 0])
    away = norm(from_handle[:, :2]) - 0.12
    # Inside of the funnel's mouth the floor is 0.
    floor = np.where(away > 0, 0.04 * np.log(np.where(away > 0, away, 1)) + 0.4, 0)
    above = long_tail(floor - moment.hand[:, 2] - 0.01, floor / 2)
    return hamacher(above, long_tail(norm(from_handle - np.array([0.05, 0.03, -0.01])) - 0.06, 0.5))


def door_close(moment: Moment) -> RowsEvaluation:
    """Push the door shut."""
    target = moment.start["target"]
    distance = norm(moment.object - target)
    in_place = gaussian(distance - 0.05, norm(moment.start["object"] - target))
    hand_in_place = gaussian(
        norm(moment.fingertips - target) - 0.0125, norm(moment.start["hand"] - moment.object) + 0.1
    )
    rewards = np.where(distance < 0.05, 10, 3 * hand_in_place + 6 * in_place)
    return RowsEvaluation(rewards, distance <= 0.08, distance, hand_in_place, grasp_reward=1.0, near_object=0.0)


def drawer_close(moment: Moment) -> RowsEvaluation:
    """Push the drawer shut, with a closed gripper."""
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    distance = norm(moment.object - start["target"])
    in_place = long_tail(distance - 0.05, norm(start["object"] - start["target"]) - 0.05)
    near = gaussian(gap - 0.005, norm(start["object"] - start["fingertips"]) - 0.005)
    near = hamacher(near, closing(moment))
    success = distance <= 0.065
    rewards = 10 * np.where(success, 1, hamacher(near, in_place))
    return RowsEvaluation(rewards, success, distance, in_place, near, gap <= 0.01)


def drawer_open(moment: Moment) -> RowsEvaluation:
    """Pull the drawer out, 0.2 m; the hand's x and y count triple, so that it comes down upon the handle."""
    scale, target, gap = np.array([3.0, 3.0, 1.0]), moment.start["target"], moment.object - moment.hand
    distance = norm(moment.object - target)
    opening = long_tail(distance - 0.02, 0.2)
    first = (target + np.array([0, 0.2, 0]) - moment.start["fingertips"]) * scale
    caging = long_tail(norm(gap * scale) - 0.01, norm(first))
    near = norm(gap) <= 0.03
    return RowsEvaluation(5 * (caging + opening), distance <= 0.03, distance, opening, caging, near, moment.opened > 0)


def button_press_topdown(moment: Moment) -> RowsEvaluation:
    """Press the button from above, with a closed gripper.

    The nearness of the fingertips is relative to their first distance from where the button is *now*, as in the
    official class.
    """
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    depth = np.abs(start["target"][:, 2] - moment.object[:, 2])
    near = long_tail(gap - 0.01, norm(moment.object - start["fingertips"]))
    pressed = long_tail(depth - 0.005, start["depth"])
    rewards = 5 * hamacher(1 - moment.opened, near) + np.where(gap <= 0.03, 5 * pressed, 0)
    return RowsEvaluation(rewards, depth <= 0.024, depth, pressed, near, gap <= 0.05, moment.opened > 0)


def window_open(moment: Moment) -> RowsEvaluation:
    """Slide the window open, along x."""
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    distance = np.abs(moment.object[:, 0] - start["target"][:, 0])
    in_place = long_tail(distance - 0.05, np.abs(start["object"][:, 0] - start["target"][:, 0]) - 0.05)
    near = long_tail(gap - 0.02, norm(start["handle"] - start["fingertips"]) - 0.02)
    return RowsEvaluation(10 * hamacher(near, in_place), distance <= 0.05, distance, in_place, near, gap <= 0.05)


def lever_pull(moment: Moment) -> RowsEvaluation:
    """Lift the lever until it points up, with the arm's shoulder under it; x and z of that count four times."""
    scale, shoulder, start = np.array([4.0, 1.0, 4.0]), np.array([0, 0.055, 0.07]), moment.start
    gap = norm((moment.hand + shoulder - moment.object) * scale)
    ready = long_tail(gap - 0.02, norm((start["fingertips"] + shoulder - start["lever"]) * scale))
    in_place = long_tail(norm(moment.object - start["target"]) - 0.04, norm(start["lever"] - start["target"]))
    error = np.abs(moment.scene["angle"] + np.pi / 2)
    # Told, though no reward is made of it.
    engaged = long_tail(error - np.pi / 48, np.pi / 2 - np.pi / 12)
    rewards = 10 * hamacher(ready, in_place)
    return RowsEvaluation(rewards, error <= np.pi / 24, gap, engaged, ready, gap < 0.03, ready > 0.9)
