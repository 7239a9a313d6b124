"""The classes in ML10: their rewards, and the simulator quantities that these depend on.

The rewards implement version v2, the package's default.
"""

import numpy as np

from metaloom.pipeline.envs.metaworld.rows.scene import (
    Moment,
    RowsEvaluation,
    RowTask,
    Source,
    beyond,
    fraction_of_box,
    gaussian,
    hamacher,
    long_tail,
    norm,
)
from metaloom.pipeline.types import Array

# Closing the gripper around an object

# Left pad, right pad: the object's y is below that of the left pad and above that of the right pad.
_SIDES = np.array([1.0, -1.0])


def closing(moment: Moment) -> Array:
    """Return how strongly the gripper closes, [n], from 0 to 1."""
    return np.minimum(np.maximum(moment.actions[:, 3], 0), 1)


def cage_and_grip(moment: Moment, *, radius: float, reach: float, level: float, dense: bool = True) -> Array:
    """Return the reward for caging and gripping that most classes use, [n].

    The lateral reward for a pad depends on its distance to the object; the margin is its distance to the object's
    initial position.

    Args:
        moment: State of the rows.
        radius: Radius of the object, in m.
        reach: Distance within which a pad counts as close to the object, in m.
        level: Distance in x and z within which the fingertips count as being at the object, in m.
        dense: True if caging without gripping earns half the reward.
    """
    pads = moment.scene["pads_y"]
    gaps = np.abs(pads - moment.object[:, 1:2])
    margins = np.abs(pads - moment.start["object"][:, 1:2]) - reach
    sides = long_tail(beyond(gaps, radius, reach), margins)
    caging = hamacher(hamacher(sides[:, 0], sides[:, 1]), _level_with(moment, level))
    both = hamacher(caging, np.where(caging > 0.97, closing(moment), 0))
    return (both + caging) / 2 if dense else both


def pick_up(moment: Moment) -> Array:
    """Return the reward for caging and gripping in pick-place, [n]."""
    caging = hamacher(_between_pads(moment, 0.015, 0.05), _level_with(moment, 0.005))
    return (hamacher(caging, np.where(caging > 0.97, closing(moment), 0)) + caging) / 2


def _between_pads(moment: Moment, near: float, far: float) -> Array:
    """Return the reward for having both pads between `near` and `far` from the object, each on its own side, [n].

    The intended margin is the pads' initial distance to the object. The official classes keep a view instead of a copy,
    so the margin is the current distance, and rewards differ from the intended ones by up to 0.09 per step. This
    function reproduces the package.
    """
    gaps = (moment.scene["pads_y"] - moment.object[:, 1:2]) * _SIDES
    margins = np.abs(gaps) - 0.05
    sides = long_tail(beyond(gaps, near, far), margins)
    return hamacher(sides[:, 0], sides[:, 1])


def _level_with(moment: Moment, level: float) -> Array:
    """Return the reward for bringing the fingertips near the object in x and z; the margin is the initial distance."""
    first = _length_xz(moment.start["object"] - moment.start["fingertips"])
    return long_tail(_length_xz(moment.fingertips - moment.object) - level, first - level)


def _length_xz(vectors: Array) -> Array:
    x, z = vectors[:, 0], vectors[:, 2]
    return np.sqrt(x * x + z * z)


# Classes with a loose object

_RADIUS = 0.05  # default distance in m within which an object has reached its target

_NEAR = 0.03  # default distance in m within which the fingertips count as near the object


def reach(moment: Moment) -> RowsEvaluation:
    """Evaluate reach: move the fingertips to the target."""
    target = moment.start["target"]
    gap = norm(moment.fingertips - target)
    in_place = long_tail(gap - _RADIUS, norm(moment.start["hand"] - target))
    return RowsEvaluation(10 * in_place, gap <= _RADIUS, gap, in_place, grasp_reward=gap, near_object=gap)


def push(moment: Moment) -> RowsEvaluation:
    """Evaluate push: push the puck to the target."""
    gap, (distance, in_place) = _gap(moment), _in_place(moment, moment.start["target"], _RADIUS)
    caged = cage_and_grip(moment, radius=0.015, reach=0.05, level=0.005)
    held = (gap < 0.02) & (moment.opened > 0)
    rewards = 2 * caged + np.where(held, 1 + 2 * caged + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    grasped = _lifted(moment, 0.02)
    return RowsEvaluation(rewards, distance <= _RADIUS, distance, in_place, caged, gap <= _NEAR, grasped)


def pick_place(moment: Moment) -> RowsEvaluation:
    """Evaluate pick-place: lift the puck to the target."""
    gap, (distance, in_place) = _gap(moment), _in_place(moment, moment.start["target"], _RADIUS)
    picked = pick_up(moment)
    carried = (gap < 0.02) & _lifted(moment, 0.01)
    rewards = hamacher(picked, in_place) + np.where(carried, 1 + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    return RowsEvaluation(rewards, distance <= 0.07, distance, in_place, picked, gap <= _NEAR, _lifted(moment, 0.02))


def basketball(moment: Moment) -> RowsEvaluation:
    """Evaluate basketball: drop the ball into the basket. The target is above the basket, and height counts double."""
    radius, gap = 0.08, _gap(moment)
    target = moment.scene["target"].copy()
    target[:, 2] = 0.3
    distance, in_place = _in_place(moment, target, radius, np.array([1.0, 1.0, 2.0]))
    caged = cage_and_grip(moment, radius=0.025, reach=0.06, level=0.005)
    caged, rewards = _carry(caged, in_place, (gap < 0.035) & _lifted(moment, 0.01))
    rewards = np.where(distance < radius, 10, rewards)
    return RowsEvaluation(rewards, distance <= radius, distance, in_place, caged, gap <= 0.05, _lifted(moment, 0.03))


def peg_insert_side(moment: Moment) -> RowsEvaluation:
    """Evaluate peg-insert-side: insert the peg's head into the hole in the box. Distances in y and z count double."""
    radius, scale, scene, gap = 0.07, np.array([1.0, 2.0, 2.0]), moment.scene, _gap(moment)
    head, target, first = scene["peg_head"], moment.start["target"], moment.start["peg_head"]
    distance = norm((head - target) * scale)
    in_place = long_tail(distance - radius, norm((first - target) * scale))
    # Two boxes around the hole, which the head must not enter.
    one, two = (fraction_of_box(head, scene[f"empty_{box}"], scene[f"full_{box}"]) for box in ("1", "2"))
    in_place = hamacher(in_place, hamacher(two, one))
    lifted = _lifted(moment, 0.01)
    caged = cage_and_grip(moment, radius=0.0075, reach=0.03, level=0.005)
    caged, rewards = _carry(caged, in_place, (gap < 0.08) & lifted)
    success = distance <= radius
    rewards = np.where(success, 10, rewards)
    return RowsEvaluation(rewards, success, distance, in_place, caged, gap <= _NEAR, (gap < 0.02) & lifted)


def shelf_place(moment: Moment) -> RowsEvaluation:
    """Evaluate shelf-place: put the puck on the shelf, not under it."""
    gap, target, (x, y, z) = _gap(moment), moment.start["target"], moment.object.T
    distance, in_place = _in_place(moment, target, _RADIUS)
    caged = cage_and_grip(moment, radius=0.02, reach=0.05, level=0.01, dense=False)
    rewards = hamacher(caged, in_place)
    # Under the shelf, the reward decreases as the puck moves deeper and lower; behind the shelf, it is 0.
    depth = y - (target[:, 1] - 3 * _RADIUS)
    low = (z > 0) & (z < 0.24) & (target[:, 0] - 0.15 < x) & (x < target[:, 0] + 0.15)
    under = low & (depth > 0) & (y < target[:, 1])
    loss = hamacher(np.where(under, depth / (3 * _RADIUS), 0), np.where(under, (0.24 - z) / 0.24, 0))
    in_place = np.where(low & (y > target[:, 1]), 0, np.maximum(in_place - loss, 0))
    rewards += np.where((gap < 0.025) & _lifted(moment, 0.01), 1 + 5 * in_place, 0)
    rewards = np.where(distance < _RADIUS, 10, rewards)
    return RowsEvaluation(rewards, distance <= 0.07, distance, in_place, caged, gap <= _NEAR, _lifted(moment, 0.02))


def sweep(moment: Moment) -> RowsEvaluation:
    """Evaluate sweep: sweep the cube off the table to the target beside the table."""
    return _sweep(moment, moment.start["target"], slack=0.01, level=0.005)


def sweep_into(moment: Moment) -> RowsEvaluation:
    """Evaluate sweep-into: sweep the cube into the hole in the table. Height does not count."""
    target = moment.start["target"].copy()
    target[:, 2] = moment.object[:, 2]
    return _sweep(moment, target, slack=0.005, level=0.01)


def _sweep(moment: Moment, target: Array, *, slack: float, level: float) -> RowsEvaluation:
    """Evaluate sweeping of a cube, for which the pads must be close but need not press.

    `slack` is the gap between cube and pad that still counts as gripping, and `level` the distance in x and z as in
    `cage_and_grip`, both in m.
    """
    radius = 0.02
    distance, in_place = _in_place(moment, target, _RADIUS)
    caging = hamacher(_between_pads(moment, radius, 0.05), _level_with(moment, level))
    swept = (caging + np.where(caging > 0.95, _between_pads(moment, radius, radius + slack), 0)) / 2
    rewards = np.where(distance < _RADIUS, 10, 2 * swept + 6 * hamacher(swept, in_place))
    near = _gap(moment) <= _NEAR
    return RowsEvaluation(rewards, distance <= _RADIUS, distance, in_place, swept, near, moment.opened > 0)


def _gap(moment: Moment) -> Array:
    """Return the distance between the fingertips and the object, [n] in m."""
    return norm(moment.object - moment.fingertips)


def _in_place(moment: Moment, target: Array, radius: float, scale: Array | float = 1.0) -> tuple[Array, Array]:
    """Return the object's scaled distance to the target, and a reward relative to the initial distance, [n] each."""
    distance = norm((moment.object - target) * scale)
    return distance, long_tail(distance - radius, norm((moment.start["object"] - target) * scale))


def _lifted(moment: Moment, height: float) -> Array:
    """Return a mask [n], True where the object is above its start by more than `height` m and the gripper is open."""
    return (moment.opened > 0) & (moment.object[:, 2] - height > moment.start["object"][:, 2])


def _carry(caged: Array, in_place: Array, lifted: Array) -> tuple[Array, Array]:
    """Return the caging reward, set to 1 where the object is lifted, and the total reward, including for the target."""
    caged = np.where(lifted, 1, caged)
    return caged, hamacher(caged, in_place) + np.where(lifted, 1 + 5 * in_place, 0)


# Classes whose object is fixed to the scene


def door_open(moment: Moment) -> RowsEvaluation:
    """Evaluate door-open: pull the door open by its handle. The angle of an open door is negative."""
    angle, ready = moment.scene["angle"], _ready_to_pull(moment)
    opened = 0.2 * (angle < -np.pi / 90) + 0.8 * long_tail(beyond(2 / 3 * np.pi + angle, 0, 0.5), np.pi / 3)
    grab = (np.minimum(np.maximum(moment.actions[:, 3], -1), 1) + 1) / 2
    success = np.abs(moment.object[:, 0] - moment.start["target"][:, 0]) <= 0.08
    rewards = np.where(success, 10, 2 * hamacher(ready, grab) + 8 * opened)
    return RowsEvaluation(rewards, success, 0.0, opened, grab, ready, grab >= 0.5)


def _ready_to_pull(moment: Moment) -> Array:
    """Return the reward for a hand between handle and door and above the funnel around the handle, [n]."""
    from_handle = moment.hand - moment.object - np.array([-0.05, 0, 0])
    away = norm(from_handle[:, :2]) - 0.12
    # Inside the funnel's mouth, the floor is at 0.
    floor = np.where(away > 0, 0.04 * np.log(np.where(away > 0, away, 1)) + 0.4, 0)
    above = long_tail(floor - moment.hand[:, 2] - 0.01, floor / 2)
    return hamacher(above, long_tail(norm(from_handle - np.array([0.05, 0.03, -0.01])) - 0.06, 0.5))


def door_close(moment: Moment) -> RowsEvaluation:
    """Evaluate door-close: push the door shut."""
    target = moment.start["target"]
    distance = norm(moment.object - target)
    in_place = gaussian(distance - 0.05, norm(moment.start["object"] - target))
    hand_in_place = gaussian(
        norm(moment.fingertips - target) - 0.0125, norm(moment.start["hand"] - moment.object) + 0.1
    )
    rewards = np.where(distance < 0.05, 10, 3 * hand_in_place + 6 * in_place)
    return RowsEvaluation(rewards, distance <= 0.08, distance, hand_in_place, grasp_reward=1.0, near_object=0.0)


def drawer_close(moment: Moment) -> RowsEvaluation:
    """Evaluate drawer-close: push the drawer shut with a closed gripper."""
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    distance = norm(moment.object - start["target"])
    in_place = long_tail(distance - 0.05, norm(start["object"] - start["target"]) - 0.05)
    near = gaussian(gap - 0.005, norm(start["object"] - start["fingertips"]) - 0.005)
    near = hamacher(near, closing(moment))
    success = distance <= 0.065
    rewards = 10 * np.where(success, 1, hamacher(near, in_place))
    return RowsEvaluation(rewards, success, distance, in_place, near, gap <= 0.01)


def drawer_open(moment: Moment) -> RowsEvaluation:
    """Evaluate drawer-open: pull the drawer out 0.2 m. The hand's x and y count triple, so that it comes from above."""
    scale, target, gap = np.array([3.0, 3.0, 1.0]), moment.start["target"], moment.object - moment.hand
    distance = norm(moment.object - target)
    opening = long_tail(distance - 0.02, 0.2)
    first = (target + np.array([0, 0.2, 0]) - moment.start["fingertips"]) * scale
    caging = long_tail(norm(gap * scale) - 0.01, norm(first))
    near = norm(gap) <= 0.03
    return RowsEvaluation(5 * (caging + opening), distance <= 0.03, distance, opening, caging, near, moment.opened > 0)


def button_press_topdown(moment: Moment) -> RowsEvaluation:
    """Evaluate button-press-topdown: press the button from above with a closed gripper.

    The margin of the fingertips' distance is the distance between their start and the button's *current* position, as
    in the official class.
    """
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    depth = np.abs(start["target"][:, 2] - moment.object[:, 2])
    near = long_tail(gap - 0.01, norm(moment.object - start["fingertips"]))
    pressed = long_tail(depth - 0.005, start["depth"])
    rewards = 5 * hamacher(1 - moment.opened, near) + np.where(gap <= 0.03, 5 * pressed, 0)
    return RowsEvaluation(rewards, depth <= 0.024, depth, pressed, near, gap <= 0.05, moment.opened > 0)


def window_open(moment: Moment) -> RowsEvaluation:
    """Evaluate window-open: slide the window open along x."""
    start, gap = moment.start, norm(moment.object - moment.fingertips)
    distance = np.abs(moment.object[:, 0] - start["target"][:, 0])
    in_place = long_tail(distance - 0.05, np.abs(start["object"][:, 0] - start["target"][:, 0]) - 0.05)
    near = long_tail(gap - 0.02, norm(start["handle"] - start["fingertips"]) - 0.02)
    return RowsEvaluation(10 * hamacher(near, in_place), distance <= 0.05, distance, in_place, near, gap <= 0.05)


def lever_pull(moment: Moment) -> RowsEvaluation:
    """Evaluate lever-pull: lift the lever until it points up, with the shoulder under it; x and z count four times."""
    scale, shoulder, start = np.array([4.0, 1.0, 4.0]), np.array([0, 0.055, 0.07]), moment.start
    gap = norm((moment.hand + shoulder - moment.object) * scale)
    ready = long_tail(gap - 0.02, norm((start["fingertips"] + shoulder - start["lever"]) * scale))
    in_place = long_tail(norm(moment.object - start["target"]) - 0.04, norm(start["lever"] - start["target"]))
    error = np.abs(moment.scene["angle"] + np.pi / 2)
    # This quantity is reported but not rewarded.
    engaged = long_tail(error - np.pi / 48, np.pi / 2 - np.pi / 12)
    rewards = 10 * hamacher(ready, in_place)
    return RowsEvaluation(rewards, error <= np.pi / 24, gap, engaged, ready, gap < 0.03, ready > 0.9)


# Inputs

# Sources of the observed position and orientation of each object.
_PUCK = Source("xpos", "obj"), Source("geom_xmat", "objGeom")
_CUBE = Source("xpos", "obj"), Source("xquat", "obj")
_BALL = Source("xpos", "bsktball"), Source("xquat", "bsktball")
_PEG = Source("site_xpos", "pegGrasp"), Source("site_xmat", "pegGrasp")
_DOOR = Source("geom_xpos", "handle"), Source("geom_xmat", "handle")
_DRAWER = Source("xpos", "drawer_link"), Source("xquat", "drawer_link")
_BUTTON = Source("xpos", "button"), Source("xquat", "button")
_WINDOW = Source("site_xpos", "handleOpenStart"), None
_LEVER = Source("site_xpos", "leverStart"), Source("geom_xmat", "objGeom")

_TARGET = {"target": "_target_pos"}
_REACHED = {**_TARGET, "fingertips": "init_tcp"}
_CARRIED = {**_REACHED, "object": "obj_init_pos"}

_HEAD_AND_HOLE = {
    "peg_head": Source("site_xpos", "pegHead"),
    **{
        f"{role}_{box}": Source("site_xpos", f"{corner}_corner_collision_box_{box}")
        for box in (1, 2)
        for role, corner in (("empty", "bottom_right"), ("full", "top_left"))
    },
}

TRAIN_ROWS = {
    "reach": RowTask(reach, *_PUCK, start={**_TARGET, "hand": "hand_init_pos"}),
    "push": RowTask(push, *_PUCK, start=_CARRIED, touched=True),
    "pick-place": RowTask(pick_place, *_PUCK, start=_CARRIED, touched=True),
    "door-open": RowTask(door_open, *_DOOR, sources={"angle": Source("qpos", "doorjoint")}, start=_TARGET),
    "drawer-close": RowTask(drawer_close, _DRAWER[0], None, offset=(0, -0.16, 0.05), start=_CARRIED),
    "button-press-topdown": RowTask(
        button_press_topdown, *_BUTTON, offset=(0, 0, 0.193), start={**_REACHED, "depth": "_obj_to_target_init"}
    ),
    "peg-insert-side": RowTask(
        peg_insert_side, *_PEG, sources=_HEAD_AND_HOLE, start={**_CARRIED, "peg_head": "peg_head_pos_init"}
    ),
    "window-open": RowTask(window_open, *_WINDOW, start={**_CARRIED, "handle": "window_handle_pos_init"}),
    "sweep": RowTask(sweep, *_CUBE, start=_CARRIED, touched=True),
    # The official class keeps a view of the target site's current position, which does not move.
    "basketball": RowTask(
        basketball,
        *_BALL,
        sources={"target": Source("site_xpos", "goal")},
        start={"object": "obj_init_pos", "fingertips": "init_tcp"},
    ),
}
TEST_ROWS = {
    "drawer-open": RowTask(drawer_open, *_DRAWER, offset=(0, -0.16, 0), start=_REACHED),
    "door-close": RowTask(door_close, *_DOOR, start={**_TARGET, "object": "obj_init_pos", "hand": "hand_init_pos"}),
    "shelf-place": RowTask(shelf_place, *_PUCK, start=_CARRIED, touched=True),
    "sweep-into": RowTask(sweep_into, *_PUCK, start=_CARRIED, touched=True),
    "lever-pull": RowTask(
        lever_pull,
        *_LEVER,
        sources={"angle": Source("qpos", "LeverAxis")},
        start={**_REACHED, "lever": "_lever_pos_init"},
    ),
}

ROW_TASKS = {**TRAIN_ROWS, **TEST_ROWS}  # class name, without the package's version suffix -> rules of the class
